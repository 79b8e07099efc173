"""Prompt encoding: the pipeline's encode methods are called once per distinct prompt, and what they return is kept.

Of a prompt with images, the recording also has what the methods `prepare_...` return, such as the images' latents. Of
`prepare_latents` it has all but the state, of which only the dtype is kept.
"""

import copy
import hashlib
import inspect
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import expanded, regular_bytes, write_atomic
from flow_grpo.image_prompt import images_of, prompt_key, with_images
from flow_grpo.policy.families import Family
from flow_grpo.policy.interception import PROBE_PROMPTS, StopAtTransformer
from flow_grpo.policy.library_logging import quietly
from flow_grpo.text import first_line

EncoderOutputs = list[tuple[str, Any]]  # (method, what it returned), in the order of the calls
SHARED, LIST, CUMULATIVE, ABSENT = "shared", "rows", "cumulative", "absent"  # in place of an axis, see `infer_batch_axes`
ENCODE_BATCH = 8  # prompts in a pass of the text encoders, if they are all padded to one length
# components that only prompts need, by the beginning of their name
ENCODER_PREFIXES = ("text_encoder", "vision_language_encoder")
MAX_IN_MEMORY = 512  # prompts, 3 MB each for SD3.5; or those of the largest batch, which a step encodes several times
LAYOUT = "\0layout"  # the key of what applies to all prompts: their batch axes, and whether they are padded to one length


def infer_batch_axes(single: Any, double: Any) -> Any:
    """Infer the batch axes of a structure: `single` was returned for a prompt, `double` for that prompt twice.

    Returns the same structure with, for each tensor, its batch axis, SHARED, or CUMULATIVE (lengths summed up, from 0 on); for a
    list with an item per prompt, LIST; for None, ABSENT; for anything else, SHARED.
    """
    if single is None:
        return ABSENT
    if isinstance(single, Tensor) and isinstance(double, Tensor):
        grown = [axis for axis, (a, b) in enumerate(zip(single.shape, double.shape, strict=True)) if a != b]
        if not grown:
            return SHARED
        if single.ndim == 1 and len(single) == 2 and len(double) == 3 and single[0] == double[0] == 0:
            return CUMULATIVE
        if len(grown) == 1 and double.shape[grown[0]] == 2 * single.shape[grown[0]]:
            return grown[0]
        raise FlowGRPOError(
            f"prompts become tensors of shape {tuple(single.shape)} alone and {tuple(double.shape)} in pairs."
        )
    if isinstance(single, (list, tuple)) and isinstance(double, (list, tuple)):
        if len(single) != len(double):
            return LIST
        return [infer_batch_axes(a, b) for a, b in zip(single, double, strict=True)]
    if isinstance(single, dict):
        raise FlowGRPOError(f"encoded prompts contain a {type(single).__name__}; only lists and tensors are understood.")
    return SHARED


def merge_axes(axes: Any, other_axes: Any) -> Any:
    """The axes of two prompts combined: a mask may be absent for one of them."""
    if axes == ABSENT:
        return other_axes
    if isinstance(axes, list) and isinstance(other_axes, list):
        return [merge_axes(a, b) for a, b in zip(axes, other_axes, strict=True)]
    return axes


def collate(parts: list, axes: Any) -> Any:
    """The structure of a batch, from the structures of its rows."""
    first = parts[0]
    if first is None or axes in (SHARED, ABSENT):
        return first
    if axes == LIST:
        return type(first)(item for part in parts for item in part)
    if axes == CUMULATIVE:
        steps = torch.cat([part.diff() for part in parts])
        return torch.cat([first[:1], steps.cumsum(0).to(first.dtype)])
    if isinstance(axes, int):
        return torch.cat(parts, axes)
    columns = zip(*parts, strict=True)
    return type(first)(collate(list(column), axis) for column, axis in zip(columns, axes, strict=True))


def select_row(structure: Any, axes: Any, row: int, count: int) -> Any:
    """One row of a structure of `count` rows: the inverse of `collate`."""
    if structure is None or axes in (SHARED, ABSENT):
        return structure
    if axes == LIST:
        size = len(structure) // count
        return structure[row * size : (row + 1) * size]
    if axes == CUMULATIVE:
        return structure[row : row + 2] - structure[row]
    if isinstance(axes, int):
        size = structure.shape[axes] // count
        return structure.narrow(axes, row * size, size)
    return type(structure)(select_row(part, axis, row, count) for part, axis in zip(structure, axes, strict=True))


def signature(structure: Any) -> Any:
    """The shapes of a structure's tensors. Structures with equal signatures can share a batch."""
    if isinstance(structure, Tensor):
        return tuple(structure.shape)
    if isinstance(structure, (list, tuple)):
        return tuple(signature(part) for part in structure)
    return None


def to_device(structure: Any, device: torch.device) -> Any:
    """The same structure with its tensors on a device. A copy to a GPU is not waited for."""
    return _map_tensors(structure, lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))


def copy_to_cpu(structure: Any) -> Any:
    """The same structure with copies of its tensors on the CPU. A GPU is waited for once, not for each tensor."""
    on_device: list[Tensor] = []
    _map_tensors(structure, lambda tensor: on_device.append(tensor) if tensor.device.type != "cpu" else None)
    copies: dict[int, Tensor] = {}
    if on_device:
        flat = [tensor.reshape(-1).view(torch.uint8) for tensor in on_device]
        parts = torch.cat(flat).cpu().split([len(part) for part in flat])
        copies = {id(tensor): part for tensor, part in zip(on_device, parts, strict=True)}

    def own_copy(tensor: Tensor) -> Tensor:  # with storage of its own: torch.save writes the whole storage of a view
        part = copies.get(id(tensor))
        return tensor.clone() if part is None else part.clone().view(tensor.dtype).view(tensor.shape)

    return _map_tensors(structure, own_copy)


def _map_tensors(structure: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(structure, Tensor):
        return function(structure)
    if isinstance(structure, (list, tuple)):
        return type(structure)(_map_tensors(part, function) for part in structure)
    return structure


@dataclass(frozen=True)
class Conditioning:
    """Embeddings of B rows: the outputs of the distinct prompts, and which row has which.

    Rows can share a call of the pipeline if their `call_group` (B,) is the same: padding changes the last bits of
    a row, so prompts of another length are run in separate calls. So are prompts with images of another size.
    """

    prompts: list[str]  # of the B rows
    encoder_outputs: list[EncoderOutputs]  # of the distinct prompts
    axes: list[list[Any]]  # of the distinct prompts: the axes of each recorded call
    prompt_index: Tensor  # (B,) which of the outputs a row has
    call_group: Tensor  # (B,)

    def prompts_of(self, rows: Tensor) -> list[str]:
        """The prompts of `rows` (n,)."""
        return [self.prompts[row] for row in rows.tolist()]

    def select(self, rows: Tensor) -> tuple[list[str], EncoderOutputs]:
        """The prompts and encoder outputs of `rows` (n,), as the pipeline would return them."""
        indices = self.prompt_index[rows].tolist()
        calls = zip(*(self.encoder_outputs[i] for i in indices), strict=True)
        axes = self.axes[indices[0]]  # rows that share a call have the same
        recorded = [
            (call[0][0], collate([output for _, output in call], axis)) for call, axis in zip(calls, axes, strict=True)
        ]
        return self.prompts_of(rows), recorded

    def pooled(self) -> Tensor:
        """(B, D) float32: each row's mean embedding."""
        means = [_pooled(outputs, axes) for outputs, axes in zip(self.encoder_outputs, self.axes, strict=True)]
        return torch.stack(means)[self.prompt_index]


def build_conditioning(
    prompts: list[str], outputs: dict[str, EncoderOutputs], axes: dict[int, list[Any]], encode_separately: bool
) -> Conditioning:
    """The conditioning of B prompts.

    Args:
        outputs: of (at least) the distinct prompts.
        axes: of each recorded call, by the number of a prompt's images.
        encode_separately: one prompt to a call.
    """
    unique_prompts = list(dict.fromkeys(prompts))
    call_groups: dict[Any, int] = {}
    keys = [prompt if encode_separately else _call_key(prompt, outputs[prompt]) for prompt in unique_prompts]
    group_of_prompt = torch.tensor([call_groups.setdefault(key, len(call_groups)) for key in keys])
    index_of = {prompt: i for i, prompt in enumerate(unique_prompts)}
    prompt_index = torch.tensor([index_of[prompt] for prompt in prompts])
    axes_of_prompt = [axes[len(images_of(prompt))] for prompt in unique_prompts]
    return Conditioning(
        prompts, [outputs[prompt] for prompt in unique_prompts], axes_of_prompt, prompt_index, group_of_prompt[prompt_index]
    )


def _call_key(prompt: str, outputs: EncoderOutputs) -> Any:
    """A key, equal for prompts that may share a call. Pipelines read the sizes of images, also where the tensors' shapes are alike."""
    return signature([output for _, output in outputs]), tuple(image.size for image in images_of(prompt))


def _pooled(recorded: EncoderOutputs, axes: list[Any]) -> Tensor:
    for (_, output), axis in zip(recorded, axes, strict=True):
        parts = zip(output, axis, strict=True) if isinstance(axis, list) else [(output, axis)]
        for part, part_axis in parts:
            if part_axis == 0 and isinstance(part, Tensor) and part.ndim == 3:
                return part[0].float().mean(0).cpu()
    raise FlowGRPOError("objective ppo reads prompt embeddings (tokens, channels), which this pipeline does not have.")


def layout_key(prompt: str) -> str:
    """The key of what applies to all prompts with as many images as this one."""
    images = images_of(prompt)
    return f"{LAYOUT} {len(images)}" if images else LAYOUT


class EmbeddingCache:
    """Encoder outputs by prompt: by its text and the contents of its images.

    Args:
        folder: where they are stored for later runs; None for in memory only.
        key: everything that the outputs depend on, such as the model; each key has a folder of its own.
    """

    def __init__(self, folder: str | Path | None = None, key: Any = None) -> None:
        self.folder = None if folder is None else expanded(folder) / _digest(repr(key))
        self._in_memory: OrderedDict[str, Any] = OrderedDict()
        self._limit = MAX_IN_MEMORY

    def make_room(self, count: int) -> None:
        """Keep at least `count` entries in memory."""
        self._limit = max(self._limit, count)

    def get(self, prompt: str) -> Any:
        """The outputs of a prompt, or None, also if the file is damaged: a checksum finds even one flipped bit."""
        key = prompt_key(prompt)
        if key in self._in_memory:
            self._in_memory.move_to_end(key)
        elif self.folder is not None and (file := self._file(key)).exists():
            try:
                self._add_to_memory(key, _read(regular_bytes(file)))
            except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError):
                return None
        return self._in_memory.get(key)

    def put(self, prompt: str, outputs: Any) -> None:
        """Keep what the encoders returned for a prompt."""
        key = prompt_key(prompt)
        self._add_to_memory(key, outputs)
        if self.folder is None:
            return
        content = io.BytesIO()
        torch.save(outputs, content)
        write_atomic(self._file(key), hashlib.sha256(content.getvalue()).digest() + content.getvalue())

    def complete(self, prompts: list[str]) -> bool:
        """Whether all of them are on disk, so that no encoder is needed."""
        keys = {*prompts, *map(layout_key, prompts)}
        return self.folder is not None and all(self.get(key) is not None for key in keys)

    def _add_to_memory(self, key: str, outputs: Any) -> None:
        self._in_memory[key] = outputs
        if len(self._in_memory) > self._limit:
            self._in_memory.popitem(last=False)

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{_digest(key)}.pt"


def _read(content: bytes) -> Any:
    """Read a file of `put`: a checksum of 32 bytes, then torch's format. ValueError if they don't fit, as in a file of 0.4."""
    checksum, saved = content[:32], content[32:]
    if hashlib.sha256(saved).digest() != checksum:
        raise ValueError("the checksum is wrong")
    return torch.load(io.BytesIO(saved), weights_only=True, map_location="cpu")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class PromptEncoder:
    """The part of a pipeline's call that encodes prompts.

    Args:
        pipe: the user's pipeline.
        intercepted: a copy of it that computes on the device and has an intercepting scheduler.
        call: calls a copy of the pipeline with prompts.
        cache: where encoded prompts are kept.
        offload: keep the text encoders on the CPU while no prompt is encoded.

    Attributes:
        pads_to_one_length: whether all texts become tensors of one shape, so that several can be encoded at once.
        methods: of a prompt without images, the recorded methods.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        intercepted: Any,
        family: Family,
        call: Callable[[Any, list[str]], Any],
        cache: EmbeddingCache,
        offload: bool,
    ) -> None:
        self.pipe, self.family, self.cache, self.offload = pipe, family, cache, offload
        self.device: torch.device = pipe.transformer.device
        self.methods = [name for name in family.encoders if hasattr(pipe, name)]
        self.pads_to_one_length = False
        self._call, self._intercepted = call, intercepted
        self._image_methods = [name for name in dir(type(pipe)) if name.startswith(("prepare_", "encode_image"))]
        self._axes: dict[int, list[Any]] = {}  # by the number of images
        self._stopping = copy.copy(intercepted)  # stops where denoising would begin
        object.__setattr__(self._stopping, "transformer", StopAtTransformer(pipe.transformer))

    def encode(self, prompts: list[str]) -> Conditioning:
        """Prompt embeddings of B rows, computed once per distinct prompt."""
        self.cache.make_room(len({*prompts}) + len(PROBE_PROMPTS))
        axes = {len(images_of(prompt)): self._batch_axes(prompt) for prompt in prompts}
        cached = {prompt: self.cache.get(prompt) for prompt in prompts}
        outputs_of = {prompt: outputs for prompt, outputs in cached.items() if outputs is not None}
        missing = [prompt for prompt in cached if prompt not in outputs_of]
        texts = [prompt for prompt in missing if not images_of(prompt)]
        size = ENCODE_BATCH if self.pads_to_one_length and not self.family.encode_separately else 1
        if missing:
            with self.encoders_on_device():
                for chunk in (texts[i : i + size] for i in range(0, len(texts), size)):
                    outputs_of |= self._encode_chunk(chunk, size, axes[0])
                for prompt in (prompt for prompt in missing if images_of(prompt)):
                    outputs_of |= self._encode_chunk([prompt], 1, axes[len(images_of(prompt))])
            copies = copy_to_cpu([outputs_of[prompt] for prompt in missing])
            for prompt, outputs in zip(missing, copies, strict=True):
                self.cache.put(prompt, outputs)
        on_device = {prompt: to_device(outputs, self.device) for prompt, outputs in outputs_of.items()}
        return build_conditioning(prompts, on_device, axes, self.family.encode_separately)

    @contextmanager
    def encoders_on_device(self) -> Iterator[None]:
        """Context in which the text encoders are on the device; after it they are on the CPU again if they are offloaded."""
        encoders = self._text_encoders if self.offload else []
        for encoder in encoders:
            encoder.to(self.device)
        try:
            yield
        finally:
            for encoder in encoders:
                encoder.to("cpu")

    def _encode_chunk(self, prompts: list[str], size: int, axes: list[Any]) -> dict[str, EncoderOutputs]:
        """Encode at most `size` prompts in one pass. The pass always has that many, since the shape of a batch affects rounding."""
        batch = self._record(prompts + prompts[:1] * (size - len(prompts)))
        return {
            prompt: [
                (method, select_row(output, axis, row, size)) for (method, output), axis in zip(batch, axes, strict=True)
            ]
            for row, prompt in enumerate(prompts)
        }

    def _batch_axes(self, prompt: str) -> list[Any]:
        """Where the outputs for prompts with as many images have their batch axes: from the cache, or by encoding one and two."""
        images = images_of(prompt)
        if len(images) not in self._axes:
            known = self.cache.get(layout_key(prompt))
            if known is None:
                known = self._infer_batch_axes([with_images(text, images) for text in PROBE_PROMPTS])
                self.cache.put(layout_key(prompt), known)
            self._axes[len(images)] = known[0]
            if not images:
                self.pads_to_one_length = known[1]
        return self._axes[len(images)]

    @quietly()
    def _infer_batch_axes(self, probes: list[str]) -> list[Any]:
        with self.encoders_on_device():
            alone, doubled = ([self._record([prompt] * count) for prompt in probes] for count in (1, 2))
        axes = [
            [infer_batch_axes(a, b) for (_, a), (_, b) in zip(single, double, strict=True)]
            for single, double in zip(alone, doubled, strict=True)
        ]
        merged = [merge_axes(short, long) for short, long in zip(*axes, strict=True)]
        return [merged, signature(alone[0]) == signature(alone[1])]

    @torch.no_grad()
    def _record(self, prompts: list[str]) -> EncoderOutputs:
        """The values of the encode methods in a call with these prompts."""
        outputs: EncoderOutputs = []
        depth = 0  # of recorded methods that call each other only the outermost counts
        recording = copy.copy(self._stopping)

        def recorded(name: str) -> Callable:
            method = getattr(self.pipe, name)
            if inspect.ismethod(method):  # bound to our copy, which has the execution device
                method = method.__func__.__get__(recording)

            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal depth
                depth += 1
                try:
                    output = method(*args, **kwargs)
                finally:
                    depth -= 1
                if not depth:
                    outputs.append((name, without_state(output) if name == "prepare_latents" else output))
                return output

            return call

        for name in {*self.methods, *self._image_methods} if images_of(prompts[0]) else self.methods:
            object.__setattr__(recording, name, recorded(name))
        recording.scheduler.requested_timesteps = torch.ones(1, device=self.device)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):  # some encoders sample
            try:
                self._call(recording, prompts)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # each pipeline has its own
                if not images_of(prompts[0]):
                    raise
                sizes = ", ".join("{} x {}".format(*image.size) for image in images_of(prompts[0]))
                of_prompt = "" if str(prompts[0]) in PROBE_PROMPTS else f" of the prompt {str(prompts[0])[:80]!r}"
                raise FlowGRPOError(
                    f"{type(self.pipe).__name__} can't take the images{of_prompt}, {sizes} pixels: {first_line(error)}"
                ) from error
            finally:
                vars(recording).clear()  # its methods refer to it and to the outputs, which would stay on a GPU as garbage
        return outputs

    @property
    def _text_encoders(self) -> list[torch.nn.Module]:
        parts = self.pipe.components.items()
        return [part for name, part in parts if name.startswith(ENCODER_PREFIXES) and isinstance(part, torch.nn.Module)]


def without_state(latents: Any) -> tuple[Any, ...]:
    """The value of `prepare_latents` as a tuple, with an empty tensor of the same dtype in place of the state."""
    first, rest = (latents[0], latents[1:]) if isinstance(latents, tuple) else (latents, ())
    return first.new_empty(0), *rest
