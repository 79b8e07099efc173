"""The recipe of the embedded model of shapes: `python -m dev.tiny.pretrain_shapes`, resumable.

Five stages, each from the result of the one before:
  vae        the autoencoder on random shapes, in more cells of an image than a scene has
  clean      transformer and text encoder together by flow matching (arXiv 2210.02747): scenes and edits with true captions
  noisy      the velocities of `clean` with guidance and the true caption, learned by the transformer from captions that are wrong
             with some probability: the model stays crisp but generates only about half of the scenes and edits as asked.
             Reinforcement learning can bring the skill back, since the text encoder, which it does not train, has not changed.
  decoder    the autoencoder's decoder alone, on latents that stay as they are
  clip       the open_clip model that measures it held out

Every batch is drawn from (seed, stage, step), so a recipe that was stopped goes on to the same weights.

Its parts are every component of FLUX.2-klein's pipeline with small numbers in its config. A word of the grammar is a token. An image of
64 x 64 pixels is 2 x 2 tokens, one for each cell of a scene, and so is a reference image.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from PIL import Image
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM, T5TokenizerFast

from dev.prompts import drawing
from dev.tiny.pretraining_stage import PretrainingStage, StagePlan, begin
from flow_grpo.policy.hub import BUNDLED_MODELS
from flow_grpo.rewards import clip
from flow_grpo.rewards.shapes.prompts import CATEGORIES, COLORS, RELATIONS, SHAPES, Edit, Group, Scene, words
from flow_grpo.rewards.shapes.rules import ExactShapes, Shapes

TEXT_LENGTH = 16  # `add a yellow triangle left of the blue circle` is ten words; a mark begins each prompt
TEXT_WIDTH, TEXT_LAYERS = 64, (1, 2, 3)  # layers whose outputs the transformer reads, as they are trained
PUBLISHED_LAYERS = (9, 18, 27)  # those that the pipeline reads by default, as the model is saved
WIDTH, HEAD = 128, 32
CLIP_LENGTH = 16  # four shapes with their colours, and the end of the text
BEGIN = "<|im_start|>"
FIRST_WORDS = ("a", "two", "three", "four", "make", "remove", "add")
CHAT = f"{{% for m in messages %}}{BEGIN}{{{{ m['content'] }}}}{{% endfor %}}"
HARD = ("counting", "position", "attribute binding")
# the categories of the scenes that the model learns from
TAUGHT = (*CATEGORIES, *HARD, *HARD, "position", "attribute binding", "attribute binding")
NO_CAPTION = 0.1  # probability of an empty caption: the unconditional half of guidance
SHIFT = 4.0  # of the noise levels; shapes and colours are decided between 0.7 and 0.95
STAGES = {
    "vae": StagePlan(10, 1200, lr=2e-3),
    "clean": StagePlan(11, 8400, lr=2e-3, muon_lr=7e-3),
    "noisy": StagePlan(12, 400, lr=6e-4, muon_lr=1.5e-3),
    "decoder": StagePlan(14, 400, lr=1e-3),
    "clip": StagePlan(13, 700, lr=1e-3, muon_lr=3e-3),
}
SCENES, EDITS, LONG = 96, 60, 6  # images in a batch of scenes, of edits, and of captions padded to 512 tokens
# number of examples for the transformer's stages, sampled once; each batch samples anew which captions are empty or wrong
NUM_EXAMPLES = {"scenes": 30_000, "edits": 15_000}
ENCODED = 64  # images in one call of the autoencoder's encoder
EDITS_EVERY = 3  # one batch in 3 has edits
LONG_EVERY = 17  # one batch in 17 has captions padded to 512 tokens, the pipeline's default
WRONG = {"scenes": 0.25, "edits": 0.36}  # probability that an attribute of a caption is wrong in the stage `noisy`
# guidance scale of the velocities of `clean` that `noisy` learns (arXiv 2210.03142)
GUIDANCE = {"scenes": 2.0, "edits": 1.0}
VAE_IMAGES = 32  # images in a batch of the stages `vae` and `decoder`
VAE_NOISE = 0.4  # largest noise added to the VAE's latents in training, in standard deviations of the latents
STEPS = 10  # sampling steps in evaluations
CLIP_PAIRS = 48  # scenes in a batch of the stage `clip`, each with one of other attributes


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


def tensor_of(images: list[Image.Image]) -> Tensor:
    """The images, (B, 3, 64, 64) in [-1, 1], the range of diffusers' autoencoders."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2).float() / 127.5 - 1


@dataclass(frozen=True)
class Examples:
    """Scenes or edits with images that show them, (N, C, H, W), and the source of each if they are edits.

    The images are pixels in [-1, 1], or the latents of such.
    """

    described: list[Scene] | list[Edit]
    images: Tensor
    sources: Tensor | None = None

    def batch(self, rng: np.random.Generator, size: int, wrong: float) -> "tuple[list[str], Examples]":
        """Random ones of them with captions, of which each attribute is wrong with that probability."""
        rows = rng.integers(len(self.described), size=size)
        described = [self.described[row] for row in rows]
        captions = [str(_misdescribed(item, rng, wrong)) if rng.random() > NO_CAPTION else "" for item in described]
        sources = None if self.sources is None else self.sources[rows]
        return captions, Examples(described, self.images[rows], sources)


def _misdescribed(item: Scene | Edit, rng: np.random.Generator, wrong: float) -> Scene | Edit:
    return misdescribe(item, rng, wrong) if isinstance(item, Scene) else misdescribe_edit(item, rng, wrong)


def scenes(rng: np.random.Generator, size: int, categories: Sequence[str]) -> Examples:
    """Random scenes of these categories as pixels."""
    made = [drawing.random_example(rng, categories) for _ in range(size)]
    return Examples([scene for scene, _ in made], tensor_of([drawing.draw(shapes) for _, shapes in made]))


def edits(rng: np.random.Generator, size: int) -> Examples:
    """Random edits as pixels."""
    made = [drawing.random_edit(rng) for _ in range(size)]
    sources, results = (
        [drawing.draw(shapes) for shapes in side] for side in zip(*((a, b) for a, _, b in made), strict=True)
    )
    return Examples([edit for _, edit, _ in made], tensor_of(results), tensor_of(sources))


def misdescribe(scene: Scene, rng: np.random.Generator, wrong: float) -> Scene:
    """The scene with each named attribute replaced, with that probability, by another value. At most four shapes stay."""

    def changed(value: str | None, values: tuple[str, ...]) -> str | None:
        return _replaced(value, values, rng, wrong)

    groups = []
    for group in scene.groups:
        count = group.count
        if len(scene.groups) == 1 and count > 1 and rng.random() < wrong:
            count = int(rng.choice([number for number in (2, 3, 4) if number != count]))
        groups.append(Group(changed(group.shape, SHAPES) or "", count, changed(group.color, COLORS), group.size))
    return Scene(tuple(groups), changed(scene.relation, RELATIONS))


def misdescribe_edit(edit: Edit, rng: np.random.Generator, wrong: float) -> Edit:
    """The edit with each attribute of what is new replaced, with that probability, by another value.

    With half of it, the caption of a removal asks for another colour, and that of another colour for a removal.
    """

    def changed(value: str | None, values: tuple[str, ...]) -> str | None:
        return _replaced(value, values, rng, wrong)

    if edit.kind != "add" and rng.random() < wrong / 2:
        kind, color = ("make", str(rng.choice(COLORS))) if edit.kind == "remove" else ("remove", None)
        return replace(edit, kind=kind, new_color=color)
    return replace(
        edit,
        new_color=changed(edit.new_color, COLORS),
        new_shape=changed(edit.new_shape, SHAPES),
        relation=changed(edit.relation, RELATIONS),
    )


def _replaced(value: str | None, values: tuple[str, ...], rng: np.random.Generator, probability: float) -> str | None:
    """With that probability another one of the values; None stays."""
    if value is None or rng.random() >= probability:
        return value
    return str(rng.choice([candidate for candidate in values if candidate != value]))


def other_example(scene: Scene, rng: np.random.Generator) -> tuple[Scene, list[drawing.Shape]]:
    """A scene with some other attributes, and shapes that show it."""
    while True:
        other_scene = misdescribe(scene, rng, 0.4)
        shapes = drawing.place_shapes(other_scene, rng)
        if shapes is not None:
            return other_scene, shapes


def described_example(rng: np.random.Generator) -> tuple[Scene, list[drawing.Shape]]:
    """A random scene and shapes that show it, or, one time in three, an edited image's shapes and their caption."""
    if rng.random() < 2 / 3:
        return drawing.random_example(rng)
    _, _, shapes = drawing.random_edit(rng)
    return drawing.description(shapes), shapes


def held_out_examples(count: int) -> list[tuple[Scene, list[drawing.Shape]]]:
    """Random scenes of a stream of their own, of every category."""
    rng = np.random.default_rng([0, 99])
    return [drawing.random_example(rng) for _ in range(count)]


def held_out_edits(count: int) -> list[tuple[list[drawing.Shape], Edit, list[drawing.Shape]]]:
    """Random edits of a stream of their own."""
    rng = np.random.default_rng([0, 98])
    return [drawing.random_edit(rng) for _ in range(count)]


def transformer_loss(
    pipe: Flux2KleinPipeline,
    captions: list[str],
    examples: Examples,
    text_length: int = TEXT_LENGTH,
    teacher: Flux2KleinPipeline | None = None,
    guidance: float = 1.0,
) -> Tensor:
    """The squared error of the velocity, given the captions, at logit-normal noise levels that are shifted towards noise.

    Its target is noise minus latents (flow matching, arXiv 2210.02747), or the velocity of a teacher with guidance, which knows the
    true captions (arXiv 2210.03142). Without guidance, the model then generates as crisply as the teacher with it.
    """
    x0 = examples.images
    eps = torch.randn_like(x0)
    u = torch.sigmoid(1.2 * torch.randn(len(x0)))
    sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
    states = (1 - sigma.view(-1, 1, 1, 1)) * x0 + sigma.view(-1, 1, 1, 1) * eps
    if teacher is None:
        target = pipe._pack_latents(eps - x0)
    else:
        true = [str(described) for described in examples.described]
        with torch.no_grad():
            target = velocity(teacher, true, states, sigma, examples.sources)
            if guidance != 1.0:
                target = torch.lerp(velocity(teacher, [""] * len(x0), states, sigma, examples.sources), target, guidance)
    predicted = velocity(pipe, captions, states, sigma, examples.sources, text_length=text_length)
    return F.mse_loss(predicted, target)


def velocity(
    pipe: Flux2KleinPipeline,
    captions: list[str],
    states: Tensor,
    sigma: Tensor,
    reference: Tensor | None,
    text_length: int = TEXT_LENGTH,
) -> Tensor:
    """The transformer's velocity (B, tokens, C) of latents (B, C, H, W) at noise levels (B,), with references of the same shape."""
    hidden, ids = pipe._pack_latents(states), pipe._prepare_latent_ids(states)
    if reference is not None:
        hidden = torch.cat([hidden, pipe._pack_latents(reference)], 1)
        ids = torch.cat([ids, pipe._prepare_image_ids([reference[:1]]).expand(len(states), -1, -1)], 1)
    embeds, text_ids = pipe.encode_prompt(
        captions,
        device="cpu",
        max_sequence_length=text_length,
        text_encoder_out_layers=TEXT_LAYERS,
    )
    predicted = pipe.transformer(
        hidden_states=hidden,
        timestep=sigma,
        guidance=None,
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=ids,
        return_dict=False,
    )[0]
    return predicted[:, : states.shape[2] * states.shape[3]]


def train_vae(pipe: Flux2KleinPipeline, folder: Path, seed: int) -> Flux2KleinPipeline:
    """Train the pipeline's VAE on drawn shapes, and measure the mean and variance of its latents of scenes."""
    stage = PretrainingStage("vae", STAGES["vae"], pipe, ["vae"], folder=folder, seed=seed)

    def loss(rng: np.random.Generator, step: int) -> Tensor:
        x = tensor_of([drawing.draw(drawing.crowded(rng)) for _ in range(VAE_IMAGES)])
        posterior = pipe.vae.encode(x).latent_dist
        latents = posterior.sample()
        # Noise in the latents keeps apart what differs: the transformer's errors are then seldom another colour or form.
        scale = latents.std((0, 2, 3), keepdim=True) * VAE_NOISE * torch.rand(len(x), 1, 1, 1)
        error = pipe.vae.decode(latents + scale * torch.randn_like(latents)).sample - x
        return error.abs().mean() + error.square().mean() + 1e-5 * posterior.kl().mean() / x[0].numel()

    stage.run(loss, lambda: fidelity(stage.ema))
    with torch.no_grad():
        x = tensor_of([drawing.draw(shapes) for _, shapes in held_out_examples(512)])
        latents = stage.ema._patchify_latents(stage.ema.vae.encode(x).latent_dist.mean)
    stage.ema.vae.bn.running_mean.copy_(latents.mean((0, 2, 3)))
    stage.ema.vae.bn.running_var.copy_(latents.var((0, 2, 3)))
    return stage.ema


def train_decoder(pipe: Flux2KleinPipeline, folder: Path, seed: int) -> Flux2KleinPipeline:
    """Train the VAE's decoder further. The encoder stays, so the transformer's latents do too."""
    trained = pipe.vae.decoder.requires_grad_(True)
    parts = SimpleNamespace(decoder=trained)
    stage = PretrainingStage("decoder", STAGES["decoder"], parts, ["decoder"], folder=folder, seed=seed)

    def loss(rng: np.random.Generator, step: int) -> Tensor:
        x = tensor_of([drawing.draw(drawing.crowded(rng)) for _ in range(VAE_IMAGES)])
        with torch.no_grad():
            latents = pipe.vae.encode(x).latent_dist.sample()
        error = pipe.vae.decode(latents).sample - x
        return error.abs().mean() + error.square().mean()

    def evaluate() -> dict:
        pipe.vae.decoder = stage.ema.decoder
        measured = fidelity(pipe)
        pipe.vae.decoder = trained
        return measured

    stage.run(loss, evaluate)
    pipe.vae.decoder = stage.ema.decoder
    return pipe


@torch.no_grad()
def fidelity(pipe: Flux2KleinPipeline) -> dict[str, float]:
    """How well the VAE rebuilds scenes: the mean absolute error, and the share that still shows what was drawn."""
    made = held_out_examples(256)
    x = tensor_of([drawing.draw(shapes) for _, shapes in made])
    rebuilt = pipe.vae(x, sample_posterior=False).sample
    exact = ExactShapes()((rebuilt / 2 + 0.5).clamp(0, 1), [str(scene) for scene, _ in made])
    return {"l1": round(float((rebuilt - x).abs().mean()), 5), "exact": round(exact.mean().item(), 4)}


@torch.no_grad()
def encoded(pipe: Flux2KleinPipeline, examples: Examples) -> Examples:
    """The examples as latents, normalised as the pipeline has them."""

    def latents(images: Tensor) -> Tensor:
        return torch.cat([pipe._encode_vae_image(part, None) for part in images.split(ENCODED)])

    sources = None if examples.sources is None else latents(examples.sources)
    return replace(examples, images=latents(examples.images), sources=sources)


def train_transformer(
    name: str, pipe: Flux2KleinPipeline, all_examples: dict[str, Examples], folder: Path, seed: int
) -> Flux2KleinPipeline:
    """The stages `clean`, by flow matching, and `noisy`, towards `clean` with guidance, on scenes and edits given as latents."""
    teacher = copy.deepcopy(pipe) if name == "noisy" else None
    pipe.text_encoder.requires_grad_(teacher is None)
    parts = ["transformer", "text_encoder"] if teacher is None else ["transformer"]
    stage = PretrainingStage(name, STAGES[name], pipe, parts, folder=folder, seed=seed)

    def loss(rng: np.random.Generator, step: int) -> Tensor:
        is_long, is_edit = step % LONG_EVERY == LONG_EVERY - 1, step % EDITS_EVERY == EDITS_EVERY - 1
        size = LONG if is_long else EDITS if is_edit else SCENES
        kind = "edits" if is_edit else "scenes"
        captions, examples = all_examples[kind].batch(rng, size, 0.0 if teacher is None else WRONG[kind])
        text_length = 512 if is_long else TEXT_LENGTH
        return transformer_loss(pipe, captions, examples, text_length=text_length, teacher=teacher, guidance=GUIDANCE[kind])

    def evaluate() -> dict:
        return {f"{kind}_guidance_{g:g}": value for g in (1.0, 4.0) for kind, value in accuracy(stage.ema, 96, g).items()}

    stage.run(loss, evaluate)
    return stage.ema


def train_clip(folder: Path, seed: int) -> torch.nn.Module:
    """The open_clip model of scenes and edited images: half of each batch is the other half with other attributes, so that all count."""
    torch.manual_seed(seed)  # whatever the stages before drew
    untrained = SimpleNamespace(clip=clip.untrained(clip.SHAPES))
    stage = PretrainingStage("clip", STAGES["clip"], untrained, ["clip"], folder=folder, seed=seed)
    tokenizer = clip_tokenizer()

    def tokens(made: list[Scene]) -> Tensor:
        texts = [str(scene) for scene in made]
        return tokenizer(texts, padding="max_length", max_length=CLIP_LENGTH, return_tensors="pt").input_ids

    def pairs(rng: np.random.Generator) -> tuple[list[Scene], Tensor]:
        made = [described_example(rng) for _ in range(CLIP_PAIRS)]
        others = [other_example(scene, rng) for scene, _ in made]
        return [scene for scene, _ in made + others], tensor_of([drawing.draw(shapes) for _, shapes in made + others])

    def loss(rng: np.random.Generator, step: int) -> Tensor:
        described, x = pairs(rng)
        x = x + 0.1 * torch.rand(len(x), 1, 1, 1) * torch.randn_like(x)  # generated images are never clean
        return clip.contrastive_loss(stage.model.clip, x, tokens(described))

    @torch.no_grad()
    def evaluate() -> dict:
        described, x = pairs(np.random.default_rng([0, 97]))
        image = stage.ema.clip.encode_image(x, normalize=True)
        text = stage.ema.clip.encode_text(tokens(described), normalize=True)
        scores = image @ text.T
        matched, mismatched = scores.diag(), scores.diag(CLIP_PAIRS)
        is_named = torch.tensor([str(a) != str(b) for a, b in zip(described, described[CLIP_PAIRS:], strict=False)])
        right = (matched[:CLIP_PAIRS] > mismatched)[is_named]
        return {"prefers_its_own_prompt": round(right.float().mean().item(), 4)}

    stage.run(loss, evaluate)
    # the one in use has the padding of its last call
    clip_tokenizer().save_pretrained(clip.FOLDERS[clip.SHAPES])
    return stage.ema.clip


@torch.no_grad()
def accuracy(pipe: Flux2KleinPipeline, count: int, guidance: float) -> dict[str, float]:
    """The share of scenes and of edits that plain diffusers generates as asked, and of their requirements, with a fixed seed."""
    pipe.set_progress_bar_config(disable=True)
    prompts = [str(scene) for scene, _ in held_out_examples(count)]
    generated = generate_images(pipe, prompts, None, guidance)
    made = held_out_edits(count // 3)
    sources = [drawing.draw(before) for before, _, _ in made]
    changed = torch.cat(
        [generate_images(pipe, [str(edit)], source, guidance) for (_, edit, _), source in zip(made, sources, strict=True)]
    )
    values = {
        "scenes": ExactShapes()(generated, prompts),
        "scenes_share": Shapes()(generated, prompts),
        "edits": ExactShapes()(changed, [str(edit) for _, edit, _ in made], sources=[[source] for source in sources]),
    }
    return {name: round(value.mean().item(), 4) for name, value in values.items()}


def generate_images(pipe: Flux2KleinPipeline, prompts: list[str], source: Image.Image | None, guidance: float) -> Tensor:
    """Images (B, 3, 64, 64) in [0, 1] by plain diffusers."""
    layers = TEXT_LAYERS if pipe.text_encoder.config.num_hidden_layers <= 4 else PUBLISHED_LAYERS
    return pipe(
        prompt=prompts,
        image=source,
        height=drawing.SIDE,
        width=drawing.SIDE,
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        max_sequence_length=TEXT_LENGTH,
        text_encoder_out_layers=layers,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images.float()


def save_pipeline(pipe: Flux2KleinPipeline, out: Path) -> None:
    """The hub's layout: weights in 16 bit, the text encoder with as many layers as the pipeline reads by default."""
    pipe.register_modules(text_encoder=with_published_layers(pipe.text_encoder))
    pipe.to(torch.float16).save_pretrained(out)
    # transformers loads in the dtype of the config, diffusers in float32: a user who asks for none gets one for all
    file = out / "text_encoder" / "config.json"
    file.write_text(file.read_text().replace('"dtype": "float16"', '"dtype": "float32"'))


def main(
    work: Annotated[Path, typer.Option(help="Folder for the stages' checkpoints; a second run continues there.")] = Path(
        "runs/shapes_pretrain"
    ),
    out: Annotated[Path, typer.Option(help="Folder for the finished pipeline.")] = BUNDLED_MODELS["tiny_shapes"],
    seed: Annotated[int, typer.Option(help="Seed of the weights and of every batch.")] = 0,
) -> None:
    """Train the embedded model of shapes from nothing and save it as a diffusers pipeline folder in 16 bit."""
    begin(work, seed)
    pipe = train_vae(pipeline(), work, seed)
    pipe.vae.requires_grad_(False).eval()
    rng = np.random.default_rng([seed, 0])
    all_examples = {
        "scenes": encoded(pipe, scenes(rng, NUM_EXAMPLES["scenes"], TAUGHT)),
        "edits": encoded(pipe, edits(rng, NUM_EXAMPLES["edits"])),
    }
    for name in ("clean", "noisy"):
        pipe = train_transformer(name, pipe, all_examples, work, seed)
    save_pipeline(train_decoder(pipe, work, seed), out)
    weights = {name: value.half().contiguous() for name, value in train_clip(work, seed).state_dict().items()}
    save_file(weights, clip.FOLDERS[clip.SHAPES] / clip.WEIGHTS)


if __name__ == "__main__":
    typer.run(main)
