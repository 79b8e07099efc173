"""HPSv2.1: CLIP fine-tuned on people's choices between generated images."""

import torchvision.transforms.functional as pixels
from torch import Tensor, nn
from torchvision.transforms import Compose, Normalize, ToTensor

from flow_grpo.rewards.clip import OpenCLIP
from flow_grpo.rewards.downloads import hub_file
from flow_grpo.rewards.images import Images, in_batches
from flow_grpo.rewards.networks import AUTO

HPSV2_MODEL = "ViT-H-14"
HPSV2_MEAN, HPSV2_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


class HPSv2(nn.Module):
    """Human Preference Score v2.1 (arXiv 2306.09341): the cosine of open_clip's ViT-H-14 with HPSv2's own weights.

    Range: about 0.2 to 0.35. Weights: HPS_v2.1_compressed.pt of xswu/HPSv2 (Apache-2.0, 2 GB), or the same format at
    `weights`. Memory: 4 GB in float32. Gamed by saturated colours, smooth skin and ornate detail; blind to small text.
    """

    differentiable = True

    def __init__(self, weights: str | None = None, device: str = AUTO, batch_size: int = 32) -> None:
        super().__init__()
        self.embed = OpenCLIP("hpsv2", HPSV2_MODEL, weights or hub_file("xswu/HPSv2", "HPS_v2.1_compressed.pt"), device)
        self.embed.preprocess = Compose([ToTensor(), self._fit, Normalize(HPSV2_MEAN, HPSV2_STD)])
        self.batch_size = batch_size

    def forward(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images (B, 3, H, W) in [0, 1]; returns (B,)."""
        return in_batches(self._score, images, prompts, self.batch_size)

    def _score(self, images: Images, prompts: list[str]) -> Tensor:
        return (self.embed.encode_images(images) * self.embed.encode_prompts(prompts)).sum(-1)

    def _fit(self, images: Tensor) -> Tensor:
        """Scale the longer side of images (..., 3, H, W) to fit and pad with black, as HPSv2 does; CLIP would crop."""
        size, sides = self.embed.model.visual.image_size[0], images.shape[-2:]
        scale = size / max(sides)
        height, width = (round(side * scale) for side in sides)
        left, top = (size - width) // 2, (size - height) // 2
        scaled = pixels.resize(images, [height, width], pixels.InterpolationMode.BICUBIC)
        return pixels.pad(scaled, [left, top, size - width - left, size - height - top])
