"""Rewards computed from pixels, without a model."""

import io
import re
from typing import Any

import torch

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.images import to_pil

PALETTE = {
    "red": (214, 40, 40),
    "green": (30, 142, 62),
    "blue": (29, 78, 216),
    "yellow": (250, 204, 21),
    "white": (255, 255, 255),
    "black": (17, 17, 17),
    "orange": (249, 115, 22),
    "purple": (126, 34, 206),
}


def jpeg_size(images: torch.Tensor, prompts: list[str], quality: int = 95, **metadata: Any) -> torch.Tensor:
    """Minus the size of the image as JPEG in kilobytes: compressibility, DDPO's example (arXiv 2305.13301).

    Range: about -500 to 0 for photographs. No weights. Gamed, as intended, by flat and blurred images: a reward for
    experiments and for testing reward-hacking detection.
    """
    sizes = []
    for image in to_pil(images):
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        sizes.append(-buffer.tell() / 1000)
    return torch.tensor(sizes)


jpeg_size.reads_prompts = False  # type: ignore[attr-defined]


def sharpness(images: torch.Tensor, prompts: list[str], measure: str = "laplacian", **metadata: Any) -> torch.Tensor:
    """Fine detail of the image, sharp edges or noise, in its luminance y = 0.299 R + 0.587 G + 0.114 B.

    measure="laplacian": the variance over the inner pixels of y(i-1, j) + y(i+1, j) + y(i, j-1) + y(i, j+1) - 4 y(i, j),
    the autofocus measure of Pech-Pacheco et al. 2000 (10.1109/ICPR.2000.903548). measure="high_frequency": the power above
    half the highest frequency, sum of |Y(f)|^2 over |f| >= 1/4 cycle a pixel, divided by (H W)^2, Y the Fourier transform.

    Range [0, 16] and [0, 0.25], photographs about 0.001 to 0.05. No weights. Gamed by noise, grain and hard edges: better
    as a held-out reward, since training that hacks its reward often blurs the images or adds grain. The metric
    monitor/high_frequency_power of an evaluation is another number, the root mean square of what a 3 x 3 mean filter removes
    (`high_frequency_power` in flow_grpo/evaluation/image_metrics.py).
    """
    if measure not in ("laplacian", "high_frequency"):
        raise FlowGRPOError(f"sharpness: measure is laplacian or high_frequency, not {measure}.")
    luminance = torch.einsum("bchw,c->bhw", images.detach().float().cpu(), torch.tensor([0.299, 0.587, 0.114]))
    if measure == "laplacian":
        across = luminance[:, 1:-1, :-2] + luminance[:, 1:-1, 2:]
        down = luminance[:, :-2, 1:-1] + luminance[:, 2:, 1:-1]
        return (across + down - 4 * luminance[:, 1:-1, 1:-1]).flatten(1).var(1, correction=0)
    height, width = luminance.shape[1:]
    frequency = torch.hypot(*torch.meshgrid(torch.fft.fftfreq(height), torch.fft.fftfreq(width), indexing="ij"))
    power = torch.fft.fft2(luminance).abs().square() / (height * width) ** 2
    return (power * (frequency >= 0.25)).sum((1, 2))


sharpness.reads_prompts = False  # type: ignore[attr-defined]


def motion(videos: torch.Tensor, prompts: list[str], **metadata: Any) -> torch.Tensor:
    """How much a video moves: the root mean square difference of neighbouring frames, over all of them.

    Range 0 to 1, 0 for a still picture; about 0.01 to 0.1 for films. No weights. It sees whole videos (B, F, 3, H, W). Gamed by
    flicker, noise and cuts: better as a held-out reward, since a video that is trained on rewards of its frames may freeze.
    """
    frames = videos.detach().float().cpu()
    return (
        (frames[:, 1:] - frames[:, :-1]).square().mean((1, 2, 3, 4)).sqrt()
        if frames.shape[1] > 1
        else torch.zeros(len(frames))
    )


motion.reads_prompts = False  # type: ignore[attr-defined]
motion.frames = "all"  # type: ignore[attr-defined]


class Color:
    """Whether the image has the text and background colours of a prompt like `red text "CAT" on a blue background`.

    Each pixel counts for the nearest colour of the palette. The score is the mean of two parts: the share of the border with the
    background's colour, and whether the text's colour is the most frequent other colour in the image.

    Range [0, 1]. No weights. Gamed by any blob of the text's colour. `palette` replaces or adds colours as RGB in 0..255.
    """

    PATTERN = re.compile(r"^\s*(\w+) text .*on an? (\w+) background\s*$", re.DOTALL)

    def __init__(self, palette: dict[str, list[int]] | None = None) -> None:
        colors = {**PALETTE, **{name: tuple(rgb) for name, rgb in (palette or {}).items()}}
        self.names = list(colors)
        self.values = torch.tensor(list(colors.values())).float() / 255

    def __call__(self, images: torch.Tensor, prompts: list[str], **metadata: Any) -> torch.Tensor:
        """images (B, 3, H, W) in [0, 1]; returns (B,). FlowGRPOError for a prompt that names no two palette colours."""
        wanted = [self._colors(prompt) for prompt in prompts]
        scores = []
        for image, (text, background) in zip(images.detach().float().cpu(), wanted, strict=True):
            colors = (image.permute(1, 2, 0)[:, :, None] - self.values).square().sum(-1).argmin(-1)  # (H, W), the nearest
            border = torch.cat([colors[0], colors[-1], colors[:, 0], colors[:, -1]])
            counts = torch.bincount(colors.flatten(), minlength=len(self.names))
            counts[background] = 0
            has_text = counts[text] > 0 and int(counts.argmax()) == text
            scores.append(0.5 * float((border == background).float().mean()) + 0.5 * float(has_text))
        return torch.tensor(scores)

    def _colors(self, prompt: str) -> tuple[int, int]:
        match = self.PATTERN.match(prompt)
        if not match or match[1] not in self.names or match[2] not in self.names:
            raise FlowGRPOError(
                f"the prompt {prompt!r} is not of the form `<color> text ... on a <color> background` with colours of "
                f"{', '.join(self.names)}."
            )
        return self.names.index(match[1]), self.names.index(match[2])
