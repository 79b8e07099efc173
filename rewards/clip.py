"""How well picture and prompt agree: the cosine of their open_clip embeddings.

The tiny model of this package, `flow-grpo-tiny`, is registered with open_clip when this module is imported: it knows
coloured signs only. Any other model name and pretrained tag of open_clip works, and so does a local checkpoint.
"""

import json
import tempfile
from pathlib import Path

import open_clip
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

TINY = "flow-grpo-tiny"
FOLDER = Path(__file__).parent / "tiny_clip"


class CLIP(torch.nn.Module):
    """Cosine similarity of open_clip embeddings (CLIP, arXiv 2103.00020), the "CLIP score" without its factor of 100.

    Range [-1, 1]: 0.2 to 0.4 for matching pairs under OpenAI's models, near 1 for the tiny one. Weights: the tiny model
    (3 MB, this package's licence) by default; by name for instance model="ViT-L-14", pretrained="openai" (MIT, 1.7 GB) or
    model="ViT-H-14", pretrained="laion2b_s32b_b79k" (MIT, 3.9 GB); pretrained may be a local checkpoint file. Gamed by
    pictures that write the prompt out as text.
    """

    def __init__(self, model: str = TINY, pretrained: str | None = None, device: str = "cpu", batch_size: int = 64) -> None:
        super().__init__()
        if pretrained is None and model == TINY:
            pretrained = str(FOLDER / "open_clip_model.safetensors")
        if pretrained is None and not model.startswith(("hf-hub:", "local-dir:")):
            tags = open_clip.list_pretrained_tags_by_model(model)
            known = f"give pretrained= one of {', '.join(tags)}" if tags else "open_clip knows no such model"
            raise ValueError(f"clip: model {model} without weights: {known}, or a checkpoint file.")
        look = _preprocessing() if model == TINY else {}
        self.model, _, self.preprocess = open_clip.create_model_and_transforms(
            model, pretrained=pretrained, device=device, **look
        )
        self.model.eval().requires_grad_(False)
        self.tokenizer = open_clip.get_tokenizer(model)
        self.device, self.batch_size = device, batch_size

    @torch.no_grad()
    def forward(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images (B, 3, H, W) in [0, 1]; returns (B,)."""
        rows = range(0, len(prompts), self.batch_size)
        chunks = [self._score(images[i : i + self.batch_size], prompts[i : i + self.batch_size]) for i in rows]
        return torch.cat(chunks)

    def _score(self, images: Tensor, prompts: list[str]) -> Tensor:
        pixels = (images.detach().float().clamp(0, 1) * 255).round().byte().cpu().permute(0, 2, 3, 1)
        inputs = torch.stack([self.preprocess(Image.fromarray(p.numpy())) for p in pixels])
        distinct = list(dict.fromkeys(prompts))
        texts = self.model.encode_text(self.tokenizer(distinct).to(self.device), normalize=True)
        places = torch.tensor([distinct.index(prompt) for prompt in prompts], device=self.device)
        return (self.model.encode_image(inputs.to(self.device), normalize=True) * texts[places]).sum(-1).float().cpu()


def untrained_tiny() -> torch.nn.Module:
    """The tiny model with random weights, for the recipe that trains it."""
    return open_clip.create_model(TINY)


def contrastive_loss(model: torch.nn.Module, images: Tensor, tokens: Tensor) -> Tensor:
    """CLIP's symmetric cross-entropy over the batch; images (B, 3, H, W) normalised, tokens (B, L)."""
    image_features, text_features, scale = model(images, tokens)[:3]
    logits = scale * image_features @ text_features.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def _preprocessing() -> dict:
    """The pixel range that the tiny model was trained on, which open_clip does not keep with a registered model."""
    found = json.loads((FOLDER / "open_clip_config.json").read_text())["preprocess_cfg"]
    return {"image_mean": found["mean"], "image_std": found["std"], "image_resize_mode": found["resize_mode"]}


def _register() -> None:
    """Adds the tiny model to open_clip's list, its tokenizer by the absolute path on this machine."""
    config = json.loads((FOLDER / "open_clip_config.json").read_text())
    model = config["model_cfg"]
    model["text_cfg"]["hf_tokenizer_name"] = str(FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{TINY}.json").write_text(json.dumps(model))
        open_clip.add_model_config(folder)


_register()
