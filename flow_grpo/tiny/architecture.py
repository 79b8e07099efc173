"""The embedded model's parts, untrained: every component of SD3.5-M's pipeline with small numbers in its config.

Letters are characters to all three tokenizers. T5's also has the dozen lower-case words of the world as whole pieces, so
that a prompt is at most 14 of its tokens, and attention over text costs little on a laptop.
"""

import string

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from flow_grpo.tiny import world

CLIP_LENGTH = 38  # `orange text "ABCDE" on a purple background` is 36 characters, and two ends
T5_LENGTH = 14
WIDTH, LAYERS, HEAD = 128, 6, 64
TEXT_WIDTH = 64


def clip_tokenizer() -> CLIPTokenizer:
    """Byte-pair encoding without a single merge: each character a token, the last of a word marked `</w>`."""
    characters = [c for c in string.printable.strip() if not c.isupper()]
    tokens = [*characters, *(f"{c}</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CLIP_LENGTH)


def t5_tokenizer() -> T5TokenizerFast:
    """A unigram model of single characters and of the world's lower-case words."""
    words = ["text", "on", "a", "background", *world.COLORS]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0), ('▁"', -1.0)]
    pieces += [(f"▁{word}", -1.0) for word in words]
    pieces += [(c, -10.0) for c in string.printable.strip()]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=256)


def clip_text_encoder(tokenizer: CLIPTokenizer, activation: str) -> CLIPTextModelWithProjection:
    """An untrained CLIP text encoder of the embedded model."""
    encoder = CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=CLIP_LENGTH,
            hidden_act=activation,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    # The pipeline takes the last but one hidden state, which no layer norm follows: at CLIP's own 0.02 the transformer
    # would hardly see it.
    for embedding in encoder.text_model.embeddings.children():
        torch.nn.init.normal_(embedding.weight, std=0.5)
    return encoder


def t5_encoder(tokenizer: T5TokenizerFast) -> T5EncoderModel:
    """The untrained T5 encoder of the embedded model."""
    encoder = T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=2 * TEXT_WIDTH,
            d_kv=TEXT_WIDTH // 2,
            d_ff=4 * TEXT_WIDTH,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
        )
    )
    # Heads that look at certain distances from the start: with T5's own small numbers a prompt is a bag of letters, and
    # 1,100 steps were not enough to find their order.
    torch.nn.init.normal_(encoder.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight, std=3.0)
    return encoder


def pipeline() -> StableDiffusion3Pipeline:
    """An untrained `StableDiffusion3Pipeline`: 32 x 80 images, 8 x 8 x 20 latents, 40 image and 52 text tokens."""
    tokenizer, tokenizer_2, tokenizer_3 = clip_tokenizer(), clip_tokenizer(), t5_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=20,
            patch_size=2,
            in_channels=8,
            out_channels=8,
            num_layers=LAYERS,
            attention_head_dim=HEAD,
            num_attention_heads=WIDTH // HEAD,
            joint_attention_dim=2 * TEXT_WIDTH,
            caption_projection_dim=WIDTH,
            pooled_projection_dim=2 * TEXT_WIDTH,
            pos_embed_max_size=20,
            qk_norm="rms_norm",
        ),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(16, 32, 64),
            layers_per_block=1,
            latent_channels=8,
            norm_num_groups=8,
            sample_size=80,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
            scaling_factor=1.0,
            shift_factor=0.0,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=clip_text_encoder(tokenizer, "quick_gelu"),
        tokenizer=tokenizer,
        text_encoder_2=clip_text_encoder(tokenizer_2, "gelu"),
        tokenizer_2=tokenizer_2,
        text_encoder_3=t5_encoder(tokenizer_3),
        tokenizer_3=tokenizer_3,
    )
