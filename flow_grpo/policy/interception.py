"""What a pipeline is and can do: small inputs to try it with, and replacements for its scheduler and transformer, which end its call."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.image_prompt import SourceImage, images_of, with_images
from flow_grpo.policy.families import Family, family

TABLE_SIZE = 4096  # of a shift: linear between them, sigma is off by less than 1e-5


class StopPipeline(Exception):
    """Leaves a pipeline's call with the transformer's output and the state."""

    def __init__(self, output: Any = None, sample: Tensor | None = None) -> None:
        self.output, self.sample = output, sample


class InterceptingScheduler(FlowMatchEulerDiscreteScheduler):
    """The Euler scheduler of a flow, with the timesteps that are requested and a `step` that ends the call."""

    requested_timesteps: Tensor | None = None
    _mu: float | None = None
    # sigmas before the shift, as the pipeline gave them, and its timesteps, where the scheduler takes them
    _given: tuple[np.ndarray, np.ndarray | None] | None = None

    @classmethod
    def from_scheduler(cls, scheduler: Any) -> "InterceptingScheduler":
        """Make one with the config of a pipeline's scheduler, which may be a solver of higher order."""
        config = dict(scheduler.config)
        if "flow_shift" in config:
            config["shift"] = config["flow_shift"]
        return cls.from_config(config)

    def scale_model_input(self, sample, timestep=None):
        return sample

    def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None, mu=None, timesteps=None):
        # pipelines look for these argument names
        if self.requested_timesteps is not None:
            self.timesteps = self.requested_timesteps
            return
        super().set_timesteps(num_inference_steps, device=device, sigmas=sigmas, mu=mu, timesteps=timesteps)
        own = timesteps is not None
        if sigmas is None:
            count = self.config.num_train_timesteps
            sigmas = (
                np.asarray(timesteps) / count if own else np.linspace(self.sigma_max, self.sigma_min, len(self.timesteps))
            )
        used = self.timesteps.double().cpu().numpy()
        kept = own and np.allclose(used, timesteps)  # diffusers 0.41 computes them from the shifted sigmas all the same
        self._mu, self._given = mu, (np.asarray(sigmas, dtype=float), used if kept else None)

    def shift_table(self) -> Float[Tensor, "M 3"]:
        """`Schedule.shift` of the last `set_timesteps`, by diffusers' own formulas; what a pipeline does to sigmas itself is left out.

        A schedule that is stretched to `shift_terminal`, or has Karras', exponential or beta sigmas, ends at its last step; from there
        sigma falls to 0 in proportion, as the last step of the sampler does.
        """
        assert self._given is not None
        given, timesteps = self._given
        config = self.config
        is_spaced = config.use_karras_sigmas or config.use_exponential_sigmas or config.use_beta_sigmas
        if config.shift_terminal or is_spaced:  # a grid with the schedule's own levels, on which these depend
            parts = max(1, TABLE_SIZE // max(1, len(given) - 1))
            levels = np.linspace(given[0], given[-1], (len(given) - 1) * parts + 1)
        else:
            levels = np.linspace(1, 0, TABLE_SIZE + 1)[:-1]
        dense = copy.copy(self)
        FlowMatchEulerDiscreteScheduler.set_timesteps(dense, sigmas=levels, mu=self._mu)
        sigmas = 1 - dense.sigmas if config.invert_sigmas else dense.sigmas
        levels = np.append(levels, 0.0)
        end = config.num_train_timesteps if config.invert_sigmas else 0.0
        times = torch.cat([dense.timesteps, dense.timesteps.new_tensor([end])])
        if timesteps is not None:
            times = torch.from_numpy(np.interp(levels, np.append(given, 0.0)[::-1], np.append(timesteps, 0.0)[::-1]))
        return torch.stack([torch.from_numpy(levels).float(), times.float(), sigmas.float()], 1)

    def step(self, model_output, timestep, sample, **kwargs):
        raise StopPipeline(output=model_output, sample=sample)


class StopAtTransformer:
    """Stands in for the transformer while prompts are encoded: a call of it ends the pipeline's."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        self._transformer = transformer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise StopPipeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transformer, name)


def with_execution_device(kind: type, device: torch.device) -> type:
    """A subclass of the pipeline that computes on that device, even if some of its parts are on another one."""
    device_property = property(lambda self: device)
    return type(kind.__name__, (kind,), {"_execution_device": device_property, "device": device_property})


def images_to_tensor(images: Any) -> Tensor:
    """(B, 3, H, W) of the images that a pipeline returns: a tensor, or PIL images from pipelines that return nothing else.

    Images with an alpha channel are shown on white. Videos (B, F, 3, H, W) stay as they are.
    """
    if isinstance(images, Tensor) and images.ndim == 4 and images.shape[1] == 4:
        return 1 - images[:, 3:].clamp(0, 1) * (1 - images[:, :3])
    if isinstance(images, Tensor):
        return images
    return torch.stack(
        [torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1) / 255 for image in images]
    )


RESERVED_ARGUMENTS = (
    "prompt",
    "latents",
    "num_inference_steps",
    "num_images_per_prompt",
    "num_videos_per_prompt",
    "output_type",
    "return_dict",
    "generator",
)
PROBE_PROMPTS = ("a", "a photo of two cats and a dog under an old tree" * 8)
PROBE_SIDE = 64  # pixels, where the call sets no size


def probe_prompts(pipeline: str, call: dict[str, Any]) -> list[str]:
    """The probe prompts, with an image of the call's size if that class of pipelines needs one."""
    if not family(pipeline).needs_image:
        return list(PROBE_PROMPTS)
    image = probe_image(size_of(call))
    return [with_images(text, [image]) for text in PROBE_PROMPTS]


def size_of(call: dict[str, Any]) -> tuple[int, int]:
    """Width and height of an image that the call can take: its own, or a multiple of at least 64 pixels, which some ask for."""
    width, height = call.get("width") or PROBE_SIDE, call.get("height") or PROBE_SIDE
    scale = max(1, -(-PROBE_SIDE // min(width, height)))
    return width * scale, height * scale


def probe_image(size: tuple[int, int], seed: int = 0) -> SourceImage:
    """An image of random squares, which are larger than a patch; `size` is width and height."""
    squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(squares).resize(size, Image.Resampling.NEAREST)
    return SourceImage.from_pil(image, "a probe")


def rows_agree(both: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether the two rows of a call equal the results of two calls, up to a fiftieth of the difference of these."""
    error = (both[0] - first).abs().max() + (both[1] - second).abs().max()
    return bool(error < 0.02 * (second - first).abs().max())


@contextmanager
def eager() -> Iterator[None]:
    """Context in which transformers are not compiled, for calls that are made once or twice."""
    with torch.compiler.set_stance("force_eager"):
        yield


def check_flow(pipe: DiffusionPipeline, parameters: Any) -> None:
    """Raise FlowGRPOError if a pipeline does not sample a flow, or takes no `latents`."""
    scheduler, name = type(pipe.scheduler).__name__ if hasattr(pipe, "scheduler") else "no scheduler", type(pipe).__name__
    config = getattr(getattr(pipe, "scheduler", None), "config", {})
    flow = "FlowMatch" in scheduler or (config.get("prediction_type") == "flow_prediction" and config.get("use_flow_sigmas"))
    if not flow or not hasattr(pipe, "transformer"):
        raise FlowGRPOError(
            f"{name} with {scheduler} does not sample a flow: give a pipeline with a transformer and a "
            "FlowMatchEulerDiscreteScheduler, such as Stable Diffusion 3.5 or FLUX.1."
        )
    if "audio_latents" in parameters:
        raise FlowGRPOError(
            f"{name} also denoises audio latents, which is not supported: give a pipeline with one latent state."
        )
    if {"image", "num_frames"} <= set(parameters):
        raise FlowGRPOError(f"{name} makes videos from images, which is not supported: give a text-to-video pipeline.")
    if "latents" not in parameters:
        raise FlowGRPOError(f"{name} takes no latents, so its velocity can't be computed at a given state.")


def check_call(name: str, family: Family, parameters: Any, call: dict[str, Any]) -> None:
    """Raise FlowGRPOError if an argument of the call does not exist or must not be set."""
    for argument in call:
        if argument in RESERVED_ARGUMENTS:
            raise FlowGRPOError(f"{argument} can't be set in pipeline_kwargs: this package sets it.")
        if argument in family.unsupported:
            raise FlowGRPOError(f"{argument} of {name} can't be used: {family.unsupported[argument]}.")
        if argument not in parameters:
            raise FlowGRPOError(f"{name} takes no argument {argument}; it takes {', '.join(list(parameters)[1:])}.")


def check_images(name: str, family: Family, parameters: Any, call: dict[str, Any], prompts: Iterable[str]) -> None:
    """Raise FlowGRPOError if a pipeline can't be called with the images of the prompts, or without any."""
    takes_size = {"height", "width"} & set(parameters)
    has_size = all(call.get(side) is not None for side in takes_size)
    for prompt in dict.fromkeys(prompts):
        count, shown = len(images_of(prompt)), repr(str(prompt))[:80]
        if not count and family.needs_image:
            raise FlowGRPOError(f"{name} edits images, and the prompt {shown} has none: give prompts a column `image`.")
        if not count:
            continue
        if family.image not in parameters:
            raise FlowGRPOError(
                f"{name} takes no images, and the prompt {shown} has {count}: give an editing pipeline, such as FLUX.2."
            )
        if count > family.max_images:
            raise FlowGRPOError(f"{name} takes {family.max_images} images to a prompt, and the prompt {shown} has {count}.")
        if not takes_size:
            raise FlowGRPOError(
                f"{name} takes the size of a result from the prompt's image, but all results of a run have one size."
            )
        if not has_size:
            raise FlowGRPOError(
                f"{name} would take the size of each prompt's image: set height and width, as all results have one size."
            )
