"""What a pipeline is and can do: checks of its class and of its arguments, and small inputs to try it with."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.image_prompt import SourceImage, images_of, with_images
from flow_grpo.policy.families import Family, family

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
    """Context in which transformers are not compiled, for calls that come once or twice."""
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
