"""The rewards of gpu.py's rows: models of the real shapes with random weights, OCR, and a server that takes its time."""

import functools
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from alternating import alternating
from PIL import Image, ImageDraw, ImageFont
from random_models import building
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchvision.transforms.functional import to_tensor
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLModel,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from dev.tiny import pretrain, world
from flow_grpo.rewards.hpsv3 import INSTRUCTION

ROOT = Path(__file__).parent.parent
SLOW = f"{Path(__file__).parent / 'alternating.py'}:slow"
QWEN_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class RowRewards:
    """The rewards of a row.

    Attributes:
        functions: as the trainer takes them.
        overrides: of the run's config.
        weight_bytes: of their models' weights.
    """

    functions: list[Any]
    overrides: list[str] = field(default_factory=list)
    weight_bytes: float = 0.0


def drawn_ocr(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
    """`ocr` of drawings of the texts: images of random weights have none, so nothing would be read."""
    return _ocr()(torch.stack([drawn(prompt, *images.shape[-2:]) for prompt in prompts]), prompts)


@functools.cache
def _ocr() -> Any:
    from flow_grpo.rewards.ocr import OCR  # of packages that other rows do without

    return OCR()


@functools.cache
def drawn(prompt: str, height: int, width: int) -> torch.Tensor:
    """An image (3, H, W) in [0, 1] of a prompt's quoted text, in black on white."""
    image, lines = Image.new("RGB", (width, height), "white"), textwrap.wrap(prompt.split('"')[1], 12)
    font = ImageFont.truetype(str(world.FONT), height / 10)
    ImageDraw.Draw(image).text((width / 16, height / 4), "\n".join(lines), "black", font)
    return to_tensor(image)


@contextmanager
def rewards_of(kind: str | None, gradient: bool, folder: Path, small: bool, device: str) -> Iterator[RowRewards]:
    """A context with the rewards of a row.

    Args:
        kind: a model of `MODELS`, `ocr`, or `remote`; None for `alternating` alone, which is trained on beside a model too.
        gradient: the reward's gradient is trained on, so that it stands alone.
        folder: for the model's files.
    """
    if kind is None:
        yield RowRewards([alternating])
    elif kind == "ocr":
        yield RowRewards([alternating, drawn_ocr])
    elif kind == "remote":
        with server() as url:
            yield RowRewards([SLOW], [f"rewards={{{SLOW!r}: {{remote: {url!r}}}}}"])
    else:
        options, size = MODELS[kind](folder / kind, small, device)
        functions = [kind] if gradient else [alternating, kind]
        yield RowRewards(functions, [f"rewards={{{kind}: {{options: {options}}}}}"], size)


@contextmanager
def server() -> Iterator[str]:
    """A context with the address of a server of `alternating.slow` on this machine, in a process of its own."""
    command = [sys.executable, "-m", "flow_grpo", "serve", SLOW, "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().split()[-1]  # NAME at URL
        finally:
            process.terminate()


def pickscore(folder: Path, small: bool, device: str) -> tuple[dict[str, str], float]:
    """PickScore's CLIP ViT-H/14 in float32. Returns the reward's options, and the bytes of its weights."""
    tokenizer = pretrain.clip_tokenizer()
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    text, vision, pixels = (
        (_tower(64, 2, 2), _tower(64, 2, 2), 28) if small else (_tower(1024, 24, 16), _tower(1280, 32, 16), 224)
    )
    config = CLIPConfig(
        text_config={"vocab_size": 49408, **text, **special},
        vision_config={"image_size": pixels, "patch_size": 14, **vision},
        projection_dim=1024,
    )
    with torch.device(device):
        model = CLIPModel(config)
    model.save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": pixels}, crop_size={"height": pixels, "width": pixels})
    CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return {"weights": str(folder), "processor": str(folder)}, _bytes(model)


def _tower(width: int, layers: int, heads: int) -> dict[str, Any]:
    """The config of one of CLIP's two transformers."""
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "hidden_act": "gelu", "projection_dim": 1024}


def hpsv3(folder: Path, small: bool, device: str) -> tuple[dict[str, str], float]:
    """HPSv3's Qwen2-VL 7B and head in bfloat16, with a tokenizer of about one token a word. Returns as `pickscore`."""
    tokenizer = _tokenizer_of(INSTRUCTION)
    Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), CHAT).save_pretrained(folder)
    width, inner, layers, heads, groups, sections = (
        (64, 64, 2, 4, 2, [2, 3, 3]) if small else (3584, 18944, 28, 28, 4, [16, 24, 24])
    )
    depth, eye = (1, {"embed_dim": 32, "num_heads": 2}) if small else (32, {"embed_dim": 1280, "num_heads": 16})
    names = {
        "image": "<|image_pad|>",
        "video": "<|video_pad|>",
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
    }
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": 152064, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": groups,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
        },
        vision_config={"depth": depth, "hidden_size": width, "mlp_ratio": 4, **eye},
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    )  # fmt: skip
    config.save_pretrained(folder)
    with building(device):
        model = Qwen2VLModel(config)
        head = torch.nn.ModuleDict(
            {"0": torch.nn.Linear(width, 1024), "3": torch.nn.Linear(1024, 16), "5": torch.nn.Linear(16, 2)}
        )
    tensors = {**model.state_dict(), **{f"rm_head.{name}": value for name, value in head.state_dict().items()}}
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "HPSv3.safetensors")
    return {"weights": str(folder / "HPSv3.safetensors"), "processor": str(folder)}, _bytes(model)


def _tokenizer_of(text: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with Qwen's special tokens that has the words of a text as tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([text], trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=QWEN_TOKENS[0], eos_token=QWEN_TOKENS[2])
    tokenizer.add_tokens(QWEN_TOKENS, special_tokens=True)
    return tokenizer


def _bytes(model: torch.nn.Module) -> float:
    return float(sum(parameter.nbytes for parameter in model.parameters()))


MODELS = {"pickscore": pickscore, "hpsv3": hpsv3}
