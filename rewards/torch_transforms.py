"""The published transforms of PIL images, on tensors, so that a gradient of the image passes through them.

Values differ a little from the ones on PIL images: PIL rounds to 8 bits before and after it resizes.
"""

from types import SimpleNamespace
from typing import Any

import torchvision.transforms.functional as pixels
from torch import Tensor
from torchvision.transforms import Compose, InterpolationMode, Resize, ToTensor


def resized(images: Tensor, size: list[int], interpolation: InterpolationMode = InterpolationMode.BICUBIC) -> Tensor:
    """Images (B, 3, H, W) in [0, 1] in another size, antialiased as PIL does it: [height, width], or [shorter side].

    Bicubic values beyond [0, 1] are clipped, as PIL's 8 bits are; there the gradient is 0.
    """
    return pixels.resize(images, size, interpolation, antialias=True).clamp(0, 1)


PREPARED = {
    "do_resize": False,
    "do_rescale": False,
    "do_normalize": False,
}  # for transformers' processors: `prepared` has done it


def prepared(images: Tensor, size: list[int], processor: Any) -> Tensor:
    """Images (B, 3, H, W) in [0, 1], resized and normalised with an image processor's numbers, in their own dtype: it has float32 alone."""
    return pixels.normalize(resized(images, size), processor.image_mean, processor.image_std)


def on_tensors(transform: Compose, images: Tensor) -> Tensor:
    """Apply a transform of PIL images, of torchvision or open_clip, to images (B, 3, H, W) in [0, 1]. Returns (B, 3, h, w)."""
    for step in transform.transforms:
        images = _apply(step, images)
    return images


def _apply(step: Any, images: Tensor) -> Tensor:
    if isinstance(step, ToTensor):
        return images
    if isinstance(step, Resize):
        size = [step.size] if isinstance(step.size, int) else list(step.size)
        return resized(images, size, step.interpolation)
    if hasattr(step, "longest"):  # open_clip's ResizeKeepRatio, which asks a PIL image for its size
        shape = SimpleNamespace(size=(images.shape[-1], images.shape[-2]))
        return resized(images, step.get_params(shape, step.size, step.longest), step.interpolation)
    return step(images)
