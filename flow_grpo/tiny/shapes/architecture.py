"""The parts of the embedded model of shapes, untrained: every component of FLUX.2-klein's pipeline with small numbers in its config.

A word of the grammar is a token. An image of 64 x 64 pixels is 2 x 2 tokens, one for each cell of a scene, and so is a reference image.
"""

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM, T5TokenizerFast

from flow_grpo.rewards.shapes.prompts import words

TEXT_LENGTH = 16  # `add a yellow triangle left of the blue circle` is ten words; a mark begins each prompt
TEXT_WIDTH, TEXT_LAYERS = 64, (1, 2, 3)  # layers whose outputs the transformer reads, as they are trained
PUBLISHED_LAYERS = (9, 18, 27)  # those that the pipeline reads by default, as the model is saved
WIDTH, HEAD = 128, 32
CLIP_LENGTH = 16  # four shapes with their colours, and the end of the text
BEGIN = "<|im_start|>"
FIRST_WORDS = ("a", "two", "three", "four", "make", "remove", "add")
CHAT = f"{{% for m in messages %}}{BEGIN}{{{{ m['content'] }}}}{{% endfor %}}"


def tokenizer() -> Qwen2Tokenizer:
    """Byte-pair encoding whose merges make each word of the grammar one token, with the space before it where it has one."""
    # letter by letter from the space on; words that begin a prompt come last, so that none of their merges cuts another word
    pieces = [[*"Ġ", *word] for word in words()] + [list(word) for word in FIRST_WORDS]
    ends = [(piece, end) for piece in pieces for end in range(2, len(piece) + 1)]
    merges = list(dict.fromkeys(("".join(piece[: end - 1]), piece[end - 1]) for piece, end in ends))
    tokens = ["<|endoftext|>", BEGIN, *sorted(ByteLevel.alphabet()), *map("".join, merges)]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    made = Qwen2Tokenizer(vocab=vocabulary, merges=merges, pad_token="<|endoftext|>", extra_special_tokens=[BEGIN])
    made.chat_template = CHAT
    return made


def text_encoder(vocabulary: int, layers: int) -> Qwen3ForCausalLM:
    """An untrained language model with `layers` layers."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    return Qwen3ForCausalLM(config)


def pipeline() -> Flux2KleinPipeline:
    """An untrained `Flux2KleinPipeline` of 64 x 64 images: four image tokens of 32 numbers, a text encoder of four layers."""
    prompt_tokenizer = tokenizer()
    return Flux2KleinPipeline(
        # FLUX.2 computes a shift of 7 for four tokens, with which a few steps leave the colours undecided
        scheduler=FlowMatchEulerDiscreteScheduler(shift=2.0),
        vae=AutoencoderKLFlux2(
            down_block_types=("DownEncoderBlock2D",) * 5,
            up_block_types=("UpDecoderBlock2D",) * 5,
            block_out_channels=(16, 32, 64, 64, 64),
            layers_per_block=1,
            latent_channels=8,
            norm_num_groups=8,
            sample_size=64,
            mid_block_add_attention=False,
        ),
        text_encoder=text_encoder(len(prompt_tokenizer), TEXT_LAYERS[-1] + 1),
        tokenizer=prompt_tokenizer,
        transformer=Flux2Transformer2DModel(
            patch_size=1,
            in_channels=32,  # far below the width: a velocity carries the noise, which has to pass through every layer
            num_layers=3,
            num_single_layers=6,
            attention_head_dim=HEAD,
            num_attention_heads=WIDTH // HEAD,
            joint_attention_dim=len(TEXT_LAYERS) * TEXT_WIDTH,
            timestep_guidance_channels=64,
            axes_dims_rope=(8, 8, 8, 8),
            guidance_embeds=False,
        ),
    )


@torch.no_grad()
def with_published_layers(encoder: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The same function with 28 layers: those that were trained at the positions that the pipeline reads, between layers that add 0."""
    deep = text_encoder(encoder.config.vocab_size, PUBLISHED_LAYERS[-1] + 1)
    for layer in deep.model.layers:
        for name, parameter in layer.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
    for trained, published in zip(TEXT_LAYERS, PUBLISHED_LAYERS, strict=True):
        deep.model.layers[published - 1].load_state_dict(encoder.model.layers[trained - 1].state_dict())
    deep.model.embed_tokens.load_state_dict(encoder.model.embed_tokens.state_dict())
    deep.model.norm.load_state_dict(encoder.model.norm.state_dict())
    return deep


def clip_tokenizer() -> T5TokenizerFast:
    """The tokenizer of the open_clip model: a word is a token, and the end of a text, which the model reads, has the highest number."""
    pieces = [("<pad>", 0.0), ("<unk>", 0.0), *((f"▁{word}", -1.0) for word in words()), ("</s>", 0.0)]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=CLIP_LENGTH)
