"""Prompt encoding: the pipeline's encode methods are called once per distinct prompt, and what they return is kept.

Of a prompt with images, the recording also has what the methods `prepare_...` return, such as the images' latents. Of
`prepare_latents` it has all but the state, of which only the dtype is kept.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline

from flow_grpo.errors import FlowGRPOError
from flow_grpo.image_prompt import images_of, with_images
from flow_grpo.policy.conditioning import (
    Conditioning,
    EncoderOutputs,
    conditioning,
    copy_to_cpu,
    infer_batch_axes,
    merge_axes,
    select_row,
    signature,
    to_device,
)
from flow_grpo.policy.embedding_cache import EmbeddingCache, layout_key
from flow_grpo.policy.families import Family
from flow_grpo.policy.interception import StopAtTransformer
from flow_grpo.policy.library_logging import quietly
from flow_grpo.policy.probes import PROBE_PROMPTS
from flow_grpo.text import first_line

ENCODE_BATCH = 8  # prompts in a pass of the text encoders, if they are all padded to one length
# components that only prompts need, by the beginning of their name
ENCODER_PREFIXES = ("text_encoder", "vision_language_encoder")


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

    def at_size(self, call: Callable[[Any, list[str]], Any]) -> "PromptEncoder":
        """The encoder for calls with images of another size: a new one if what the recorded methods return depends on it."""
        takes_size = any("height" in inspect.signature(getattr(self.pipe, name)).parameters for name in self.methods)
        if not takes_size and not self._takes_images:
            return self
        return PromptEncoder(
            self.pipe, self._intercepted, self.family, call=call, cache=EmbeddingCache(), offload=self.offload
        )

    def encode(self, prompts: list[str]) -> Conditioning:
        """Prompt embeddings of B rows, computed once per distinct prompt."""
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
        return conditioning(prompts, on_device, axes, self.family.encode_separately)

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
        """What the encode methods return in a call with these prompts."""
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
                raise FlowGRPOError(
                    f"{type(self.pipe).__name__} can't take the images of the prompt {str(prompts[0])[:80]!r}, {sizes} pixels: "
                    f"{first_line(error)}"
                ) from error
        return outputs

    @property
    def _takes_images(self) -> bool:
        return self.family.image in inspect.signature(inspect.unwrap(type(self.pipe).__call__)).parameters

    @property
    def _text_encoders(self) -> list[torch.nn.Module]:
        parts = self.pipe.components.items()
        return [part for name, part in parts if name.startswith(ENCODER_PREFIXES) and isinstance(part, torch.nn.Module)]


def without_state(latents: Any) -> tuple[Any, ...]:
    """What `prepare_latents` returned, as a tuple, with an empty tensor of the same dtype in place of the state."""
    first, rest = (latents[0], latents[1:]) if isinstance(latents, tuple) else (latents, ())
    return first.new_empty(0), *rest
