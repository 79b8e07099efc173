"""How much of its source an edited image keeps."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.clip import TINY, OpenCLIP
from flow_grpo.rewards.images import read_image, to_pil
from flow_grpo.rewards.networks import AUTO


class Fidelity(torch.nn.Module):
    """Cosine similarity of the open_clip embeddings of an image and of the first image of its prompt, outside the asked change.

    Range [-1, 1], 1 for an unchanged image. The prompt's metadata `mask`, the path of an image of any size that is white where the
    change is asked for, leaves that part out: it is grey in both images. Without masks the whole image counts, so that the reward
    pulls against the edit: give it less weight than what rewards the edit.

    Weights: the embedded model (3 MB), which knows coloured signs only; model and pretrained as in `clip`, for real images for
    instance model="ViT-L-14", pretrained="openai" (MIT, 1.7 GB). Gamed by changes that the model does not see: small, or of texture.
    """

    reads_prompts = False

    def __init__(self, model: str = TINY, pretrained: str | None = None, device: str = AUTO, batch_size: int = 64) -> None:
        super().__init__()
        self.embed, self.batch_size = OpenCLIP("fidelity", model, pretrained, device), batch_size

    def forward(
        self, images: Tensor, prompts: list[str], source: Tensor | None = None, mask: list[str | None] | None = None
    ) -> Tensor:
        """images and source (B, 3, H, W) in [0, 1]; returns (B,). FlowGRPOError if prompts have no images, or a mask is missing."""
        keep = _kept(images, source, mask)
        assert source is not None
        edited, original = (keep * batch.cpu() + (1 - keep) * 0.5 for batch in (images, source))
        with torch.no_grad():
            first, second = (
                torch.cat([self.embed.encode_images(to_pil(part)) for part in batch.split(self.batch_size)])
                for batch in (edited, original)
            )
        return (first * second).sum(1).float().cpu()


class Unchanged:
    """How much of its source an image keeps, pixel by pixel, outside the asked change: half SSIM, half PSNR over 40 dB, which counts up to
    40 (CoCoEdit, arXiv 2602.14068).

    Range [-0.5, 1], 1 for an unchanged image. The prompt's metadata `mask` is as in `Fidelity`; without one, the whole image counts, and
    the reward pulls against the edit. SSIM (Wang et al., 2004) has a Gaussian window of 11 pixels, sigma 1.5, and is the mean over
    pixels and colours. No weights. It has a gradient. Gamed by an image that is not edited: give it less weight than what rewards the
    edit.
    """

    reads_prompts, differentiable = False, True

    def __call__(
        self, images: Tensor, prompts: list[str], source: Tensor | None = None, mask: list[str | None] | None = None
    ) -> Tensor:
        """images and source (B, 3, H, W) in [0, 1]; returns (B,). FlowGRPOError if prompts have no images, or a mask is missing."""
        keep = _kept(images, source, mask)
        assert source is not None
        keep = keep.to(images)
        edited, original = (keep * batch + (1 - keep) * 0.5 for batch in (images, source.to(images)))
        share = keep.flatten(1).sum(1).clamp_min(1e-6)
        error = (edited - original).square().mean(1).flatten(1).sum(1) / share
        psnr = -10 * error.clamp_min(1e-4).log10()
        similar = (keep * ssim(edited, original)).mean(1).flatten(1).sum(1) / share
        return 0.5 * similar + 0.5 * psnr / 40


def ssim(x: Tensor, y: Tensor) -> Tensor:
    """The structural similarity (B, C, H, W) of images (B, C, H, W) in [0, 1] around each pixel, in [-1, 1]."""
    offsets = torch.arange(-5, 6, dtype=x.dtype, device=x.device)
    weights = (-(offsets**2) / (2 * 1.5**2)).exp()
    weights = weights / weights.sum()

    def blurred(values: Tensor) -> Tensor:
        padded = F.pad(values.flatten(0, 1)[:, None], (5, 5, 5, 5), mode="replicate")
        return F.conv2d(F.conv2d(padded, weights.view(1, 1, 1, -1)), weights.view(1, 1, -1, 1)).view_as(values)

    mean_x, mean_y = blurred(x), blurred(y)
    variances = blurred(x * x) - mean_x**2 + blurred(y * y) - mean_y**2
    covariance = blurred(x * y) - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    return (2 * mean_x * mean_y + c1) * (2 * covariance + c2) / ((mean_x**2 + mean_y**2 + c1) * (variances + c2))


def _kept(images: Tensor, source: Tensor | None, mask: list[str | None] | None) -> Tensor:
    """The share (B, 1, H, W) of each pixel that no change was asked for."""
    if source is None:
        raise FlowGRPOError("it compares an image with its source, and these prompts have none: give them a column `image`.")
    keep = torch.ones(len(images), 1, *images.shape[-2:])
    for row, file in enumerate(mask or []):
        if file is not None:
            keep[row] = 1 - _mask(Path(file), (images.shape[-1], images.shape[-2]))
    return keep


def _mask(file: Path, size: tuple[int, int]) -> Tensor:
    """(1, H, W) in [0, 1] of an image file; `size` is width and height."""
    image = read_image(file, f"{file} (a mask)").convert("L").resize(size)
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, size[1], size[0]).float() / 255
