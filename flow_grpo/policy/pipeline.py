"""Any diffusers flow pipeline, called for one part of its work at a time.

The pipeline is the model. Its own `__call__` computes the velocity: we give it a scheduler whose only timestep is the one
asked for and whose `step` hands back what the network said, and the recorded prompt embeddings. Guidance, packing, timestep
scaling and norm tricks are then what diffusers ships, with no code of ours for any family of models.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler
from diffusers.guiders import ClassifierFreeGuidance
from torch import Tensor

from flow_grpo.policy.conditioning import (
    Conditioning,
    EncoderOutputs,
    conditioning,
    infer_batch_axes,
    merge_axes,
    select_row,
    signature,
    to_device,
)
from flow_grpo.policy.embedding_cache import LAYOUT, EmbeddingCache
from flow_grpo.policy.families import family
from flow_grpo.policy.interception import (
    InterceptingScheduler,
    StopAtTransformer,
    StopPipeline,
    check_call,
    check_flow,
    images_to_tensor,
    with_execution_device,
)
from flow_grpo.sampling import Solver
from flow_grpo.text import first_line
from flow_grpo.types import Schedule

ENCODE_BATCH = 8  # prompts in a pass of the text encoders, where they are all padded to one length
PROBE_PROMPTS = ("a", "a photo of two cats and a dog under an old tree" * 8)  # a short prompt and a long one
ENCODER_PREFIXES = (
    "text_encoder",
    "vision_language_encoder",
)  # components that only prompts need, by the beginning of their name


class FlowPipeline:
    """A pipeline as a function from state, timestep and prompt to velocity. States and velocities are float32 outside.

    Args:
        dtype: of autocast; float32 is without.
        guidance: guidance scale, whatever the pipeline calls it; 1 is off.
        embeddings: where the embeddings of prompts are kept; by default in memory.
        offload: the text encoders are on the CPU while no prompt is encoded.
        call: arguments of every pipeline call, such as height, width and max_sequence_length.

    Attributes:
        pipe: the user's pipeline; it stays as it was, since scheduler and methods are replaced in a copy of it.
        call: arguments of every pipeline call, those of the family and of the guidance among them.
        supports_per_sample_timesteps: whether a call can have a timestep per row; None before that was tried.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        dtype: torch.dtype = torch.float32,
        guidance: float = 1.0,
        embeddings: EmbeddingCache | None = None,
        offload: bool = False,
        **call: Any,
    ) -> None:
        kind, self.family = type(pipe).__name__, family(type(pipe).__name__)
        known = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
        check_flow(pipe, known)
        check_call(kind, self.family, known, call)
        self.pipe, self.dtype, self.device = pipe, dtype, pipe.transformer.device
        ours = {argument: value for argument, value in self.family.call_kwargs.items() if argument in known}
        self.call = {**ours, **self._guidance(guidance), **call}
        self._known = known
        self._embeddings, self._offload = EmbeddingCache() if embeddings is None else embeddings, offload
        self._axes: list[Any] | None = None
        self._one_length = False  # whether the encoders pad all prompts to one length
        self.supports_per_sample_timesteps: bool | None = None
        self._calls: Callable[[int], int] = lambda calls: calls  # how many all processes make, of those that one needs
        self._probe = InterceptingScheduler.of(pipe.scheduler)
        self._view = copy.copy(pipe)
        self._view.__class__ = with_execution_device(type(pipe), self.device)
        object.__setattr__(self._view, "scheduler", self._probe)
        self._view.set_progress_bar_config(disable=True)
        self._prepared: dict[int, tuple[Tensor, tuple]] = {}
        for guider in self.family.guiders:
            object.__setattr__(self._view, guider, ClassifierFreeGuidance(guidance) if guidance > 1 else None)
        self._encoding = copy.copy(self._view)  # stops where denoising would begin
        object.__setattr__(self._encoding, "transformer", StopAtTransformer(pipe.transformer))
        for name, part in pipe.components.items():
            if "transformer" in name and isinstance(part, torch.nn.Module):  # one has a second denoiser
                part.requires_grad_(False).eval()

    def _guidance(self, guidance: float) -> dict[str, float]:
        if not self.family.guidance:
            return {}
        return {self.family.guidance: guidance if guidance > 1 else self.family.no_guidance_value}

    # -- prompts ----------------------------------------------------------------------------------------------------

    def encode(self, prompts: list[str]) -> Conditioning:
        """Prompt embeddings of B rows, computed once per distinct prompt."""
        if self._axes is None:
            self._learn_to_encode()
        assert self._axes is not None
        kept = {prompt: self._embeddings.get(prompt) for prompt in prompts}
        found = {prompt: recording for prompt, recording in kept.items() if recording is not None}
        missing = [prompt for prompt in kept if prompt not in found]
        size = ENCODE_BATCH if self._one_length and not self.family.encode_separately else 1
        if missing:
            with self._encoders_here():
                for chunk in (missing[i : i + size] for i in range(0, len(missing), size)):
                    found |= self._encoded(chunk, size)
        here = {prompt: to_device(recording, self.device) for prompt, recording in found.items()}
        return conditioning(prompts, here, self._axes, self.family.encode_separately)

    def _encoded(self, prompts: list[str], size: int) -> dict[str, EncoderOutputs]:
        """Recordings of at most `size` prompts, in one pass that always has that many: its shape decides the last bits."""
        assert self._axes is not None
        together, found = self._record(prompts + prompts[:1] * (size - len(prompts))), {}
        for row, prompt in enumerate(prompts):
            calls = zip(together, self._axes, strict=True)
            alone = [(method, select_row(output, axes, row, size)) for (method, output), axes in calls]
            found[prompt] = to_device(alone, "cpu")
            self._embeddings.put(prompt, found[prompt])
        return found

    def _learn_to_encode(self) -> None:
        """Where the encoders' results have their batch axes, and whether prompts of all lengths become alike."""
        known = self._embeddings.get(LAYOUT)
        if known is not None:
            self._axes, self._one_length = known
            return
        with self._encoders_here():
            alone, doubled = ([self._record([prompt] * count) for prompt in PROBE_PROMPTS] for count in (1, 2))
        axes = [
            [infer_batch_axes(a, b) for (_, a), (_, b) in zip(one, two, strict=True)]
            for one, two in zip(alone, doubled, strict=True)
        ]
        self._axes = [merge_axes(short, long) for short, long in zip(*axes, strict=True)]
        self._one_length = signature(alone[0]) == signature(alone[1])
        self._embeddings.put(LAYOUT, [self._axes, self._one_length])

    @torch.no_grad()
    def _record(self, prompts: list[str]) -> EncoderOutputs:
        """What the encoders return in a call with these prompts."""
        recording: EncoderOutputs = []

        def recorded(name: str) -> Callable:
            method = getattr(self.pipe, name)
            if inspect.ismethod(method):  # of our copy, which knows where it computes
                method = method.__func__.__get__(self._encoding)

            def call(*args: Any, **kwargs: Any) -> Any:
                output = method(*args, **kwargs)
                recording.append((name, output))
                return output

            return call

        for name in self._encoders:
            object.__setattr__(self._encoding, name, recorded(name))
        self._probe.requested_timesteps = torch.ones(1, device=self.device)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):  # some encoders sample
            self._call(self._encoding, prompts)
        return recording

    @contextmanager
    def _encoders_here(self) -> Iterator[None]:
        """Within it, the text encoders are on the device; after it they are on the CPU again if they are offloaded."""
        for encoder in self._text_encoders if self._offload else []:
            encoder.to(self.device)
        try:
            yield
        finally:
            for encoder in self._text_encoders if self._offload else []:
                encoder.to("cpu")

    @property
    def _text_encoders(self) -> list[torch.nn.Module]:
        parts = self.pipe.components.items()
        return [part for name, part in parts if name.startswith(ENCODER_PREFIXES) and isinstance(part, torch.nn.Module)]

    @property
    def _encoders(self) -> list[str]:
        return [name for name in self.family.encoders if hasattr(self.pipe, name)]

    # -- the sampler's questions --------------------------------------------------------------------------------------

    @torch.no_grad()
    def schedule(self, steps: int) -> tuple[Schedule, torch.Size]:
        """The pipeline's own timesteps and sigmas for that many steps, and the shape of one state without the batch.

        It is the first call that a run makes: ValueError if the pipeline can't be called with these arguments.
        """
        rows = torch.zeros(1, dtype=torch.long)
        try:
            stop = self._denoise(self.encode([PROBE_PROMPTS[0]]), rows, None, None, num_inference_steps=steps)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # each pipeline has its own
            call = ", ".join(f"{name}={value!r}" for name, value in self.call.items())
            reason = first_line(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
            raise ValueError(f"{type(self.pipe).__name__} can't be called with {call}: {reason}") from error
        timesteps, sigmas = self._probe.timesteps.float().cpu(), self._probe.sigmas.float().cpu()
        return Schedule(timesteps, sigmas), stop.sample.shape[1:]

    def velocity(self, x: Tensor, timestep: Tensor, conditioning: Conditioning, rows: Tensor) -> Tensor:
        """v (n, ...) float32 at states x (n, ...) of `rows` (n,) of the conditioning, at one timestep or at (n,).

        Rows that can't share a call of the pipeline go into calls of their own, filled up to n rows: with the shape of a call
        its last bits would change.
        """
        n, kind = len(rows), conditioning.call_group[rows]
        timesteps = timestep.expand(n)
        if (timesteps != timesteps[0]).any() and not self._has_per_sample_timesteps(x, timesteps, conditioning, rows):
            kind = torch.stack([kind.double(), timesteps.double()], 1).unique(dim=0, return_inverse=True)[1]
        parts = [(kind == one).nonzero()[:, 0] for one in kind.unique()]
        found, more = [], parts[:1] * (self._calls(len(parts)) - len(parts))
        for part in parts + more:  # more, if other processes need them: the graph has them too, so that backward is alike
            filled = part[torch.arange(n) % len(part)]
            found.append(self._velocity(x[filled], timesteps[filled], conditioning, rows[filled])[: len(part)])
        order = torch.cat(parts).argsort()  # leaves `more` out
        return torch.cat(found)[order.to(found[0].device)]

    def _velocity(self, x: Tensor, timesteps: Tensor, conditioning: Conditioning, rows: Tensor) -> Tensor:
        one = (timesteps == timesteps[0]).all()
        asked = timesteps[:1] if one else timesteps[None]  # the pipelines walk along the first axis
        return self._denoise(conditioning, rows, asked, x).output.float()

    def _has_per_sample_timesteps(self, x: Tensor, timesteps: Tensor, conditioning: Conditioning, rows: Tensor) -> bool:
        """Whether one call can have a timestep per row: tried once, against calls with one each."""
        if self.supports_per_sample_timesteps is None:
            row, pair = rows[:1].expand(2), torch.stack([timesteps.min(), timesteps.max()])
            states = x[:1].expand(2, *x.shape[1:])
            with torch.no_grad():
                low, high = (self._velocity(states, t.expand(2), conditioning, row)[0] for t in pair)
                try:
                    both = self._velocity(states, pair, conditioning, row)
                    off = (both[0] - low).abs().max() + (both[1] - high).abs().max()
                except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
                    off = (high - low).abs().max()
            self.supports_per_sample_timesteps = bool(off < 0.02 * (high - low).abs().max())
        return self.supports_per_sample_timesteps

    def velocity_fn(self, schedule: Schedule, conditioning: Conditioning) -> Callable[[Tensor, int, Tensor], Tensor]:
        """The velocity at a step of a schedule, as `sampling` takes it: (x (n, ...), step, rows (n,)) -> v (n, ...)."""

        def velocity(x: Tensor, i: int, rows: Tensor) -> Tensor:
            return self.velocity(x, schedule.timesteps[i], conditioning, rows).cpu()

        return velocity

    def heun_solver(self, schedule: Schedule) -> Solver:
        """diffusers' Heun solver on that schedule: order 2, two velocities a step, Euler at the last (arXiv 2206.00364)."""

        def doubled(values: Tensor) -> Tensor:
            return torch.cat([values[:1], values[1:].repeat_interleave(2)])

        def start() -> Callable[[Tensor, Tensor], Tensor]:
            scheduler = FlowMatchHeunDiscreteScheduler()
            scheduler.set_timesteps(len(schedule))
            scheduler.sigmas = torch.cat([doubled(schedule.sigmas[:-1]), schedule.sigmas[-1:]])
            scheduler.set_begin_index(0)
            return lambda x, v: scheduler.step(v, schedule.timesteps[0], x).prev_sample

        return Solver([(call + 1) // 2 for call in range(2 * len(schedule) - 1)], start)

    # -- pictures -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def decode(self, latents: Tensor, microbatch: int = 64) -> Tensor:
        """Images (B, 3, H, W) float32 in [0, 1] of final states (B, ...), by the pipeline's own code after its loop."""
        images = []
        for chunk in latents.split(microbatch):
            rows = torch.zeros(len(chunk), dtype=torch.long)
            no_step = torch.zeros(0, device=self.device)
            out = self._denoise(self.encode([PROBE_PROMPTS[0]]), rows, no_step, chunk, output_type="pt")
            images.append(images_to_tensor(out[0]).float().clamp(0, 1).cpu())
        return torch.cat(images)

    @torch.no_grad()
    def initial_latents(self, prompts: list[str], seed: int) -> Tensor:
        """The states (B, ...) float32 that the pipeline itself begins with, by a generator of that seed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        rows = torch.arange(len(prompts))
        return self._denoise(self.encode(prompts), rows, None, None, generator=generator).sample.float().cpu()

    @torch.no_grad()
    def diffusers_image(self, prompt: str, steps: int, seed: int) -> Tensor:
        """(1, 3, H, W): what the pipeline draws when it is called as anyone would, with the Euler scheduler of its flow."""
        pipe: Any = copy.copy(self.pipe)
        object.__setattr__(pipe, "scheduler", FlowMatchEulerDiscreteScheduler.from_config(self._probe.config))
        for guider in self.family.guiders:
            object.__setattr__(pipe, guider, getattr(self._view, guider))
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator(self.device).manual_seed(seed)
        with self._autocast(), self._encoders_here():
            out = pipe(prompt=[prompt], num_inference_steps=steps, output_type="pt", generator=generator, **self.call)
        return images_to_tensor(out[0]).float().clamp(0, 1).cpu()

    @torch.no_grad()
    def encode_images(self, images: Tensor, microbatch: int = 64) -> Tensor:
        """States (B, ...) float32 whose pictures are `images` (B, 3, H, W) in [0, 1]: what `decode` turns round.

        Raises:
            ValueError: the pipeline's state is not its VAE's latent, or not packed by a `_pack_latents` of its own.
        """
        _, shape = self.schedule(2)
        name = type(self.pipe).__name__
        try:
            states = torch.cat([self._encode_images(chunk, shape) for chunk in images.split(microbatch)])
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name} can't be trained on given images: {first_line(error)}") from error
        if states.shape[1:] != shape:
            raise ValueError(
                f"{name} can't be trained on given images of {tuple(images.shape[-2:])} pixels: they become latents of shape "
                f"{tuple(states.shape[1:])}, but it samples {tuple(shape)}."
            )
        return states

    def _encode_images(self, images: Tensor, shape: torch.Size) -> Tensor:
        vae = self.pipe.vae
        z = vae.encode((2 * images - 1).to(self.device, vae.dtype)).latent_dist.mode().float()
        z = (z - (getattr(vae.config, "shift_factor", None) or 0)) * vae.config.scaling_factor
        return (self.pipe._pack_latents(z, *z.shape) if len(shape) == 2 else z).cpu()

    # -- the pipeline's call ------------------------------------------------------------------------------------------

    def _denoise(
        self, conditioning: Conditioning, rows: Tensor, timesteps: Tensor | None, x: Tensor | None, **more: Any
    ) -> Any:
        """Calls the pipeline with recorded embeddings, at the asked timesteps or on its own schedule (None)."""
        self._probe.requested_timesteps = None if timesteps is None else timesteps.to(self.device)
        prompts, recording = conditioning.select(rows)
        replies = iter(recording)

        def replayed(name: str) -> Callable:
            def call(*args: Any, **kwargs: Any) -> Any:
                method, output = next(replies)
                assert method == name
                return output

            return call

        for name in self._encoders:
            object.__setattr__(self._view, name, replayed(name))
        if x is not None and hasattr(self.pipe, "prepare_latents"):
            object.__setattr__(self._view, "prepare_latents", self._given(x))
        elif x is not None:
            more["latents"] = x.to(self.device, self.pipe.transformer.dtype)
        elif "prepare_latents" in vars(self._view):
            object.__delattr__(self._view, "prepare_latents")
        return self._call(self._view, prompts, **more)

    def _given(self, x: Tensor) -> Callable:
        """In place of `prepare_latents`: our state in the dtype of the pipeline's, beside what else it returns."""

        def prepare_latents(*args: Any, **kwargs: Any) -> Any:
            if len(x) not in self._prepared:
                drawn = self.pipe.prepare_latents(*args, **kwargs)
                first, rest = (drawn[0], tuple(drawn[1:])) if isinstance(drawn, tuple) else (drawn, ())
                self._prepared[len(x)] = first.new_empty(0), rest
            like, rest = self._prepared[len(x)]
            state = x.to(like.device, like.dtype)
            return (state, *rest) if rest else state

        return prepare_latents

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def _call(self, pipe: Any, prompts: list[str], **kwargs: Any) -> Any:
        call = {"num_inference_steps": 1, "output_type": "latent", **self.call, **kwargs, "prompt": list(prompts)}
        if isinstance(call.get("negative_prompt"), str):
            call["negative_prompt"] = [call["negative_prompt"]] * len(prompts)
        if "generator" in self._known and "generator" not in call:
            # what it draws is not used, and the global stream stays as it is
            call["generator"] = torch.Generator(self.device).manual_seed(0)
        try:
            with self._autocast():
                undecorated = inspect.unwrap(type(pipe).__call__)  # not under no_grad: gradients flow
                return undecorated(pipe, **call)
        except StopPipeline as stop:
            return stop
