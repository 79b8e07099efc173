"""The parts of a small Sana pipeline for emoji, untrained, and its tokenizer, in which a word is a token."""

import json
from pathlib import Path

from diffusers import AutoencoderDC, SanaTransformer2DModel
from pictures import STYLES
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast

TEXT, WIDTH, LENGTH, CHANNELS = 128, 192, 12, 8
TAGS = 4  # of a name; they are words of captions too


def vae() -> AutoencoderDC:
    """64 x 64 pixels to 8 x 8 x 8 numbers. The first stages have no layers, so nothing but the last convolution runs on 64 x 64."""
    blocks = ("ResBlock",) * 4
    return AutoencoderDC(
        latent_channels=CHANNELS,
        attention_head_dim=16,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=(16, 32, 64, 64),
        decoder_block_out_channels=(16, 48, 96, 96),
        encoder_layers_per_block=(0, 1, 1, 1),
        decoder_layers_per_block=(0, 1, 2, 1),
        encoder_qkv_multiscales=((),) * 4,
        decoder_qkv_multiscales=((),) * 4,
        downsample_block_type="conv",
        upsample_block_type="interpolate",
    )


def transformer() -> SanaTransformer2DModel:
    """Six blocks of linear attention over 4 x 4 tokens of 32 numbers."""
    return SanaTransformer2DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=WIDTH // 32,
        attention_head_dim=32,
        num_layers=6,
        num_cross_attention_heads=WIDTH // 32,
        cross_attention_head_dim=32,
        cross_attention_dim=WIDTH,
        caption_channels=TEXT,
        mlp_ratio=2.5,
        sample_size=8,
        patch_size=2,
        interpolation_scale=1,  # with it, tokens get positions
        qk_norm="rms_norm_across_heads",
    )


def text_encoder(vocabulary: int) -> Gemma2Model:
    """Two layers of Gemma 2, trained with the transformer."""
    return Gemma2Model(
        Gemma2Config(
            vocab_size=vocabulary,
            hidden_size=TEXT,
            intermediate_size=2 * TEXT,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=512,
            initializer_range=0.1,
            query_pre_attn_scalar=64,
            attn_implementation="eager",
        )
    )


def tokenizer(names: Path) -> PreTrainedTokenizerFast:
    """Words of names, of their first tags and of captions, and the hyphen."""
    made = json.loads(names.read_text())
    first = ["<pad>", "<bos>", "<unk>", "a", "an", "in", "style", "emoji", STYLES[1], "-", "and"]
    tags = {tag for _, tags in made for tag in tags[:TAGS]}
    words = tags | set(STYLES) | {word for name, _ in made for word in name.replace("-", " - ").split()}
    table = {word: i for i, word in enumerate([*first, *sorted(words - set(first))])}
    one = Tokenizer(WordLevel(table, unk_token="<unk>"))
    one.pre_tokenizer = Sequence([WhitespaceSplit(), Split("-", "isolated")])
    one.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=one, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>", model_max_length=512
    )
