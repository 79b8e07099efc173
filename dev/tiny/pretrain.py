"""The embedded model's recipe: `python -m dev.tiny.pretrain`, about an hour on two CPU cores, resumable.

Five stages, each from the result of the one before:
  vae    the autoencoder on random signs
  clean  transformer and text encoders together by flow matching (arXiv 2210.02747), random words, true captions
  noisy  the same with each letter of the caption wrong with some probability: the model keeps its crisp letters but spells
         about 0.6 of the words, as one of its modes. This is the skill that reinforcement learning can bring back.
  shapes the same skill in the shapes that plain diffusers generates by default: squares of 80 x 80 pixels, and captions padded to 256
         T5 tokens. The velocity of `noisy` at the run configs' 32 x 80 pixels and 14 tokens is the target for every other length.
  clip   the open_clip model of the `clip` reward, on the same world

Every batch is drawn from (seed, stage, step), so a recipe that was stopped goes on to the same weights.

Its parts are every component of SD3.5-M's pipeline with small numbers in its config. Letters are characters to all three tokenizers.
T5's also has the dozen lower-case words of the world as whole pieces, so that a prompt is at most 14 of its tokens, and attention over
text costs little on a laptop.
"""

import copy
import json
import string
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors.torch import save_file
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from dev.tiny import world
from dev.tiny.pretraining_stage import PretrainingStage, StagePlan, begin
from flow_grpo.config.loading import bundled_file
from flow_grpo.policy.devices import default_dtype
from flow_grpo.policy.hub import BUNDLED_MODELS
from flow_grpo.rewards import clip
from flow_grpo.rewards.ocr import OCR, ExactOCR

CLIP_LENGTH = 38  # `orange text "ABCDE" on a purple background` is 36 characters, and two ends
T5_LENGTH = 14
WIDTH, LAYERS, HEAD = 128, 6, 64
TEXT_WIDTH = 64
STAGES = {
    "vae": StagePlan(0, 1000, lr=2e-3),
    "clean": StagePlan(1, 1100, lr=1.5e-3, muon_lr=4e-3, horizon=2000),  # `noisy` goes on from a warm `clean`
    "noisy": StagePlan(2, 400, lr=6e-4, muon_lr=1.5e-3),
    "clip": StagePlan(3, 800, lr=1e-3, muon_lr=3e-3),
    "shapes": StagePlan(4, 300, lr=6e-4, muon_lr=1.5e-3),
}
BATCH = 64
VAE_BATCH = 32
WRONG_LETTER = 0.2  # probability that a letter of a caption is wrong in the noisy stage
# the same for squares in `shapes`: they are to be spelled as well as the others, about 0.6 of them
WRONG_LETTER_SQUARE = 0.135
NO_CAPTION = 0.1  # probability of an empty caption: the unconditional half of guidance
SQUARE_EVERY = 16  # one batch in 16 is a small one in the shapes of diffusers' defaults: 80 x 80 pixels, 256 T5 tokens


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


def images_of(signs: list[world.Sign], height: int = world.HEIGHT) -> torch.Tensor:
    """The signs drawn, (B, 3, height, 80) in [-1, 1], the range of diffusers' autoencoders."""
    arrays = np.stack([np.asarray(sign.draw(height)) for sign in signs])
    return torch.from_numpy(arrays).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_vae(pipe: StableDiffusion3Pipeline, folder: Path, seed: int) -> StableDiffusion3Pipeline:
    """Train the pipeline's VAE on drawn signs."""
    stage = PretrainingStage("vae", STAGES["vae"], pipe, ["vae"], folder=folder, seed=seed)

    def loss(rng: np.random.Generator, step: int) -> torch.Tensor:
        x = images_of([world.random_sign(rng) for _ in range(VAE_BATCH)])
        with _autocast():
            posterior = pipe.vae.encode(x).latent_dist
            rebuilt = pipe.vae.decode(posterior.sample()).sample.float()
        error = rebuilt - x
        return error.abs().mean() + error.square().mean() + 1e-5 * posterior.kl().float().mean() / x[0].numel()

    @torch.no_grad()
    def evaluate() -> dict:
        x = images_of(held_out_signs(128))
        rebuilt = stage.ema.vae(x, sample_posterior=False).sample
        return {"l1": round(float((rebuilt - x).abs().mean()), 5)}

    stage.run(loss, evaluate)
    with torch.no_grad():
        latents = stage.ema.vae.encode(images_of(held_out_signs(256))).latent_dist.mean
    stage.ema.vae.register_to_config(
        shift_factor=round(float(latents.mean()), 4), scaling_factor=round(1 / float(latents.std()), 4)
    )
    return stage.ema


def train_transformer(name: str, pipe: StableDiffusion3Pipeline, folder: Path, seed: int) -> StableDiffusion3Pipeline:
    """The stages `clean` and `noisy`: flow matching on captioned signs."""
    parts = ["transformer", "text_encoder", "text_encoder_2", "text_encoder_3"]
    stage = PretrainingStage(name, STAGES[name], pipe, parts, folder=folder, seed=seed)
    wrong = WRONG_LETTER if name == "noisy" else 0.0

    def loss(rng: np.random.Generator, step: int) -> torch.Tensor:
        square = step % SQUARE_EVERY == SQUARE_EVERY - 1
        if square:
            return flow_matching(pipe, noised(pipe, rng, BATCH // 8, world.WIDTH, wrong), 256)
        return flow_matching(pipe, noised(pipe, rng, BATCH, world.HEIGHT, wrong), T5_LENGTH)

    ocr, exact = OCR(), ExactOCR()

    def evaluate() -> dict:
        prompts = [sign.prompt for sign in held_out_signs(128)]
        scores = {}
        for guidance in (1, 3):
            images = generate_images(stage.ema, prompts, guidance)
            scores[f"ocr_guidance_{guidance}"] = round(ocr(images, prompts).mean().item(), 4)
            scores[f"exact_guidance_{guidance}"] = round(exact(images, prompts).mean().item(), 4)
        return scores

    stage.run(loss, evaluate)
    return stage.ema


def train_shapes(pipe: StableDiffusion3Pipeline, folder: Path, seed: int) -> StableDiffusion3Pipeline:
    """The stage `shapes`: what the model generates at 32 x 80 pixels with 14 tokens, with any number of tokens and for squares."""
    teacher = copy.deepcopy(pipe)
    parts = ["transformer", "text_encoder", "text_encoder_2", "text_encoder_3"]
    stage = PretrainingStage("shapes", STAGES["shapes"], pipe, parts, folder=folder, seed=seed)

    def loss(rng: np.random.Generator, step: int) -> torch.Tensor:
        # every length but the longest is cheap: a quarter of the signs pays for the 256 tokens, and squares are what is new
        noisy = noised(pipe, rng, BATCH // 8, world.HEIGHT, 0.0)
        with torch.no_grad():
            target = velocity(teacher, noisy, T5_LENGTH)
        distance = sum(F.mse_loss(velocity(pipe, noisy, length), target) for length in (T5_LENGTH, 256))
        square = noised(pipe, rng, BATCH // 4, world.WIDTH, WRONG_LETTER_SQUARE)
        return 2 * distance + flow_matching(pipe, square, int(rng.choice([T5_LENGTH, 256])))

    def evaluate() -> dict:
        prompts, exact = [sign.prompt for sign in held_out_signs(64)], ExactOCR()
        shapes = {f"{height} x 80, {length} tokens": (height, length) for height in (32, 80) for length in (14, 256)}
        scores = {
            name: exact(generate_images(stage.ema, prompts, 1, height, text_length), prompts)
            for name, (height, text_length) in shapes.items()
        }
        return {name: round(values.mean().item(), 4) for name, values in scores.items()}

    stage.run(loss, evaluate)
    return stage.ema


@dataclass(frozen=True)
class Noised:
    """Captions, and the latents x0 (B, ...) of their signs with noise eps at noise level sigma (B, 1, 1, 1)."""

    captions: list[str]
    x0: torch.Tensor
    eps: torch.Tensor
    sigma: torch.Tensor


@torch.no_grad()
def noised(pipe: StableDiffusion3Pipeline, rng: np.random.Generator, size: int, height: int, wrong: float) -> Noised:
    """Sample `size` random signs, each letter of their captions wrong with probability `wrong`."""
    signs = [world.random_sign(rng) for _ in range(size)]
    captions = [world.misspell(sign, rng, wrong).prompt if rng.random() > NO_CAPTION else "" for sign in signs]
    with _autocast():
        latents = pipe.vae.encode(images_of(signs, height)).latent_dist.mean
    x0 = ((latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor).float()
    # logit-normal noise levels, shifted by 2 towards noise, where the letters are decided (arXiv 2403.03206)
    u = torch.sigmoid(1.2 * torch.randn(size))
    return Noised(captions, x0, torch.randn_like(x0), (2 * u / (1 + u)).view(-1, 1, 1, 1))


def velocity(pipe: StableDiffusion3Pipeline, noisy: Noised, text_length: int) -> torch.Tensor:
    """The pipeline's velocity, its captions padded to `text_length` T5 tokens."""
    with _autocast():
        embeds, _, pooled, _ = pipe.encode_prompt(
            noisy.captions, None, None, do_classifier_free_guidance=False, max_sequence_length=text_length
        )
        v = pipe.transformer(
            hidden_states=(1 - noisy.sigma) * noisy.x0 + noisy.sigma * noisy.eps,
            timestep=1000 * noisy.sigma.flatten(),
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
    return v.float()


def flow_matching(pipe: StableDiffusion3Pipeline, noisy: Noised, text_length: int) -> torch.Tensor:
    """The flow-matching loss (arXiv 2210.02747)."""
    return F.mse_loss(velocity(pipe, noisy, text_length), noisy.eps - noisy.x0)


def train_clip(folder: Path, seed: int) -> torch.nn.Module:
    """The open_clip model of the `clip` reward: half of each batch is the other half with other letters."""
    torch.manual_seed(seed)  # whatever the stages before drew
    untrained = SimpleNamespace(clip=clip.untrained())
    stage = PretrainingStage("clip", STAGES["clip"], untrained, ["clip"], folder=folder, seed=seed)
    tokenizer = clip_tokenizer()

    def tokens(signs: list[world.Sign]) -> torch.Tensor:
        prompts = [sign.prompt for sign in signs]
        return tokenizer(prompts, padding="max_length", max_length=CLIP_LENGTH, return_tensors="pt").input_ids

    def loss(rng: np.random.Generator, step: int) -> torch.Tensor:
        signs = [world.random_sign(rng) for _ in range(BATCH // 2)]
        signs += [world.misspell(sign, rng, 0.4) for sign in signs]
        x = images_of(signs)
        x = x + 0.1 * torch.rand(len(x), 1, 1, 1) * torch.randn_like(x)  # generated images are never clean
        with _autocast():
            return clip.contrastive_loss(stage.model.clip, x, tokens(signs))

    @torch.no_grad()
    def evaluate() -> dict:
        signs = held_out_signs(256)
        image = stage.ema.clip.encode_image(images_of(signs), normalize=True).view(4, 64, -1)
        text = stage.ema.clip.encode_text(tokens(signs), normalize=True).view(4, 64, -1)
        correct = (image @ text.transpose(1, 2)).argmax(-1) == torch.arange(64)
        return {"top1_of_64": round(correct.float().mean().item(), 4)}

    stage.run(loss, evaluate)
    tokenizer.save_pretrained(clip.FOLDER)
    return stage.ema.clip


@torch.no_grad()
def generate_images(
    pipe: StableDiffusion3Pipeline,
    prompts: list[str],
    guidance: float,
    height: int = world.HEIGHT,
    text_length: int = T5_LENGTH,
) -> torch.Tensor:
    """Images (B, 3, height, 80) in [0, 1] by plain diffusers, 10 steps, fixed seed."""
    pipe.set_progress_bar_config(disable=True)
    with _autocast():
        return pipe(
            prompts,
            height=height,
            width=world.WIDTH,
            num_inference_steps=10,
            guidance_scale=guidance,
            max_sequence_length=text_length,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
        ).images.float()


def save_pipeline(pipe: StableDiffusion3Pipeline, out: Path) -> None:
    """The hub's layout: weights in 16 bit, the CLIP tokenizers also as vocab.json and merges.txt."""
    clip_tokens = clip_tokenizer()
    pipe.register_modules(tokenizer=clip_tokens, tokenizer_2=clip_tokens, tokenizer_3=t5_tokenizer())
    pipe.to(torch.float16).save_pretrained(out)
    for name in ("tokenizer", "tokenizer_2"):
        (out / name / "vocab.json").write_text(json.dumps(clip_tokens.get_vocab()))
        (out / name / "merges.txt").write_text("#version: 0.2\n")
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        # transformers loads in the dtype of the config, diffusers in float32: a user who asks for none gets one for all
        file = out / name / "config.json"
        file.write_text(file.read_text().replace('"dtype": "float16"', '"dtype": "float32"'))


def _autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=default_dtype("cpu") == torch.bfloat16)


def held_out_signs(count: int) -> list[world.Sign]:
    """The first prompts of the shipped evaluation set."""
    return [world.parse(prompt) for prompt in bundled_file("prompts/signs_eval.txt").read_text().splitlines()[:count]]


def main(
    work: Annotated[Path, typer.Option(help="Folder for the stages' checkpoints; a second run continues there.")] = Path(
        "runs/tiny_pretrain"
    ),
    out: Annotated[Path, typer.Option(help="Folder for the finished pipeline.")] = BUNDLED_MODELS["tiny"],
    seed: Annotated[int, typer.Option(help="Seed of the weights and of every batch.")] = 0,
) -> None:
    """Train the embedded model from nothing and save it as a diffusers pipeline folder in 16 bit."""
    begin(work, seed)
    pipe = train_vae(pipeline(), work, seed)
    pipe.vae.requires_grad_(False)
    pipe = train_transformer("clean", pipe, work, seed)
    pipe = train_transformer("noisy", pipe, work, seed)
    pipe = train_shapes(pipe, work, seed)
    save_pipeline(pipe, out)
    weights = {name: value.half().contiguous() for name, value in train_clip(work, seed).state_dict().items()}
    save_file(weights, clip.FOLDER / "open_clip_model.safetensors")


if __name__ == "__main__":
    typer.run(main)
