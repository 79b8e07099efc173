"""The rewards of learning_256.py: `ocr`, `ocr_exact` and `color` of signs of 256 px, which are read at the embedded model's size.

There a sign is one line, which is read without looking for lines: a thousandth of a second an image in place of a tenth.
"""

import torch
import torch.nn.functional as F

from dev.tiny import world
from flow_grpo.rewards.ocr import OCR, ExactOCR
from flow_grpo.rewards.pixels import Color

_ocr, _exact, _color = OCR(), ExactOCR(), Color()


def spelling(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
    """The share of the word that can be read, (B,) in [0, 1], of images (B, 3, 256, 256) in [0, 1]."""
    return _ocr(lines_of(images), prompts)


def spelling_exact(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
    """Whether the word can be read, (B,) 0 or 1."""
    return _exact(lines_of(images), prompts)


def colors(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
    """Whether the text and the background have the prompt's colours, (B,) in [0, 1]."""
    return _color(smaller(images), prompts)


def smaller(images: torch.Tensor) -> torch.Tensor:
    """The images, (B, 3, 80, 80)."""
    return F.interpolate(images, (world.WIDTH, world.WIDTH), mode="area")


def lines_of(images: torch.Tensor) -> torch.Tensor:
    """The middle of the images, where the word is, (B, 3, 32, 80)."""
    top = (world.WIDTH - world.HEIGHT) // 2
    return smaller(images)[:, :, top : top + world.HEIGHT]
