"""Probe inputs: a short and a long prompt, and images of random squares; and whether rows of a call are computed alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flow_grpo.image_prompt import SourceImage, with_images
from flow_grpo.policy.families import family

PROBE_PROMPTS = ("a", "a photo of two cats and a dog under an old tree" * 8)
PROBE_SIDE = 64  # pixels, where the call sets no size
is_eager = ContextVar("is_eager", default=False)  # whether this is within `eager`


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
    """Context in which transformers run operation by operation, as calls that come once or twice should: neither compiled nor captured."""
    token = is_eager.set(True)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        is_eager.reset(token)
