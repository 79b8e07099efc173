"""LPIPS as a reward of its own environment: see perceptual.py. It imports nothing of this package."""

import functools

import numpy as np
import torch
from PIL import Image
from stlpips_pytorch import stlpips


@functools.cache
def network() -> torch.nn.Module:
    """Shift-tolerant LPIPS (arXiv 2207.13686) on AlexNet; its weights are in the package."""
    return stlpips.LPIPS(net="alex", variant="shift_tolerant", verbose=False)


def kept(images, prompts, source, mask=None):
    """Minus the distance of image and source (B, 3, H, W) in [0, 1]; where a mask is white, both are grey. Returns (B,)."""
    keep = torch.ones(len(images), 1, *images.shape[-2:])
    for row, file in enumerate(mask or []):
        if file is not None:
            white = np.asarray(Image.open(file).convert("L").resize(images.shape[-1:-3:-1]), dtype=np.float32) / 255
            keep[row] = 1 - torch.from_numpy(white)
    image, before = (keep * part.float().cpu() + (1 - keep) * 0.5 for part in (images, source))
    with torch.no_grad():
        return -torch.cat(
            [network()(a, b, normalize=True).flatten() for a, b in zip(image.split(32), before.split(32), strict=True)]
        )
