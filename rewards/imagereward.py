"""ImageReward: BLIP's text encoder with cross-attention to the image, and a head on its output."""

import re
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor
from transformers import AutoTokenizer, BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.clip import LinearHead
from flow_grpo.rewards.downloads import downloads, hub_file
from flow_grpo.rewards.images import Images, in_batches
from flow_grpo.rewards.networks import AUTO, load_exactly, load_tensors, on_tensors, usable_device

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the raw scores on the authors' test set
TOKENS = 35  # every prompt is padded or cut to this
HEAD_WIDTH = 64  # of every attention, in BLIP's ViT as in BERT
UNUSED = re.compile(r"blip\.(vision_proj|text_proj)\.|blip\.text_encoder\.embeddings\.position_ids$")
RENAMES = [  # BLIP's names, to those of transformers
    (r"^blip\.visual_encoder\.blocks\.", "vision.encoder.layers."),
    (r"^blip\.visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^blip\.visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
    (r"^(vision\.encoder\..*)\.norm([12])\.", r"\1.layer_norm\2."),
    (r"^(vision\.encoder\..*)\.attn\.qkv\.", r"\1.self_attn.qkv."),
    (r"^(vision\.encoder\..*)\.attn\.proj\.", r"\1.self_attn.projection."),
    (r"^blip\.text_encoder\.", "text."),
]


class ImageReward(nn.Module):
    """ImageReward v1.0 (arXiv 2304.05977): the predicted ranking of the image for its prompt by people, in standard deviations.

    Range: about -2.3 to 2, 0 for an average image. Weights: ImageReward.pt of THUDM/ImageReward (Apache-2.0, 1.8 GB) or
    the same format at `weights`, and BERT's tokenizer, a hub id or a folder. Memory: 2 GB in float32. Gamed by a large, plain
    rendering of the prompt's nouns; counts and text have little influence.
    """

    differentiable = True

    def __init__(
        self, weights: str | None = None, tokenizer: str = "bert-base-uncased", device: str = AUTO, batch_size: int = 32
    ) -> None:
        super().__init__()
        self.device, self.batch_size = usable_device("imagereward", device), batch_size
        file = weights or hub_file("THUDM/ImageReward", "ImageReward.pt")
        state = _renamed(load_tensors("imagereward", file))
        vision, text = _configs(state, file)
        self.vision = BlipVisionModel(vision)
        self.text = BlipTextModel(text, add_pooling_layer=False)
        self.mlp = LinearHead(text.hidden_size)
        load_exactly("imagereward", self, state, file)
        with downloads(tokenizer):
            self.tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        self.preprocess = Compose(
            [
                Resize(vision.image_size, interpolation=InterpolationMode.BICUBIC),
                CenterCrop(vision.image_size),
                ToTensor(),
                Normalize((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
            ]
        )
        self.to(self.device).eval().requires_grad_(False)

    def forward(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images (B, 3, H, W) in [0, 1]; returns (B,)."""
        return in_batches(self._score, images, prompts, self.batch_size)

    def _score(self, images: Images, prompts: list[str]) -> Tensor:
        if isinstance(images, Tensor):
            pixels = on_tensors(self.preprocess, images.to(self.device))
        else:
            pixels = torch.stack([self.preprocess(image) for image in images]).to(self.device)
        image_states = self.vision(pixel_values=pixels).last_hidden_state
        tokens = self.tokenizer(prompts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt").to(
            self.device
        )
        read = self.text(tokens.input_ids, attention_mask=tokens.attention_mask, encoder_hidden_states=image_states)
        return (self.mlp(read.last_hidden_state[:, 0]) - MEAN) / STD


def _renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the checkpoint's tensors to the names of transformers, and drop those that the score does not use."""
    names = {name: name for name in state if not UNUSED.match(name)}
    for old, new in RENAMES:
        names = {name: re.sub(old, new, now) for name, now in names.items()}
    return {now: state[name] for name, now in names.items()}


def _configs(state: dict[str, Tensor], file: str | Path) -> tuple[BlipVisionConfig, BlipTextConfig]:
    """Derive the configs of both encoders from the tensors' shapes."""
    try:
        patches, width = state["vision.embeddings.position_embedding"].shape[1:]
        patch = state["vision.embeddings.patch_embedding.weight"].shape[-1]
        vision = BlipVisionConfig(
            hidden_size=width,
            intermediate_size=len(state["vision.encoder.layers.0.mlp.fc1.weight"]),
            num_hidden_layers=_depth("vision.encoder.layers", state),
            num_attention_heads=width // HEAD_WIDTH,
            image_size=round((patches - 1) ** 0.5) * patch,
            patch_size=patch,
            layer_norm_eps=1e-6,  # BLIP's own; the default of transformers is 1e-5
        )
        vocabulary, hidden = state["text.embeddings.word_embeddings.weight"].shape
        text = BlipTextConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            encoder_hidden_size=width,
            intermediate_size=len(state["text.encoder.layer.0.intermediate.dense.weight"]),
            num_hidden_layers=_depth("text.encoder.layer", state),
            num_attention_heads=hidden // HEAD_WIDTH,
            max_position_embeddings=len(state["text.embeddings.position_embeddings.weight"]),
        )
    except KeyError as error:
        raise FlowGRPOError(
            f"imagereward: {file} lacks {error}; give weights= ImageReward.pt of THUDM/ImageReward."
        ) from error
    return vision, text


def _depth(prefix: str, state: dict[str, Tensor]) -> int:
    return len({name.removeprefix(prefix).split(".")[1] for name in state if name.startswith(f"{prefix}.")})
