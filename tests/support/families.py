"""Tiny random checkpoints of many families, in the hub's layout and with the real component classes.

Each function builds one pipeline; `CALL` has the arguments that make its pictures small. Tokenizers know bytes or characters,
vision-language encoders are what their classes make of small configs.
"""

import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers as d
import torch
import transformers as t
from tokenizers.pre_tokenizers import ByteLevel

from dev.tiny import pretrain

WIDTH = 32
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Tiny:
    build: Callable[[], d.DiffusionPipeline]
    call: dict[str, Any] = field(default_factory=dict)  # of every call, beside height and width
    guidance: float | None = 3.0  # a scale with guidance on; None where there is nothing to switch
    size: tuple[int, int] = (32, 48)
    dead: tuple[str, ...] = ()  # modules whose output the last block throws away: no gradient comes back from there
    attributes: dict[str, Any] = field(default_factory=dict)  # of pipelines that know large pictures only


# -- tokenizers ---------------------------------------------------------------------------------------------------------


def byte_tokenizer() -> t.Qwen2Tokenizer:
    """A token per byte, and Qwen's marks; with a chat template."""
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*marks, *sorted(ByteLevel.alphabet())])}
    more = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    tokenizer = t.Qwen2Tokenizer(vocab=vocab, merges=[], extra_special_tokens=[*marks[1:], *more])
    tokenizer.chat_template = CHAT
    return tokenizer


def gemma_tokenizer() -> t.GemmaTokenizer:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *string.printable.strip()]
    return t.GemmaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[])


def llama_tokenizer() -> t.LlamaTokenizer:
    tokens = ["<unk>", "<s>", "</s>", "▁", *string.printable.strip()]
    tokenizer = t.LlamaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    tokenizer.pad_token = "</s>"
    return tokenizer


# -- text encoders ------------------------------------------------------------------------------------------------------


def decoder(vocab: int, layers: int = 2, **more: Any) -> dict[str, Any]:
    """The numbers of a small decoder-only language model."""
    return {
        "vocab_size": vocab, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 2048, **more,
    }  # fmt: skip


def qwen25_vl(tokenizer: t.Qwen2Tokenizer) -> t.Qwen2_5_VLForConditionalGeneration:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": WIDTH}
    config = t.Qwen2_5_VLConfig(
        text_config=decoder(len(tokenizer), rope_parameters=rope), vision_config=vision, **image_tokens(tokenizer)
    )
    return t.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl(tokenizer: t.Qwen2Tokenizer, layers: int = 2) -> t.Qwen3VLConfig:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    vision = {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": WIDTH,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    text = decoder(len(tokenizer), layers, rope_parameters=rope)
    return t.Qwen3VLConfig(text_config=text, vision_config=vision, **image_tokens(tokenizer))


def image_tokens(tokenizer: t.Qwen2Tokenizer) -> dict[str, int]:
    names = ("image_token", "video_token", "vision_start_token", "vision_end_token")
    marks = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    return {f"{name}_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in zip(names, marks, strict=True)}


def gemma2(tokenizer: t.GemmaTokenizer) -> t.Gemma2Model:
    return t.Gemma2Model(t.Gemma2Config(**decoder(len(tokenizer)), query_pre_attn_scalar=16))


def clip(tokenizer: t.CLIPTokenizer, projected: bool) -> torch.nn.Module:
    config = t.CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=WIDTH, max_position_embeddings=77, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return t.CLIPTextModelWithProjection(config) if projected else t.CLIPTextModel(config)


def clip_tokenizer() -> t.CLIPTokenizer:
    tokenizer = pretrain.clip_tokenizer()
    tokenizer.model_max_length = 77
    return tokenizer


def t5() -> tuple[t.T5TokenizerFast, t.T5EncoderModel]:
    tokenizer = pretrain.t5_tokenizer()
    config = t.T5Config(vocab_size=len(tokenizer), d_model=WIDTH, d_kv=16, d_ff=WIDTH, num_layers=2, num_heads=2)
    return tokenizer, t.T5EncoderModel(config)


# -- autoencoders and schedulers ------------------------------------------------------------------------------------------


def vae(levels: int = 2, channels: int = 4, **more: Any) -> d.AutoencoderKL:
    """An autoencoder that makes pictures 2^(levels - 1) times smaller."""
    return d.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels, up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(4,) * levels, layers_per_block=1, latent_channels=channels, norm_num_groups=2,
        shift_factor=0.1, scaling_factor=0.4, mid_block_add_attention=False, **more,
    )  # fmt: skip


def flux2_vae() -> d.AutoencoderKLFlux2:
    return d.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, block_out_channels=(4, 4),
        layers_per_block=1, latent_channels=4, norm_num_groups=2, mid_block_add_attention=False,
    )  # fmt: skip


def qwen_vae() -> d.AutoencoderKLQwenImage:
    return d.AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False],
        latents_mean=[0.0, 0.1, 0.2, 0.3], latents_std=[1.0, 1.1, 1.2, 1.3],
    )  # fmt: skip


def flow(**more: Any) -> d.FlowMatchEulerDiscreteScheduler:
    return d.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **more})


def dynamic(**more: Any) -> d.FlowMatchEulerDiscreteScheduler:
    return flow(use_dynamic_shifting=True, **more)


# -- families -----------------------------------------------------------------------------------------------------------


def sd3() -> d.StableDiffusion3Pipeline:
    return pretrain.pipeline()


def flux() -> d.FluxPipeline:
    clip_, (t5_tokenizer, t5_encoder) = clip_tokenizer(), t5()
    return d.FluxPipeline(
        scheduler=dynamic(), vae=vae(), text_encoder=clip(clip_, False), tokenizer=clip_, text_encoder_2=t5_encoder,
        tokenizer_2=t5_tokenizer,
        transformer=d.FluxTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, guidance_embeds=True, axes_dims_rope=(4, 4, 8),
        ),
    )  # fmt: skip


def flux2_transformer(**more: Any) -> d.Flux2Transformer2DModel:
    return d.Flux2Transformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=3 * WIDTH, timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4), **more,
    )  # fmt: skip


def flux2() -> d.Flux2Pipeline:
    tokenizer = byte_tokenizer()
    text = {"model_type": "mistral", **decoder(len(tokenizer))}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 32,
              "num_attention_heads": 1, "head_dim": 16, "patch_size": 16}  # fmt: skip
    config = t.Mistral3Config(text_config=text, vision_config=vision, image_token_index=1)
    return d.Flux2Pipeline(
        scheduler=dynamic(), vae=flux2_vae(), text_encoder=t.Mistral3ForConditionalGeneration(config), tokenizer=tokenizer,
        transformer=flux2_transformer(),
    )  # fmt: skip


def flux2_klein() -> d.Flux2KleinPipeline:
    tokenizer = byte_tokenizer()
    return d.Flux2KleinPipeline(
        scheduler=dynamic(), vae=flux2_vae(), text_encoder=t.Qwen3ForCausalLM(t.Qwen3Config(**decoder(len(tokenizer)))),
        tokenizer=tokenizer, transformer=flux2_transformer(guidance_embeds=False),
    )  # fmt: skip


def qwen_image() -> d.QwenImagePipeline:
    tokenizer = byte_tokenizer()
    return d.QwenImagePipeline(
        scheduler=dynamic(shift_terminal=0.02), vae=qwen_vae(), text_encoder=qwen25_vl(tokenizer), tokenizer=tokenizer,
        transformer=d.QwenImageTransformer2DModel(
            in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=WIDTH, axes_dims_rope=(4, 6, 6),
        ),
    )  # fmt: skip


def z_image() -> d.ZImagePipeline:
    tokenizer = byte_tokenizer()
    return d.ZImagePipeline(
        scheduler=flow(), vae=vae(), text_encoder=t.Qwen3Model(t.Qwen3Config(**decoder(len(tokenizer)))),
        tokenizer=tokenizer,
        transformer=d.ZImageTransformer2DModel(
            in_channels=4, dim=WIDTH, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=WIDTH,
            axes_dims=[4, 6, 6], axes_lens=[1024, 64, 64],
        ),
    )  # fmt: skip


def sana() -> d.SanaPipeline:
    tokenizer = gemma_tokenizer()
    return d.SanaPipeline(
        scheduler=flow(), text_encoder=gemma2(tokenizer), tokenizer=tokenizer,
        vae=d.AutoencoderDC(
            latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock", "ResBlock"),
            decoder_block_types=("ResBlock", "ResBlock"), encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
            encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), ()),
            decoder_qkv_multiscales=((), ()), scaling_factor=0.4,
        ),
        transformer=d.SanaTransformer2DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=1,
            num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=WIDTH,
        ),
    )  # fmt: skip


def lumina2() -> d.Lumina2Pipeline:
    tokenizer = gemma_tokenizer()
    return d.Lumina2Pipeline(
        scheduler=dynamic(), vae=vae(4), text_encoder=gemma2(tokenizer), tokenizer=tokenizer,
        transformer=d.Lumina2Transformer2DModel(
            in_channels=4, hidden_size=24, num_layers=1, num_refiner_layers=1, num_attention_heads=3, num_kv_heads=1,
            multiple_of=8, axes_dim_rope=(4, 2, 2), axes_lens=(512, 64, 64), cap_feat_dim=WIDTH,
        ),
    )  # fmt: skip


def aura_flow() -> d.AuraFlowPipeline:
    tokenizer = pretrain.t5_tokenizer()
    config = t.UMT5Config(vocab_size=len(tokenizer), d_model=WIDTH, d_kv=16, d_ff=WIDTH, num_layers=2, num_heads=2)
    return d.AuraFlowPipeline(
        scheduler=flow(), vae=vae(), text_encoder=t.UMT5EncoderModel(config), tokenizer=tokenizer,
        transformer=d.AuraFlowTransformer2DModel(
            sample_size=16, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=WIDTH, caption_projection_dim=WIDTH, pos_embed_max_size=256,
        ),
    )  # fmt: skip


def chroma() -> d.ChromaPipeline:
    tokenizer, encoder = t5()
    return d.ChromaPipeline(
        scheduler=dynamic(), vae=vae(), text_encoder=encoder, tokenizer=tokenizer,
        transformer=d.ChromaTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 8), approximator_num_channels=8, approximator_hidden_dim=16,
            approximator_layers=1,
        ),
    )  # fmt: skip


def cogview4() -> d.CogView4Pipeline:
    tokenizer = pretrain.t5_tokenizer()
    return d.CogView4Pipeline(
        scheduler=flow(base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"),
        vae=vae(), text_encoder=t.GlmModel(t.GlmConfig(**decoder(len(tokenizer)), pad_token_id=0)), tokenizer=tokenizer,
        transformer=d.CogView4Transformer2DModel(
            in_channels=4, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2, text_embed_dim=WIDTH,
            time_embed_dim=8, condition_dim=4, pos_embed_max_size=64, sample_size=16, rope_axes_dim=(16, 16),
        ),
    )  # fmt: skip


def glm_image() -> d.GlmImagePipeline:
    """Its prior is sampled by a language model; this one always takes the likeliest token, so that two calls can be compared."""
    marks = {"bos_token": "<|start|>", "image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    vocab = {token: i for i, token in enumerate(["<|endoftext|>", *marks.values(), *sorted(ByteLevel.alphabet())])}
    bos = marks.pop("bos_token")
    tokenizer = t.Qwen2Tokenizer(vocab=vocab, merges=[], bos_token=bos, padding_side="left", extra_special_tokens=marks)
    rope, codes = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}, 64
    text = {**decoder(len(tokenizer), 1), "rope_parameters": rope, "vision_vocab_size": codes, "eos_token_id": codes}
    prior = t.GlmImageForConditionalGeneration(t.GlmImageConfig(
        text_config={**text, "pad_token_id": 0}, image_token_id=vocab["<|image|>"], image_start_token_id=vocab[bos],
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 16, "image_size": 32},
        vq_config={"embed_dim": 16, "num_embeddings": codes, "latent_channels": 16}, image_end_token_id=codes,
    ))  # fmt: skip
    prior.generation_config.do_sample, prior.generation_config.top_k = True, 1
    byt5 = t.ByT5Tokenizer(extra_ids=0)
    glyphs = t.T5Config(vocab_size=len(byt5), d_model=WIDTH, d_kv=16, d_ff=WIDTH, num_layers=1, num_heads=2)
    return d.GlmImagePipeline(
        scheduler=flow(), tokenizer=byt5, text_encoder=t.T5EncoderModel(glyphs), vision_language_encoder=prior,
        processor=t.GlmImageProcessor(t.GlmImageImageProcessor(), tokenizer, chat_template=CHAT),
        vae=vae(4, latents_mean=[0.0, 0.1, 0.2, 0.3], latents_std=[1.0, 1.1, 1.2, 1.3]),
        transformer=d.GlmImageTransformer2DModel(
            in_channels=4, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2, text_embed_dim=WIDTH,
            time_embed_dim=8, condition_dim=4, prior_vq_quantizer_codebook_size=codes,
        ),
    )  # fmt: skip


def hunyuan_image() -> d.HunyuanImagePipeline:
    tokenizer = byte_tokenizer()
    byt5 = t.ByT5Tokenizer(extra_ids=0)
    config = t.T5Config(vocab_size=len(byt5), d_model=WIDTH, d_kv=16, d_ff=WIDTH, num_layers=1, num_heads=2)
    return d.HunyuanImagePipeline(
        scheduler=flow(),
        vae=d.AutoencoderKLHunyuanImage(
            in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 32), layers_per_block=1,
            spatial_compression_ratio=2, sample_size=32, scaling_factor=0.4,
        ),
        text_encoder=qwen25_vl(tokenizer), tokenizer=tokenizer, text_encoder_2=t.T5EncoderModel(config), tokenizer_2=byt5,
        transformer=d.HunyuanImageTransformer2DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1, num_single_layers=1,
            num_refiner_layers=1, text_embed_dim=WIDTH, text_embed_2_dim=WIDTH, rope_axes_dim=(8, 8),
        ),
    )  # fmt: skip


def hidream() -> d.HiDreamImagePipeline:
    clips, (t5_tokenizer, t5_encoder), llama = (clip_tokenizer(), clip_tokenizer()), t5(), llama_tokenizer()
    return d.HiDreamImagePipeline(
        scheduler=flow(), vae=vae(), text_encoder=clip(clips[0], True), tokenizer=clips[0], text_encoder_2=clip(clips[1], True),
        tokenizer_2=clips[1], text_encoder_3=t5_encoder, tokenizer_3=t5_tokenizer,
        text_encoder_4=t.LlamaForCausalLM(t.LlamaConfig(**decoder(len(llama)))), tokenizer_4=llama,
        transformer=d.HiDreamImageTransformer2DModel(
            patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
            num_attention_heads=4, caption_channels=[WIDTH, WIDTH], text_emb_dim=2 * WIDTH, num_routed_experts=4,
            num_activated_experts=2, axes_dims_rope=(4, 2, 2), max_resolution=(32, 32), llama_layers=[0, 1],
        ),
    )  # fmt: skip


def prx() -> d.PRXPipeline:
    tokenizer = gemma_tokenizer()
    config = t.T5GemmaConfig(encoder=decoder(len(tokenizer)), decoder=decoder(len(tokenizer)), is_encoder_decoder=False)
    encoder = t.T5GemmaEncoderModel(config).encoder
    tokenizer.model_max_length = 64
    encoder.config = config  # the hub's folder has the config of the whole model
    return d.PRXPipeline(
        scheduler=flow(), vae=vae(), text_encoder=encoder, tokenizer=tokenizer,
        transformer=d.PRXTransformer2DModel(
            in_channels=4, context_in_dim=WIDTH, hidden_size=WIDTH, num_heads=2, depth=1, axes_dim=[8, 8],
        ),
    )  # fmt: skip


def ovis() -> d.OvisImagePipeline:
    tokenizer = byte_tokenizer()
    return d.OvisImagePipeline(
        scheduler=dynamic(), vae=vae(), text_encoder=t.Qwen3Model(t.Qwen3Config(**decoder(len(tokenizer)))),
        tokenizer=tokenizer,
        transformer=d.OvisImageTransformer2DModel(
            in_channels=16, out_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 8),
        ),
    )  # fmt: skip


def omnigen() -> d.OmniGenPipeline:
    tokenizer = llama_tokenizer()
    return d.OmniGenPipeline(
        scheduler=flow(invert_sigmas=True, num_train_timesteps=1, shift=1.0), vae=vae(4), tokenizer=tokenizer,
        transformer=d.OmniGenTransformer2DModel(
            in_channels=4, hidden_size=WIDTH, num_attention_heads=2, num_key_value_heads=2, intermediate_size=WIDTH,
            num_layers=1, vocab_size=len(tokenizer), pad_token_id=2, time_step_dim=16, pos_embed_max_size=64,
            rope_scaling={"long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
        ),
    )  # fmt: skip


def bria() -> d.BriaPipeline:
    tokenizer, encoder = t5()
    return d.BriaPipeline(
        scheduler=dynamic(), vae=vae(), text_encoder=encoder, tokenizer=tokenizer,
        transformer=d.BriaTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=WIDTH, axes_dims_rope=[4, 4, 8],
        ),
    )  # fmt: skip


def bria_fibo() -> d.BriaFiboPipeline:
    tokenizer = byte_tokenizer()
    config = t.SmolLM3Config(**{**decoder(len(tokenizer)), "pad_token_id": 0})
    return d.BriaFiboPipeline(
        scheduler=dynamic(), text_encoder=t.SmolLM3ForCausalLM(config), tokenizer=tokenizer,
        vae=d.AutoencoderKLWan(
            base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
            latents_mean=[0.0] * 4, latents_std=[1.0] * 4, patch_size=2, in_channels=12, out_channels=12,
            scale_factor_spatial=16, is_residual=True,
        ),
        transformer=d.BriaFiboTransformer2DModel(
            in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=2 * WIDTH, axes_dims_rope=[4, 4, 8], text_encoder_dim=WIDTH,
        ),
    )  # fmt: skip


def longcat() -> d.LongCatImagePipeline:
    tokenizer = byte_tokenizer()
    processor = t.Qwen2VLProcessor(t.Qwen2VLImageProcessor(), tokenizer, t.Qwen2VLVideoProcessor(), chat_template=CHAT)
    return d.LongCatImagePipeline(
        scheduler=dynamic(), vae=vae(channels=16), text_encoder=qwen25_vl(tokenizer), tokenizer=tokenizer,
        text_processor=processor,
        transformer=d.LongCatImageTransformer2DModel(
            in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=[4, 4, 8],
        ),
    )  # fmt: skip


def kandinsky5() -> d.Kandinsky5T2IPipeline:
    tokenizer, clip_ = byte_tokenizer(), clip_tokenizer()
    processor = t.Qwen2VLProcessor(t.Qwen2VLImageProcessor(), tokenizer, t.Qwen2VLVideoProcessor(), chat_template=CHAT)
    return d.Kandinsky5T2IPipeline(
        scheduler=flow(), vae=vae(4), text_encoder=qwen25_vl(tokenizer), tokenizer=processor,
        text_encoder_2=clip(clip_, False), tokenizer_2=clip_,
        transformer=d.Kandinsky5Transformer3DModel(
            in_visual_dim=4, out_visual_dim=4, in_text_dim=WIDTH, in_text_dim2=WIDTH, time_dim=16, model_dim=WIDTH,
            ff_dim=WIDTH, num_text_blocks=1, num_visual_blocks=1, axes_dims=(4, 6, 6),
        ),
    )  # fmt: skip


def krea2() -> d.Krea2Pipeline:
    tokenizer = byte_tokenizer()
    return d.Krea2Pipeline(
        scheduler=dynamic(), vae=qwen_vae(), text_encoder=t.Qwen3VLModel(qwen3_vl(tokenizer)), tokenizer=tokenizer,
        text_encoder_select_layers=(0, 1, 2),
        transformer=d.Krea2Transformer2DModel(
            in_channels=16, num_layers=1, attention_head_dim=16, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=WIDTH, timestep_embed_dim=16, text_hidden_dim=WIDTH, num_text_layers=3,
            text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=WIDTH,
            num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 6, 6),
        ),
    )  # fmt: skip


def nucleus() -> d.NucleusMoEImagePipeline:
    tokenizer = byte_tokenizer()
    processor = t.Qwen3VLProcessor(t.Qwen2VLImageProcessor(), tokenizer, t.Qwen3VLVideoProcessor(), chat_template=CHAT)
    return d.NucleusMoEImagePipeline(
        scheduler=dynamic(), vae=qwen_vae(), text_encoder=t.Qwen3VLForConditionalGeneration(qwen3_vl(tokenizer, layers=3)),
        processor=processor,
        transformer=d.NucleusMoEImageTransformer2DModel(
            in_channels=16, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2,
            num_key_value_heads=1, joint_attention_dim=WIDTH, axes_dims_rope=(4, 6, 6), num_experts=4,
            moe_intermediate_dim=16, capacity_factors=[2.0], dense_moe_strategy="all_moe",
        ),
    )  # fmt: skip


def ernie() -> d.ErnieImagePipeline:
    tokenizer = byte_tokenizer()
    text = {"model_type": "mistral", **decoder(len(tokenizer))}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 32,
              "num_attention_heads": 1, "head_dim": 16, "patch_size": 16}  # fmt: skip
    return d.ErnieImagePipeline(
        scheduler=flow(), vae=flux2_vae(), tokenizer=tokenizer,
        text_encoder=t.Mistral3Model(t.Mistral3Config(text_config=text, vision_config=vision, image_token_index=1)),
        transformer=d.ErnieImageTransformer2DModel(
            hidden_size=WIDTH, num_attention_heads=2, num_layers=1, ffn_hidden_size=WIDTH, in_channels=16, out_channels=16,
            text_in_dim=WIDTH, rope_axes_dim=(4, 6, 6),
        ),
    )  # fmt: skip


def ideogram4() -> d.Ideogram4Pipeline:
    tokenizer = byte_tokenizer()
    denoisers = [
        d.Ideogram4Transformer2DModel(
            in_channels=16, num_layers=1, attention_head_dim=16, num_attention_heads=2, intermediate_size=WIDTH,
            adaln_dim=16, llm_features_dim=13 * WIDTH, mrope_section=(4, 2, 2),
        )
        for _ in range(2)
    ]  # fmt: skip
    return d.Ideogram4Pipeline(
        scheduler=flow(shift=1.0), vae=flux2_vae(), text_encoder=t.Qwen3VLModel(qwen3_vl(tokenizer, layers=36)),
        tokenizer=tokenizer, transformer=denoisers[0], unconditional_transformer=denoisers[1],
    )  # fmt: skip


def wan() -> d.WanPipeline:
    tokenizer = pretrain.t5_tokenizer()
    config = t.UMT5Config(vocab_size=len(tokenizer), d_model=WIDTH, d_kv=16, d_ff=WIDTH, num_layers=2, num_heads=2)
    return d.WanPipeline(
        scheduler=d.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        vae=d.AutoencoderKLWan(
            base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True],
            latents_mean=[0.0, 0.1, 0.2, 0.3], latents_std=[1.0, 1.1, 1.2, 1.3], scale_factor_temporal=2, scale_factor_spatial=2,
        ),
        text_encoder=t.UMT5EncoderModel(config), tokenizer=tokenizer, transformer=wan_transformer(),
    )  # fmt: skip


def wan_transformer() -> d.WanTransformer3DModel:
    return d.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=WIDTH, freq_dim=16,
        ffn_dim=WIDTH, num_layers=2, rope_max_seq_len=64,
    )  # fmt: skip


def wan22() -> d.WanPipeline:
    """With an expert for the noisy steps and one for the others."""
    pipe = wan()
    components = {**pipe.components, "transformer_2": wan_transformer()}
    return d.WanPipeline(boundary_ratio=0.875, **components)


def hunyuan_video() -> d.HunyuanVideoPipeline:
    llama, clip_ = llama_tokenizer(), clip_tokenizer()
    return d.HunyuanVideoPipeline(
        scheduler=flow(), text_encoder=t.LlamaModel(t.LlamaConfig(**decoder(len(llama), layers=4))), tokenizer=llama,
        text_encoder_2=clip(clip_, False), tokenizer_2=clip_,
        vae=d.AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8, 8, 8), layers_per_block=1, norm_num_groups=2, scaling_factor=0.4,
            spatial_compression_ratio=2, temporal_compression_ratio=4, mid_block_add_attention=False,
            down_block_types=("HunyuanVideoDownBlock3D",) * 3, up_block_types=("HunyuanVideoUpBlock3D",) * 3,
        ),
        transformer=d.HunyuanVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1, num_single_layers=1,
            num_refiner_layers=1, text_embed_dim=WIDTH, pooled_projection_dim=WIDTH, rope_axes_dim=(4, 6, 6),
            guidance_embeds=True,
        ),
    )  # fmt: skip


def ltx() -> d.LTXPipeline:
    tokenizer, encoder = t5()
    return d.LTXPipeline(
        scheduler=dynamic(), text_encoder=encoder, tokenizer=tokenizer,
        vae=d.AutoencoderKLLTXVideo(
            latent_channels=4, block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1), spatio_temporal_scaling=(True, False),
            decoder_spatio_temporal_scaling=(True, False), decoder_inject_noise=(False, False, False),
            upsample_residual=(False, False), upsample_factor=(1, 1), patch_size=2, down_block_types=("LTXVideoDownBlock3D",) * 2,
        ),
        transformer=d.LTXVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=WIDTH,
            num_layers=1, caption_channels=WIDTH,
        ),
    )  # fmt: skip


def awake(pipe: d.DiffusionPipeline) -> d.DiffusionPipeline:
    """Layers that start at zero would hide everything before them, and some start as what lay in memory."""
    for part in (getattr(pipe, name, None) for name in ("transformer", "transformer_2", "unconditional_transformer")):
        for parameter in part.parameters() if part is not None else ():
            if not parameter.any() or not parameter.abs().max() < 10:
                torch.nn.init.normal_(parameter, std=0.1)
    return pipe


SHORT = {"max_sequence_length": 64}
TINY = {
    "sd3": Tiny(sd3, {"max_sequence_length": 14}, size=(32, 80), dead=("blocks.5.attn.add_q_proj",)),
    "flux": Tiny(flux, {"max_sequence_length": 16}),
    "flux2": Tiny(flux2, {"max_sequence_length": 128, "text_encoder_out_layers": (0, 1, 2)}),
    "flux2_klein": Tiny(flux2_klein, {**SHORT, "text_encoder_out_layers": (0, 1, 2)}),
    "qwen_image": Tiny(qwen_image, dead=("blocks.1.attn.to_add_out", "blocks.1.attn.add_q_proj")),
    "z_image": Tiny(z_image, {"max_sequence_length": 96}),
    "sana": Tiny(sana, {"max_sequence_length": 64, "complex_human_instruction": None}, size=(32, 64)),
    "lumina2": Tiny(lumina2, {"max_sequence_length": 256}, size=(64, 96)),
    "aura_flow": Tiny(aura_flow, {"max_sequence_length": 16}, size=(32, 32)),
    "chroma": Tiny(chroma, {"max_sequence_length": 16}),
    "cogview4": Tiny(cogview4, SHORT),
    "glm_image": Tiny(glm_image, SHORT, size=(32, 64)),
    "hunyuan_image": Tiny(hunyuan_image),
    "hidream": Tiny(hidream, {"max_sequence_length": 32}, size=(32, 32), attributes={"default_sample_size": 16}),
    "prx": Tiny(prx, guidance=None),
    "ovis": Tiny(ovis, SHORT),
    "omnigen": Tiny(omnigen, size=(64, 96)),
    "bria": Tiny(bria, {"max_sequence_length": 16}),
    "bria_fibo": Tiny(bria_fibo, {**SHORT, "negative_prompt": "ugly"}, size=(64, 96)),
    "longcat": Tiny(longcat),
    "kandinsky5": Tiny(kandinsky5, {"max_sequence_length": 320}, size=(64, 96), attributes={"resolutions": [(96, 64)]}),
    "krea2": Tiny(krea2, {"max_sequence_length": 192}),
    "nucleus": Tiny(nucleus, {"return_index": -2, "max_sequence_length": 256}),
    "ernie": Tiny(ernie),
    "ideogram4": Tiny(ideogram4, {"max_sequence_length": 512}),
    "wan": Tiny(wan, {"max_sequence_length": 16, "num_frames": 5}),
    "wan22": Tiny(wan22, {"max_sequence_length": 16, "num_frames": 5}),
    "hunyuan_video": Tiny(hunyuan_video, {"num_frames": 5, "max_sequence_length": 64}),
    "ltx": Tiny(ltx, {"num_frames": 5, "max_sequence_length": 16}, size=(32, 64)),
}
