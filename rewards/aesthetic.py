"""LAION's aesthetic score: a small head on CLIP's image embedding. It ignores the prompt."""

from pathlib import Path

import torch
from huggingface_hub import constants
from torch import Tensor, nn

from flow_grpo.rewards.clip import OpenCLIP
from flow_grpo.rewards.downloads import HubUnreachable
from flow_grpo.rewards.images import in_batches
from flow_grpo.rewards.networks import AUTO, load_exactly, load_tensors

AESTHETIC_FILE = "sac+logos+ava1-l14-linearMSE.pth"
AESTHETIC_URL = (
    f"https://github.com/christophschuhmann/improved-aesthetic-predictor/raw/main/{AESTHETIC_FILE.replace('+', '%2B')}"
)
AESTHETIC_MODEL = "ViT-L-14-quickgelu"  # OpenAI's weights need QuickGELU, which a checkpoint file does not record


class LinearHead(nn.Module):
    """Five linear layers without activations, as published; the dropout is active in training only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 1024),
            nn.Dropout(0.2),
            nn.Linear(1024, 128),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )

    def forward(self, features: Tensor) -> Tensor:
        """features (B, width); returns (B,)."""
        return self.layers(features).squeeze(-1)


def _published_head() -> dict[str, Tensor]:
    try:
        if constants.HF_HUB_OFFLINE and not Path(torch.hub.get_dir(), "checkpoints", AESTHETIC_FILE).is_file():
            raise ConnectionError("nothing may be downloaded")
        return torch.hub.load_state_dict_from_url(
            AESTHETIC_URL, map_location="cpu", file_name=AESTHETIC_FILE, weights_only=True, progress=False
        )
    except OSError as error:
        raise HubUnreachable(f"{AESTHETIC_URL}: not in the cache, and it can't be downloaded.") from error


class Aesthetic(nn.Module):
    """LAION's aesthetic predictor v2 (arXiv 2210.08402): the predicted rating of the image by people, without the prompt.

    Range: about 1 to 10, 5 to 7 for good images. Weights: sac+logos+ava1-l14-linearMSE.pth (Apache-2.0, 4 MB, from GitHub)
    or the same format at `weights`, on OpenAI's ViT-L/14 (MIT, 1.7 GB) or a local checkpoint of it at `pretrained`. Memory:
    1.8 GB. Gamed by ignoring the prompt: painterly haze, sunsets and portraits score high on their own.
    """

    reads_prompts, differentiable = False, True

    def __init__(
        self, weights: str | None = None, pretrained: str = "openai", device: str = AUTO, batch_size: int = 64
    ) -> None:
        super().__init__()
        state = _published_head() if weights is None else load_tensors("aesthetic", weights)
        self.embed = OpenCLIP("aesthetic", AESTHETIC_MODEL, pretrained, device)
        self.head = LinearHead(768)
        load_exactly("aesthetic", self.head, state, weights or AESTHETIC_FILE)
        self.head.to(self.embed.device).eval().requires_grad_(False)
        self.batch_size = batch_size

    def forward(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images (B, 3, H, W) in [0, 1]; returns (B,)."""
        return in_batches(lambda images, _: self.head(self.embed.encode_images(images)), images, prompts, self.batch_size)
