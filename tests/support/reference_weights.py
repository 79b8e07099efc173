"""Tiny random checkpoints in the formats of the published preference models: their key names, their tokenizers' files."""

import json
from pathlib import Path

import open_clip
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoTokenizer,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)
from transformers import Qwen2TokenizerFast as Qwen2Tokenizer

from flow_grpo.rewards.clip import FOLDER

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "cat", "on", "the", "blue", "mat", "dog"]
HEAD = ((0, 768, 1024), (2, 1024, 128), (4, 128, 64), (6, 64, 16), (7, 16, 1))  # of LAION's and ImageReward's Sequential
# Small towers under the published names, for the code that asks open_clip for these very models.
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 1}
VISION = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8}
OPEN_CLIP = {
    "ViT-H-14": {"embed_dim": 32, "vision_cfg": VISION, "text_cfg": TEXT},
    "ViT-L-14": {"embed_dim": 768, "vision_cfg": VISION, "text_cfg": TEXT},
    "ViT-L-14-quickgelu": {"embed_dim": 768, "quick_gelu": True, "vision_cfg": VISION, "text_cfg": TEXT},
    "ViT-B-16-SigLIP2": {
        "embed_dim": 64,
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": {"image_size": 64, "timm_model_name": "test_vit", "timm_pool": "map", "timm_proj": "none"},
        "text_cfg": {
            "context_length": 16,
            "vocab_size": 138,
            "hf_tokenizer_name": str(FOLDER),
            "tokenizer_kwargs": {"clean": "canonicalize"},
            "width": 64,
            "heads": 2,
            "layers": 1,
            "no_causal_mask": True,
            "proj_bias": True,
            "pool_type": "last",
        },
    },
}
CHAT = (  # Qwen2-VL's chat template, for pictures and text
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]


def open_clip_file(name: str, file: Path) -> Path:
    """The whole model, as HPSv2 keeps it: under "state_dict", beside a number."""
    torch.manual_seed(0)
    torch.save({"epoch": 1, "state_dict": open_clip.create_model(name).state_dict()}, file)
    return file


def linear_head(width: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    head = {}
    for place, before, after in HEAD:
        before = width if place == 0 else before
        head[f"layers.{place}.weight"] = torch.randn(after, before) / before**0.5
        head[f"layers.{place}.bias"] = torch.randn(after)
    return head


def pickscore(folder: Path) -> Path:
    """Model and processor in one folder."""
    torch.manual_seed(2)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tower = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": 138, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, **tower}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config={"image_size": 32, "patch_size": 8, **tower}))
    model.save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def bert_tokenizer(folder: Path) -> Path:
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True}))
    return folder


def imagereward() -> dict[str, Tensor]:
    """ImageReward.pt with the names of BLIP's own code: a ViT and a BERT of width 128, so 2 heads, 2 layers, 32 x 32 pixels."""
    random = torch.Generator().manual_seed(3)
    state: dict[str, Tensor] = {}

    def linear(name: str, after: int, before: int) -> None:
        state[f"{name}.weight"] = torch.randn(after, before, generator=random) / before**0.5
        state[f"{name}.bias"] = 0.1 * torch.randn(after, generator=random)

    def norm(name: str) -> None:
        state[f"{name}.weight"] = 1 + 0.1 * torch.randn(128, generator=random)
        state[f"{name}.bias"] = 0.1 * torch.randn(128, generator=random)

    eye = "blip.visual_encoder"  # with small numbers before the first norm, so that its epsilon shows
    state[f"{eye}.cls_token"] = 1e-3 * torch.randn(1, 1, 128, generator=random)
    state[f"{eye}.pos_embed"] = 1e-3 * torch.randn(1, 5, 128, generator=random)
    state[f"{eye}.patch_embed.proj.weight"] = 1e-4 * torch.randn(128, 3, 16, 16, generator=random)
    state[f"{eye}.patch_embed.proj.bias"] = 1e-3 * torch.randn(128, generator=random)
    norm(f"{eye}.norm")
    for i in range(2):
        norm(f"{eye}.blocks.{i}.norm1")
        norm(f"{eye}.blocks.{i}.norm2")
        linear(f"{eye}.blocks.{i}.attn.qkv", 384, 128)
        linear(f"{eye}.blocks.{i}.attn.proj", 128, 128)
        linear(f"{eye}.blocks.{i}.mlp.fc1", 256, 128)
        linear(f"{eye}.blocks.{i}.mlp.fc2", 128, 256)
    bert = "blip.text_encoder"
    state[f"{bert}.embeddings.position_ids"] = torch.arange(40)[None]
    state[f"{bert}.embeddings.word_embeddings.weight"] = torch.randn(len(WORDS), 128, generator=random)
    state[f"{bert}.embeddings.position_embeddings.weight"] = torch.randn(40, 128, generator=random)
    norm(f"{bert}.embeddings.LayerNorm")
    for i in range(2):
        for attention in ("attention", "crossattention"):
            for part in ("query", "key", "value"):
                linear(f"{bert}.encoder.layer.{i}.{attention}.self.{part}", 128, 128)
            linear(f"{bert}.encoder.layer.{i}.{attention}.output.dense", 128, 128)
            norm(f"{bert}.encoder.layer.{i}.{attention}.output.LayerNorm")
        linear(f"{bert}.encoder.layer.{i}.intermediate.dense", 256, 128)
        linear(f"{bert}.encoder.layer.{i}.output.dense", 128, 256)
        norm(f"{bert}.encoder.layer.{i}.output.LayerNorm")
    linear("blip.vision_proj", 16, 128)  # in the file, not in the score
    linear("blip.text_proj", 16, 128)
    return state | {f"mlp.{name}": value for name, value in linear_head(128).items()}


def hpsv3(folder: Path) -> tuple[Qwen2VLForConditionalGeneration, dict[str, Tensor]]:
    """A Qwen2-VL folder without weights, HPSv3.safetensors beside it; returns the model and the head that are in the file."""
    torch.manual_seed(4)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = Qwen2Tokenizer(tokenizer_object=bpe, vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    tokenizer.add_tokens(QWEN_TOKENS, special_tokens=True)
    tokenizer.pad_token = "<|endoftext|>"
    Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), CHAT).save_pretrained(folder)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": 300,  # as published, more than the tokenizer has
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    config.save_pretrained(folder)
    config.text_config.vocab_size = len(tokenizer) + 1  # and one for the reward token
    model = Qwen2VLForConditionalGeneration(config).eval()
    for parameter in model.parameters():  # the default of 0.02 leaves attention flat, and positions without effect
        parameter.data = torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 1)
    head = {}
    for place, before, after in ((0, 64, 1024), (3, 1024, 16), (5, 16, 2)):
        head[f"rm_head.{place}.weight"] = torch.randn(after, before) / before**0.5
        head[f"rm_head.{place}.bias"] = torch.randn(after)
    old_names = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value.contiguous().clone()
        for name, value in model.state_dict().items()
    }
    save_file(old_names | head, folder / "HPSv3.safetensors")
    return model, head
