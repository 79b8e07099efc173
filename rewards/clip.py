"""Rewards of open_clip's embeddings: agreement of image and prompt, an image's distance from the others of its prompt, HPSv2 and LAION's
aesthetic score.

The small models of this package are registered with open_clip when this module is imported: `flow-grpo-tiny` knows coloured signs only,
`flow-grpo-shapes` scenes of coloured shapes only. Any other model name and pretrained tag of open_clip works, and so does a local
checkpoint.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, Literal

import open_clip
import torch
import torch.nn.functional as F
import torchvision.transforms.functional as pixels
from huggingface_hub import constants
from torch import Tensor, nn
from torchvision.transforms import Compose, Normalize, ToTensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.downloads import HubUnreachable, NotDownloaded, downloads, hub_file
from flow_grpo.rewards.images import Images, in_batches, to_pil, unique
from flow_grpo.rewards.networks import AUTO, load_exactly, load_tensors, on_tensors, usable_device

TINY, SHAPES = "flow-grpo-tiny", "flow-grpo-shapes"
FOLDERS = {TINY: Path(__file__).parent / "tiny_clip", SHAPES: Path(__file__).parent / "shapes_clip"}
FOLDER = FOLDERS[TINY]
CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
HPSV2_MODEL = "ViT-H-14"
HPSV2_MEAN, HPSV2_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
AESTHETIC_FILE = "sac+logos+ava1-l14-linearMSE.pth"
AESTHETIC_URL = (
    f"https://github.com/christophschuhmann/improved-aesthetic-predictor/raw/main/{AESTHETIC_FILE.replace('+', '%2B')}"
)
AESTHETIC_MODEL = "ViT-L-14-quickgelu"  # OpenAI's weights need QuickGELU, which a checkpoint file does not record


class OpenCLIP(torch.nn.Module):
    """An open_clip model that encodes images and prompts as unit vectors (B, E).

    Raises:
        FlowGRPOError: open_clip has no such model or can't load the weights, or torch can't use the device. The message begins with
            `reward`.
    """

    def __init__(self, reward: str, model: str, pretrained: str | None, device: str) -> None:
        super().__init__()
        self.device = usable_device(reward, device)
        if pretrained is None and model in FOLDERS:
            pretrained = str(FOLDERS[model] / WEIGHTS)
        if pretrained is None and not model.startswith(("hf-hub:", "local-dir:")):
            tags = open_clip.list_pretrained_tags_by_model(model)
            advice = f"set `pretrained` to a checkpoint file or one of {', '.join(tags)}"
            known = advice if tags else "open_clip knows no such model, so set `model` to one that it lists"
            raise FlowGRPOError(f"{reward}: model {model} needs weights: {known}.")
        is_local = model.startswith("local-dir:") or Path(str(pretrained)).exists()
        try:
            with downloads(None if is_local else f"{model} {pretrained or ''}".strip()):
                if pretrained in open_clip.list_pretrained_tags_by_model(model):
                    # first, since the model takes a while to build
                    open_clip.download_pretrained(open_clip.get_pretrained_cfg(model, pretrained))
                self.model, _, self.preprocess = open_clip.create_model_and_transforms(
                    model, pretrained=pretrained, device=self.device, **_settings(model, pretrained)
                )
                self.tokenizer = _tokenizer(model)
        except NotDownloaded:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise FlowGRPOError(
                f"{reward}: open_clip can't load {model} with pretrained={pretrained}: {type(error).__name__}: {reason}"
            ) from error
        self.model.eval().requires_grad_(False)

    def encode_images(self, images: Images) -> Tensor:
        """Normalised features (B, D) of PIL images, or of a tensor of images, through which a gradient passes."""
        if isinstance(images, Tensor):
            inputs = on_tensors(self.preprocess, images.to(self.device))
        else:
            inputs = torch.stack([self.preprocess(image) for image in images]).to(self.device)
        return self.model.encode_image(inputs, normalize=True)

    def encode_prompts(self, prompts: list[str]) -> Tensor:
        """Normalised features (B, D) of prompts."""
        texts, indices = unique(prompts)
        return self.model.encode_text(self.tokenizer(texts).to(self.device), normalize=True)[indices]


class CLIP(torch.nn.Module):
    """Cosine similarity of open_clip embeddings (CLIP, arXiv 2103.00020), the "CLIP score" without its factor of 100.

    Range [-1, 1]: 0.2 to 0.4 for matching pairs under OpenAI's models, near 1 for the tiny one. score="probability" is what
    SigLIP (arXiv 2303.15343) and SigLIP 2 (arXiv 2502.14786) were trained for, sigmoid(scale * cosine + bias), in [0, 1].

    Weights: the tiny model (3 MB, this package's licence) by default; by name for instance model="ViT-L-14",
    pretrained="openai" (MIT, 1.7 GB), model="ViT-H-14", pretrained="laion2b_s32b_b79k" (MIT, 3.9 GB) or
    model="ViT-B-16-SigLIP2", pretrained="webli" (Apache-2.0, 1.5 GB); pretrained may be a local checkpoint file. Memory: the
    weights in float32. Gamed by images that write the prompt out as text.

    A column `output_caption` of the prompts, as in Emu Edit's test set (arXiv 2311.10089), describes an edited image and is
    compared in place of the prompt, which says only what to change.
    """

    differentiable = True

    def __init__(
        self,
        model: str = TINY,
        pretrained: str | None = None,
        score: Literal["cosine", "probability"] = "cosine",
        device: str = AUTO,
        batch_size: int = 64,
    ) -> None:
        super().__init__()
        self.embed = OpenCLIP("clip", model, pretrained, device)
        if score not in ("cosine", "probability"):
            raise FlowGRPOError(f"clip: score is cosine or probability, not {score}.")
        if score == "probability" and getattr(self.embed.model, "logit_bias", None) is None:
            raise FlowGRPOError(
                f"clip: {model} has no logit bias, so it gives no probability; set score=cosine, or a SigLIP model."
            )
        self.score, self.batch_size = score, batch_size

    def forward(self, images: Tensor, prompts: list[str], output_caption: list[str | None] | None = None) -> Tensor:
        """images (B, 3, H, W) in [0, 1]; returns (B,). A caption of None stands for the prompt."""
        captions = output_caption or [None] * len(prompts)
        texts = [caption or prompt for caption, prompt in zip(captions, prompts, strict=True)]
        return in_batches(self._score, images, texts, self.batch_size)

    def _score(self, images: Images, prompts: list[str]) -> Tensor:
        cosine = (self.embed.encode_images(images) * self.embed.encode_prompts(prompts)).sum(-1)
        if self.score == "cosine":
            return cosine
        return (self.embed.model.logit_scale.exp() * cosine + self.embed.model.logit_bias).sigmoid()


def untrained(model: str = TINY) -> torch.nn.Module:
    """A small model of this package with random weights, for training it."""
    return open_clip.create_model(model)


def contrastive_loss(model: torch.nn.Module, images: Tensor, tokens: Tensor) -> Tensor:
    """CLIP's symmetric cross-entropy over the batch; images (B, 3, H, W) normalised, tokens (B, L)."""
    image_features, text_features, scale = model(images, tokens)[:3]
    logits = scale * image_features @ text_features.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def _settings(model: str, pretrained: str | None) -> dict[str, Any]:
    """Settings that open_clip leaves to its caller: the image normalisation for a weights file, and the activation of a tag.

    A checkpoint file has no normalisation, so that of the model's first tag is used; otherwise SigLIP would get CLIP's. And
    open_clip only warns when a tag was trained with QuickGELU while the model's name means GELU (ViT-L-14, openai).
    """
    if model in FOLDERS:
        preprocessing = json.loads((FOLDERS[model] / CONFIG).read_text())["preprocess_cfg"]
        return {
            "image_mean": preprocessing["mean"],
            "image_std": preprocessing["std"],
            "image_resize_mode": preprocessing["resize_mode"],
        }
    tags = open_clip.list_pretrained_tags_by_model(model)
    if pretrained in tags:
        return {"force_quick_gelu": open_clip.get_pretrained_cfg(model, pretrained).get("quick_gelu", False)}
    if not tags:
        return {}
    preprocessing = open_clip.get_pretrained_cfg(model, tags[0])
    return {
        "image_mean": preprocessing["mean"],
        "image_std": preprocessing["std"],
        "image_interpolation": preprocessing["interpolation"],
        "image_resize_mode": preprocessing["resize_mode"],
    }


def _tokenizer(model: str) -> Any:
    """The model's tokenizer; one of transformers without the code that its files may name, whatever the model's own config says."""
    text = (open_clip.get_model_config(model) or {}).get("text_cfg", {})
    return open_clip.get_tokenizer(model, **({"trust_remote_code": False} if text.get("hf_tokenizer_name") else {}))


def _register() -> None:
    """Register the small models with open_clip, with the absolute paths of their tokenizers."""
    with tempfile.TemporaryDirectory() as registry:
        for name, folder in FOLDERS.items():
            model = json.loads((folder / CONFIG).read_text())["model_cfg"]
            model["text_cfg"]["hf_tokenizer_name"] = str(folder)
            (Path(registry) / f"{name}.json").write_text(json.dumps(model))
        open_clip.add_model_config(registry)


class LeastDistance(torch.nn.Module):
    """Cosine distance of an image's open_clip embedding to that of the nearest other image of its group.

    Range [0, 2], 0 for an image that is there twice. It is the d of GARDO (arXiv 2512.24138), which took DINOv3. Weights: the embedded
    model (3 MB), which knows coloured signs only; model and pretrained as in `clip`. Gamed by noise, as every measure of diversity: give
    it weight 0.
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
        kind = NotDownloaded if constants.HF_HUB_OFFLINE else HubUnreachable
        raise kind(f"{AESTHETIC_URL}: not in the cache, and it can't be downloaded.") from error


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


_register()
