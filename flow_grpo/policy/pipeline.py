"""Any diffusers flow pipeline, called for one part of its work at a time.

The pipeline is the model. Its own `__call__` computes the velocity: its scheduler is replaced by one that requests a single timestep
and returns the transformer's output, and its text encoding by recorded embeddings. Guidance, packing, timestep scaling and
normalisation are then diffusers' own code, whatever the family of models.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.guiders import ClassifierFreeGuidance
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.image_prompt import SourceImage, images_of, with_images
from flow_grpo.policy.encoding import Conditioning, EmbeddingCache, PromptEncoder, without_state
from flow_grpo.policy.families import family
from flow_grpo.policy.interception import (
    InterceptingScheduler,
    StopPipeline,
    check_call,
    check_flow,
    check_images,
    eager,
    images_to_tensor,
    probe_image,
    probe_prompts,
    rows_agree,
    size_of,
    with_execution_device,
)
from flow_grpo.policy.memory import frozen_decoder
from flow_grpo.text import first_line
from flow_grpo.types import Schedule, take_rows

ROUNDING = 0.02  # of latents in 16 bits, at most, as a fraction of the largest


class FlowPipeline:
    """A pipeline as a function from state, timestep and prompt to velocity. It takes and returns float32.

    Args:
        dtype: of autocast, which is off for float32.
        guidance: guidance scale, whatever the pipeline calls it; 1 or less is off.
        embedding_cache: keeps encoded prompts; by default one in memory.
        offload: keep the text encoders on the CPU while no prompt is encoded.
        call: arguments of every pipeline call, such as height, width and max_sequence_length.

    Attributes:
        pipe: the user's pipeline. It is not changed: scheduler and methods are replaced in copies of it.
        guidance: the guidance scale.
        probe_prompts: a short prompt and a long one, with an image if the pipeline needs one.
        encoder: encodes prompts.
        supports_images_per_row: whether a call can have rows with different images; None until that was tried.
        supports_per_sample_timesteps: whether a call can have a timestep per row; None until that was tried.
        timestep_copies: how often such a call is given them: twice where the pipeline doubles the rows for guidance, but not a timestep.
        own_call: the arguments of every pipeline call that were given.
        call: those and the ones of the family and of the guidance.
        synced_call_count: given how many calls this process needs, how many all processes make.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        dtype: torch.dtype = torch.float32,
        guidance: float = 1.0,
        embedding_cache: EmbeddingCache | None = None,
        offload: bool = False,
        **call: Any,
    ) -> None:
        name = type(pipe).__name__
        self.family = family(name)
        self._arguments = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
        check_flow(pipe, self._arguments)
        check_call(name, self.family, self._arguments, call)
        self.pipe, self.dtype, self.device, self.guidance = pipe, dtype, pipe.transformer.device, guidance
        self.own_call = call
        # without guidance, diffusers warns of a negative prompt at each call
        unused = () if guidance > 1 else ("negative_prompt",)
        defaults = {k: value for k, value in self.family.call_kwargs.items() if k in self._arguments and k not in unused}
        self.call = {**defaults, **self._guidance_argument(guidance), **call}
        self.probe_prompts = probe_prompts(name, self.call)
        self.supports_per_sample_timesteps: bool | None = None
        self.timestep_copies = 1
        self.supports_images_per_row: bool | None = None
        self.synced_call_count: Callable[[int], int] = lambda calls: calls
        self._scheduler = InterceptingScheduler.from_scheduler(pipe.scheduler)
        self._intercepted = self._make_intercepted(guidance)
        # the values of prepare_latents for that many rows without images, but for the state
        self._prepared: dict[int, tuple] = {}
        cache = EmbeddingCache() if embedding_cache is None else embedding_cache
        self.encoder = PromptEncoder(pipe, self._intercepted, self.family, call=self._call, cache=cache, offload=offload)

    def _guidance_argument(self, guidance: float) -> dict[str, float]:
        if not self.family.guidance:
            return {}
        return {self.family.guidance: guidance if guidance > 1 else self.family.no_guidance_value}

    def _make_intercepted(self, guidance: float) -> Any:
        """A copy of the pipeline with our scheduler and guiders, that computes on the transformer's device."""
        intercepted: Any = copy.copy(self.pipe)
        intercepted.__class__ = with_execution_device(type(self.pipe), self.device)
        object.__setattr__(intercepted, "scheduler", self._scheduler)
        intercepted.set_progress_bar_config(disable=True)
        for guider in self.family.guiders:
            object.__setattr__(intercepted, guider, ClassifierFreeGuidance(guidance, enabled=guidance > 1))
        return intercepted

    # -- what a sampler needs -----------------------------------------------------------------------------------------

    def probe_images(self, count: int) -> list[SourceImage]:
        """Different images of the size of the call's, or a multiple of it."""
        return [probe_image(size_of(self.call), seed) for seed in range(count)]

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images."""
        return self.family.image in self._arguments

    @property
    def makes_videos(self) -> bool:
        """Whether an image is a video (F, 3, H, W)."""
        return "num_frames" in self._arguments

    def encode(self, prompts: list[str]) -> Conditioning:
        """Prompt embeddings of B rows, computed once per distinct prompt. FlowGRPOError if the pipeline can't take its images."""
        if isinstance(prompts, str) or len(prompts) == 0:
            raise FlowGRPOError(f"{prompts!r} is no list of prompts: give one of texts.")
        if self.family.needs_image or any(map(images_of, prompts)):
            self.check_images(prompts)
        return self.encoder.encode(prompts)

    def check_images(self, prompts: Iterable[str]) -> None:
        """Raise FlowGRPOError if the pipeline can't take the images of a prompt, or needs one where there is none."""
        check_images(type(self.pipe).__name__, self.family, self._arguments, self.call, prompts)

    @torch.no_grad()
    @eager()
    def schedule(self, steps: int) -> tuple[Schedule, torch.Size]:
        """The pipeline's timesteps and sigmas for that many steps, and the shape of one state without the batch.

        This is the first call that a run makes: FlowGRPOError if the pipeline cannot be called with these arguments.
        """
        if steps < 1:
            raise FlowGRPOError(f"{steps!r} sampling steps: give a whole number of 1 or more.")
        rows = torch.zeros(1, dtype=torch.long)
        try:
            probe = self.encode(self.probe_prompts[:1])
            stop = self._call_with_recordings(probe, rows, timesteps=None, x=None, num_inference_steps=steps)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # each pipeline has its own
            call = ", ".join(f"{name}={value!r}" for name, value in self.call.items())
            reason = first_line(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
            raise FlowGRPOError(f"{type(self.pipe).__name__} can't be called with {call}: {reason}") from error
        timesteps, sigmas = self._scheduler.timesteps.float().cpu(), self._scheduler.sigmas.float().cpu()
        sigmas = 1 - sigmas if self._scheduler.config.invert_sigmas else sigmas
        return Schedule(timesteps, sigmas, self._scheduler.shift_table()), stop.sample.shape[1:]

    def velocity(self, x: Tensor, timestep: Tensor, conditioning: Conditioning, rows: Tensor) -> Tensor:
        """v (n, ...) float32, on the device of x, at states x (n, ...) of `rows` (n,) of the conditioning, at one timestep or at (n,).

        `timestep` and `rows` are on the CPU.
        Rows that cannot share a call of the pipeline get calls of their own, padded to n rows: the shape of a call decides its
        last bits.
        """
        n, group = len(rows), conditioning.call_group[rows]
        timesteps = timestep.expand(n)
        prompt_with_images = next((prompt for prompt in conditioning.prompts_of(rows) if images_of(prompt)), None)
        if prompt_with_images is not None and not self.accepts_images_per_row(x, timestep, prompt_with_images):
            group = conditioning.prompt_index[rows]  # a call for each prompt
        if (timesteps != timesteps[0]).any() and not self.accepts_per_sample_timesteps(x, timesteps, conditioning, rows):
            group = torch.stack([group, timesteps], 1).unique(dim=0, return_inverse=True)[1]
        parts = [(group == value).nonzero()[:, 0] for value in group.unique()]
        # other processes may need more calls: repeated here, also in the graph, so that the backward passes are alike
        repeated = parts[:1] * (self.synced_call_count(len(parts)) - len(parts))
        velocities = []
        for part in parts + repeated:
            padded = part[torch.arange(n) % len(part)]
            states = x if len(part) == n else take_rows(x, padded)
            velocities.append(self._velocity(states, timesteps[padded], conditioning, rows[padded])[: len(part)])
        if len(velocities) > 1:
            velocities = [take_rows(torch.cat(velocities), torch.cat(parts).argsort())]  # leaves the repeated ones out
        return velocities[0].to(x.device)

    def velocity_fn(self, schedule: Schedule, conditioning: Conditioning, rows: Tensor) -> Callable[[Tensor, int], Tensor]:
        """The velocity of `rows` (n,) of the conditioning at a step of the schedule: (x (n, ...), step) -> v (n, ...)."""
        return lambda x, i: self.velocity(x, schedule.timesteps[i], conditioning, rows)

    def accepts_per_sample_timesteps(self, x: Tensor, timesteps: Tensor, conditioning: Conditioning, rows: Tensor) -> bool:
        """Whether one call can have a timestep per row. Tried once, by comparison with calls that have one timestep."""
        if self.supports_per_sample_timesteps is None:
            row, pair = rows[:1].expand(2), torch.stack([timesteps.min(), timesteps.max()])
            states = x[:1].expand(2, *x.shape[1:])
            with torch.no_grad(), eager():  # not compiled for two rows
                low, high = (self._velocity(states, t[None], conditioning, row)[0] for t in pair)
                both = functools.partial(self._velocity, states, pair, conditioning, row)
                fitting = (n for n in (1, 2)[: 1 + (self.guidance > 1)] if self._agrees_with_copies(n, both, low, high))
                self.supports_per_sample_timesteps = next(fitting, None) is not None
        return self.supports_per_sample_timesteps

    def _agrees_with_copies(self, copies: int, both: Callable[[], Tensor], low: Tensor, high: Tensor) -> bool:
        """Whether one call for two rows, with that many copies of their timesteps, returns what two calls return."""
        self.timestep_copies = copies
        try:
            return rows_agree(both(), low, high)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            return False

    def accepts_images_per_row(self, x: Tensor, timestep: Tensor, prompt: str) -> bool:
        """Whether rows of one call can have different images. Tried once, by comparison with calls that have one image.

        A pipeline that reads the images past the recorded methods would give the images of the first row to all.
        """
        if self.supports_images_per_row is None:
            sizes = [image.size for image in images_of(prompt)]
            first_images, second_images = ([probe_image(size, seed) for size in sizes] for seed in (0, 1))
            conditioning = self.encode([with_images("a", first_images), with_images("a", second_images)])
            states, timesteps, rows = x[:1].expand(2, *x.shape[1:]), timestep.reshape(-1)[:1], torch.arange(2)
            with torch.no_grad(), eager():  # not compiled for two rows
                first, second = (self._velocity(states, timesteps, conditioning, row.expand(2))[0] for row in rows)
                both = self._velocity(states, timesteps, conditioning, rows)
            self.supports_images_per_row = rows_agree(both, first, second)
        return self.supports_images_per_row

    def _velocity(self, x: Tensor, timesteps: Tensor, conditioning: Conditioning, rows: Tensor) -> Tensor:
        is_shared = (timesteps == timesteps[0]).all()
        # pipelines iterate over the first axis
        first_axis = timesteps[:1] if is_shared else timesteps.repeat(self.timestep_copies)[None]
        v = self._call_with_recordings(conditioning, rows, first_axis, x).output.float()
        return -v if self._scheduler.config.invert_sigmas else v  # of a flow whose own sigmas are shares of the image

    # -- images -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def decode(self, latents: Tensor, microbatch: int = 64) -> Tensor:
        """Images (B, 3, H, W) or videos (B, F, 3, H, W) in [0, 1] of final states (B, ...), by the pipeline's code after its loop."""
        return torch.cat([self.decode_with_grad(chunk).float().cpu() for chunk in latents.split(microbatch)])

    def decode_with_grad(self, latents: Tensor) -> Tensor:
        """`decode` of one micro-batch, on the pipeline's device, with the graph that leads to the states if they require a gradient.

        Values beyond [0, 1] are clipped by diffusers, as in the published code of ReFL (2304.05977) and FlowBP (2606.11075): there the
        gradient is 0, since a reward never sees by how much they are beyond. The dtype is float32, or float64 of a model in float64.
        `decode_vjp` needs less memory.
        """
        images = images_to_tensor(self._after_loop(latents)[0])
        return images.to(torch.promote_types(images.dtype, torch.float32)).clamp(0, 1)

    def _after_loop(self, latents: Tensor) -> Any:
        """What the pipeline's code after its loop returns for final states (B, ...)."""
        probe, no_step = self.encode(self.probe_prompts[:1]), torch.zeros(0, device=self.device)
        rows = torch.zeros(len(latents), dtype=torch.long)
        return self._call_with_recordings(probe, rows, no_step, latents, output_type="pt")

    def decode_vjp(self, latents: Tensor, image_gradient: Callable[[Tensor, Tensor], Tensor], microbatch: int = 1) -> Tensor:
        """The gradient (B, ...) with respect to final states (B, ...), given the gradient with respect to their images.

        `microbatch` images at a time are decoded, and the gradient of the images goes back through the decoder, whose activations are
        computed again where diffusers supports that. The decoder's weights get no gradient. The slices change the result only by rounding.

        Args:
            image_gradient: (images (b, 3, H, W) or videos (b, F, 3, H, W) in [0, 1] on the pipeline's device, their rows (b,)) -> a
                gradient of the images' shape, for instance of a reward.

        Raises:
            FlowGRPOError: the pipeline returns images without a gradient.
        """
        gradients: list[Tensor] = []
        with frozen_decoder(self.pipe):
            for rows in torch.arange(len(latents)).split(microbatch):
                leaf = latents[rows].detach().to(self.device).requires_grad_()
                with torch.enable_grad():
                    images = self.decode_with_grad(leaf)
                if not images.requires_grad:
                    raise FlowGRPOError(
                        f"{type(self.pipe).__name__} returns images without a gradient: train it by an objective that needs the values of "
                        "rewards only, such as grpo."
                    )
                gradient = image_gradient(images.detach(), rows).to(images)
                gradients += torch.autograd.grad(images, leaf, gradient)
        return torch.cat(gradients).to(latents.device)

    @torch.no_grad()
    @eager()
    def initial_latents(self, prompts: list[str], seed: int) -> Tensor:
        """The states (B, ...) float32 that the pipeline itself would begin with, by a generator of that seed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        rows, conditioning = torch.arange(len(prompts)), self.encode(prompts)
        stop = self._call_with_recordings(conditioning, rows, timesteps=None, x=None, generator=generator)
        return stop.sample.float().cpu()

    @torch.no_grad()
    def diffusers_image(self, prompt: str, steps: int, seed: int) -> Tensor:
        """(1, 3, H, W), or (1, F, 3, H, W): the image or video of a plain call of the pipeline, with the Euler scheduler of its flow."""
        pipe: Any = copy.copy(self.pipe)
        object.__setattr__(pipe, "scheduler", FlowMatchEulerDiscreteScheduler.from_config(self._scheduler.config))
        for guider in self.family.guiders:
            object.__setattr__(pipe, guider, getattr(self._intercepted, guider))
        pipe.set_progress_bar_config(disable=True)
        call = {"generator": torch.Generator(self.device).manual_seed(seed), **self._prompt_arguments([prompt])}
        with self._autocast(), self.encoder.encoders_on_device():
            out = pipe(num_inference_steps=steps, output_type="pt", **call)
        return images_to_tensor(out[0]).float().clamp(0, 1).cpu()

    @torch.no_grad()
    def encode_images(self, images: Tensor, microbatch: int = 64) -> Tensor:
        """States (B, ...) float32 of images (B, 3, H, W) in [0, 1]: the inverse of `decode`.

        Raises:
            FlowGRPOError: the pipeline's state is not its VAE's latent, is scaled in another way than those known here, or is not packed by
                a `_pack_latents` of its own.
        """
        _, shape = self.schedule(2)
        name = type(self.pipe).__name__
        try:
            states = torch.cat([self._encode_images(chunk, shape) for chunk in images.split(microbatch)])
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise FlowGRPOError(f"{name} can't be trained on given images: {first_line(error)}") from error
        if states.shape[1:] != shape:
            raise FlowGRPOError(
                f"{name} can't be trained on given images of {tuple(images.shape[-2:])} pixels: they become latents of shape "
                f"{tuple(states.shape[1:])}, but it samples {tuple(shape)}."
            )
        return states

    def _encode_images(self, images: Tensor, shape: torch.Size) -> Tensor:
        if self.makes_videos:
            raise FlowGRPOError("it makes videos.")
        vae = self.pipe.vae
        z = vae.encode((2 * images - 1).to(self.device, vae.dtype)).latent_dist.mode().float()
        scaled = (z - (getattr(vae.config, "shift_factor", None) or 0)) * vae.config.scaling_factor
        if (mean := getattr(vae.config, "latents_mean", None)) is not None:
            mean, std = (z.new_tensor(values)[:, None, None] for values in (mean, vae.config.latents_std))
            scaled = (z - mean) / std
        states = self.pipe._pack_latents(scaled, *z.shape) if len(shape) == 2 else scaled
        if states.shape[1:] == shape:
            self._check_scale(states[:1], z[:1])
        return states.cpu()

    def _check_scale(self, states: Tensor, latents: Tensor) -> None:
        """Raise FlowGRPOError if the pipeline gives its VAE other latents for these states than those that the VAE has encoded."""

        def stop(z: Tensor, *args: Any, **kwargs: Any) -> None:
            raise StopPipeline(sample=z)

        self.pipe.vae.decode = stop
        try:
            decoded = self._after_loop(states).sample.float()
        finally:
            del self.pipe.vae.decode
        if (decoded - latents).abs().max() > ROUNDING * latents.abs().max():
            raise FlowGRPOError("it scales its latents in a way that is not known here.")

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    # -- a call of the pipeline ----------------------------------------------------------------------------------------

    def _call(self, pipe: Any, prompts: list[str], **kwargs: Any) -> Any:
        """Call a copy of the pipeline with the images of the first prompt; recordings give the other rows theirs.

        Returns what it stopped with, or the pipeline's own output if it ran to the end.
        """
        call = {"num_inference_steps": 1, "output_type": "latent", **self._prompt_arguments(prompts), **kwargs}
        if "generator" in self._arguments and "generator" not in call:
            # its random numbers are not used, and the global random stream is left alone
            call["generator"] = torch.Generator(self.device).manual_seed(0)
        try:
            with self._autocast():
                undecorated = inspect.unwrap(type(pipe).__call__)  # not under no_grad: gradients flow
                return undecorated(pipe, **call)
        except StopPipeline as stop:
            return stop.with_traceback(None)  # whose frames hold all tensors of the callers until garbage is collected

    def _prompt_arguments(self, prompts: list[str]) -> dict[str, Any]:
        """The arguments of a call with these prompts."""
        call, images = {**self.call, "prompt": [str(prompt) for prompt in prompts]}, images_of(prompts[0])
        if "max_area" in self._arguments and {"height", "width"} <= call.keys():
            # without it, the size would be changed to an area of the pipeline's own
            call.setdefault("max_area", call["height"] * call["width"])
        if images:
            opened = [image.open() for image in images]
            # some encode one prompt with images at a time
            call |= {"prompt": [str(prompts[0])], "num_images_per_prompt": len(prompts)}
            call[self.family.image] = opened[0] if len(opened) == 1 else opened
        if isinstance(call.get("negative_prompt"), str):
            call["negative_prompt"] = [call["negative_prompt"]] * len(call["prompt"])
        return call

    def _call_with_recordings(
        self, conditioning: Conditioning, rows: Tensor, timesteps: Tensor | None, x: Tensor | None, **kwargs: Any
    ) -> Any:
        """Call the pipeline with recorded embeddings.

        Args:
            timesteps: what the scheduler requests; None for the pipeline's own schedule.
            x: states in place of the initial ones; None for the pipeline's own.
        """
        self._scheduler.requested_timesteps = None if timesteps is None else timesteps.to(self.device, non_blocking=True)
        prompts, outputs = conditioning.select(rows)
        recorded = iter(outputs)
        methods: dict[str, Callable] = {name: self._replay(name, recorded, x) for name, _ in outputs}
        if x is not None and "prepare_latents" not in methods:
            if hasattr(self.pipe, "prepare_latents"):
                methods["prepare_latents"] = self._fixed_prepare_latents(x, {} if images_of(prompts[0]) else self._prepared)
            else:
                kwargs["latents"] = x.to(self.device, self.pipe.transformer.dtype)
        pipe = copy.copy(self._intercepted)
        for name, method in methods.items():
            object.__setattr__(pipe, name, method)
        return self._call(pipe, prompts, **kwargs)

    def _replay(self, name: str, recorded: Iterator[tuple[str, Any]], x: Tensor | None) -> Callable:
        """A replacement for a recorded method: it returns the next recorded value, with the state in that of `prepare_latents`."""

        def method(*args: Any, **kwargs: Any) -> Any:
            recorded_name, output = next(recorded)
            assert recorded_name == name
            if name != "prepare_latents":
                return output
            like, *rest = output  # `like` is empty, of the state's device and dtype
            return _with_state(self._own_state(*args, **kwargs) if x is None else x.to(like.device, like.dtype), rest)

        return method

    def _own_state(self, *args: Any, **kwargs: Any) -> Tensor:
        latents = self._intercepted.prepare_latents(*args, **kwargs)
        return latents[0] if isinstance(latents, tuple) else latents

    def _fixed_prepare_latents(self, x: Tensor, prepared: dict[int, tuple]) -> Callable:
        """A replacement for `prepare_latents`, which returns our latents, cast to the pipeline's dtype, and its other return values.

        Args:
            prepared: what it returned before, less the state, by the number of rows.
        """

        def prepare_latents(*args: Any, **kwargs: Any) -> Any:
            if len(x) not in prepared:
                prepared[len(x)] = without_state(self.pipe.prepare_latents(*args, **kwargs))
            like, *rest = prepared[len(x)]
            return _with_state(x.to(like.device, like.dtype), rest)

        return prepare_latents


def _with_state(state: Tensor, rest: list[Any]) -> Any:
    """The value of `prepare_latents`."""
    return (state, *rest) if rest else state
