"""How unlike an image is to the other images of its prompt."""

import torch
from torch import Tensor

from flow_grpo.rewards.clip import TINY, OpenCLIP
from flow_grpo.rewards.images import to_pil
from flow_grpo.rewards.networks import AUTO


class LeastDistance(torch.nn.Module):
    """Cosine distance of an image's open_clip embedding to that of the nearest other image of its group.

    Range [0, 2], 0 for an image that is there twice. It is the d of GARDO (arXiv 2512.24138), which took DINOv3;
    `objective.diversity_weight` weighs advantages by it. Weights: the embedded model (3 MB), which knows coloured signs only;
    model and pretrained as of `clip`. Gamed by noise, as every measure of diversity: give it weight 0.
    """

    scope = "group"
    reads_prompts = False

    def __init__(self, model: str = TINY, pretrained: str | None = None, device: str = AUTO, batch_size: int = 64) -> None:
        super().__init__()
        self.embed, self.batch_size = OpenCLIP("least_distance", model, pretrained, device), batch_size

    def forward(self, images: Tensor, prompts: list[str]) -> Tensor:
        """The images (K, 3, H, W) in [0, 1] of one group; returns (K,)."""
        with torch.no_grad():
            parts = [self.embed.encode_images(to_pil(part)).float().cpu() for part in images.split(self.batch_size)]
        return least_distance(torch.cat(parts))


def least_distance(features: Tensor) -> Tensor:
    """Features (K, E) of a group's images -> (K,): the cosine distance to the nearest other one."""
    unit = torch.nn.functional.normalize(features, dim=1)
    distance = 1 - (unit @ unit.T).clamp(-1, 1)
    return distance.fill_diagonal_(torch.inf).amin(1)
