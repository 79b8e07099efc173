"""Pipelines of the real transformer and VAE shapes with random weights, and text encoders of the real widths with a layer or two."""

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import diffusers
import torch
import transformers

SD3 = {"sd35_medium": (24, 24, 13), "sd3_450m": (12, 16, 0)}  # layers, heads, and layers with two attentions
ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
# by model in flow_grpo/plan/model_configs: changes of its text encoder's config, and of its transformer's where it is small
PUBLISHED = {
    # three of the layers' outputs are used, up to the 27th one
    "flux2_klein": (
        {"num_hidden_layers": 28, **ONE_HEAD},
        {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 1},
    ),
    "qwen_image": ({"num_hidden_layers": 1}, {"num_layers": 1, "num_attention_heads": 1}),
    "z_image": (
        {"num_hidden_layers": 2, **ONE_HEAD},
        {"n_layers": 1, "n_refiner_layers": 1, "dim": 128, "n_heads": 1, "n_kv_heads": 1},
    ),
}
SMALL_VAE = {"block_out_channels": [32] * 4, "layers_per_block": 1, "base_dim": 8, "num_res_blocks": 1}


@contextmanager
def building(device: str) -> Iterator[None]:
    """A context in which networks are built in bfloat16 on a device, which draws their weights."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def build(kind: str, small: bool, device: str = "cpu") -> diffusers.DiffusionPipeline:
    """A pipeline of kind `flux_dev`, of `SD3` or of `PUBLISHED`, its transformer and VAE on the device; `small` shrinks all of it."""
    if kind in PUBLISHED:
        return published(kind, small, device)
    from dev.tiny import pretrain

    clip, t5 = pretrain.clip_tokenizer(), pretrain.t5_tokenizer()
    clip.model_max_length = 77  # to which prompts are padded, as the real one does
    width = 64 if small else 4096
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    with building(device):
        vae = autoencoder(small)
        transformer = sd3_transformer(kind, small, width) if kind in SD3 else flux_transformer(small, width)
    with building("cpu"):
        t5_text = transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=len(t5), d_model=width, d_kv=64, d_ff=64, num_layers=1, num_heads=1)
        )
        if kind not in SD3:
            text = clip_text(clip, 768, projected=False)
            return diffusers.FluxPipeline(scheduler, vae, text, clip, t5_text, t5, transformer)
        first, second = (clip_text(clip, size, projected=True) for size in clip_widths(small))
    encoders = {"text_encoder": first, "text_encoder_2": second, "text_encoder_3": t5_text}
    tokenizers = {"tokenizer": clip, "tokenizer_2": clip, "tokenizer_3": t5}
    return diffusers.StableDiffusion3Pipeline(transformer, scheduler, vae, **encoders, **tokenizers)


def published(kind: str, small: bool, device: str) -> diffusers.DiffusionPipeline:
    """A pipeline of `PUBLISHED` by the package's copy of its config files, all of it on the device; `small` shrinks all of it."""
    from flow_grpo.plan.meta_pipeline import FOLDER

    folder, (thin, fewer) = FOLDER / kind, PUBLISHED[kind]
    index = json.loads((folder / "model_index.json").read_text())
    classes = {
        name: getattr(importlib.import_module(one[0]), one[1]) for name, one in index.items() if isinstance(one, list)
    }
    parts = {name: classes[name].from_pretrained(folder / name) for name in ("tokenizer", "scheduler")}
    text = transformers.AutoConfig.from_pretrained(folder / "text_encoder")
    layer_types = ["full_attention"] * thin["num_hidden_layers"]
    sizes = {"vocab_size": len(parts["tokenizer"]), "intermediate_size": 64, "layer_types": layer_types, **thin}
    text.get_text_config().update(sizes)
    if hasattr(text, "vision_config"):  # Qwen-Image's, which encodes no image here
        text.vision_config.update({"depth": 1, "hidden_size": 64, "intermediate_size": 64})
    with building(device):
        parts["text_encoder"] = classes["text_encoder"](text)
        for name, changes in (("transformer", fewer), ("vae", SMALL_VAE)):
            config = classes[name].load_config(folder / name)
            known = {key: value for key, value in changes.items() if small and key in config}
            parts[name] = classes[name].from_config({**config, **known})
    return getattr(diffusers, index["_class_name"])(**parts)


def clip_widths(small: bool) -> tuple[int, int]:
    """The widths of SD3's two CLIP text encoders."""
    return (16, 32) if small else (768, 1280)


def clip_text(tokenizer: transformers.PreTrainedTokenizerBase, hidden: int, projected: bool) -> torch.nn.Module:
    """A CLIP text encoder of that width with two layers."""
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=2, num_attention_heads=1,
        projection_dim=hidden, eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config)


def autoencoder(small: bool) -> diffusers.AutoencoderKL:
    """The VAE of SD3 and FLUX."""
    return diffusers.AutoencoderKL(
        latent_channels=16, block_out_channels=(32,) * 4 if small else (128, 256, 512, 512),
        layers_per_block=1 if small else 2, use_quant_conv=False, use_post_quant_conv=False,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        scaling_factor=1.5305, shift_factor=0.0609, sample_size=1024,
    )  # fmt: skip


def sd3_transformer(kind: str, small: bool, width: int) -> diffusers.SD3Transformer2DModel:
    """The transformer of a kind of `SD3`, for T5 embeddings of that width."""
    layers, heads, dual = (2, 2, 2) if small else SD3[kind]
    return diffusers.SD3Transformer2DModel(
        sample_size=128, num_layers=layers, attention_head_dim=64, num_attention_heads=heads, joint_attention_dim=width,
        caption_projection_dim=heads * 64, pooled_projection_dim=sum(clip_widths(small)), out_channels=16,
        pos_embed_max_size=384, qk_norm="rms_norm", dual_attention_layers=tuple(range(dual)),
    )  # fmt: skip


def flux_transformer(small: bool, width: int) -> diffusers.FluxTransformer2DModel:
    """The transformer of FLUX.1-dev, for T5 embeddings of that width."""
    double, single, heads = (2, 2, 1) if small else (19, 38, 24)
    return diffusers.FluxTransformer2DModel(
        num_layers=double, num_single_layers=single, attention_head_dim=128, num_attention_heads=heads,
        joint_attention_dim=width, pooled_projection_dim=768, guidance_embeds=True,
    )  # fmt: skip


def save_configs(pipe: diffusers.DiffusionPipeline, folder: Path) -> None:
    """Write a pipeline without its weights, as `flow-grpo plan` reads it, and let it say that it comes from there."""
    for name, part in pipe.components.items():
        if isinstance(part, transformers.PreTrainedModel):
            part.config.save_pretrained(folder / name)
        elif isinstance(part, diffusers.ConfigMixin):
            part.save_config(folder / name)
        elif part is not None:
            part.save_pretrained(folder / name)
    pipe.save_config(folder)
    pipe.register_to_config(_name_or_path=str(folder))
