"""Convert image tensors to bytes and PIL images, and score them in batches."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def to_bytes(images: Tensor) -> Tensor:
    """Return images (B, 3, H, W) in [0, 1] as uint8 on the CPU."""
    return (images.detach().float().clamp(0, 1) * 255).round().byte().cpu()


def to_pil(images: Tensor) -> list[Image.Image]:
    """Return images (B, 3, H, W) in [0, 1] as 8-bit RGB PIL images, the input of every published transform."""
    return [Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()) for image in to_bytes(images)]


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert a PIL image of any mode to 8-bit RGB. Of 16-bit grey, which Pillow would clip, the upper 8 bits are kept."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image).clip(0, 0xFFFF) >> 8).astype(np.uint8))
    return image.convert("RGB")


@torch.no_grad()
def in_batches(
    score: Callable[[list[Image.Image], list[str]], Tensor], images: Tensor, prompts: list[str], batch_size: int
) -> Tensor:
    """Call score(PIL images, prompts) on batch_size rows at a time; returns (B,) float32 on the CPU."""
    rows = range(0, len(prompts), batch_size)
    chunks = [score(to_pil(images[i : i + batch_size]), prompts[i : i + batch_size]) for i in rows]
    return torch.cat([chunk.float().cpu() for chunk in chunks])


def unique(prompts: list[str]) -> tuple[list[str], list[int]]:
    """Return the prompts without duplicates, and the index of each prompt among them."""
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    return list(places), [places[prompt] for prompt in prompts]


def takes_pil(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a reward, or a class's `__call__`, that takes a list of 8-bit RGB PIL images instead of the tensor.

    @rewards.takes_pil
    def reward(images, prompts, **metadata):
        return [image.getpixel((0, 0))[0] / 255 for image in images]
    """

    @functools.wraps(function)  # keeps the signature, which says what metadata it takes
    def reward(*arguments: Any, **metadata: Any) -> Tensor | list[float]:
        *instance, images, prompts = arguments
        return function(*instance, to_pil(images), prompts, **metadata)

    return reward
