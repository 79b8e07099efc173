"""The spelling world at 256 px on one NVIDIA GPU: a transformer of 111 million weights is pretrained there, then taught by awm and grpo.

    python benchmarks/learning_256.py pretrain FOLDER --seconds 520     # repeat it until it prints that the pipeline is written
    python benchmarks/learning_256.py teach FOLDER awm --seconds 270
    python benchmarks/learning_256.py teach FOLDER grpo --seconds 270
    python benchmarks/learning_256.py plot FOLDER                       # the runs: FOLDER/learning_256.png

The world is the embedded model's: signs with a word of three to five letters, each in one of eight colours. Here they have 256 x 256
pixels, 32 x 32 latents and 256 image tokens. The recipe is the embedded one, with larger batches: the autoencoder, then transformer and
text encoders on true captions, then on captions with wrong letters, so that the model spells some words and not others. Its stages
share `--total` seconds, 25 minutes if it is not given: each has as many steps as fit. `pretrain` goes on where it stopped, and so does
`teach`. `teach` is `flow-grpo train` with a preset of the embedded model: it writes FOLDER/NAME with its metrics, images and report.
`--small` tries it all out with a small model, on a CPU too.

In addition to the packages of gpu.py, a machine without network needs rapidocr, rapidfuzz, pyclipper, shapely, omegaconf,
antlr4-python3-runtime and colorlog.
"""

import argparse
import functools
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]  # the package need not be installed
from dev.tiny import pretrain, world  # noqa: E402
from dev.tiny.pretraining_stage import PretrainingStage, StagePlan  # noqa: E402
from flow_grpo.figures import new_figure, save_figure  # noqa: E402
from flow_grpo.files import write_atomic  # noqa: E402
from flow_grpo.policy.memory import compile_blocks  # noqa: E402
from flow_grpo.run_folder import layout  # noqa: E402
from flow_grpo.run_folder.reader import RunReader  # noqa: E402

SIZE = 256
LAYERS, HEADS = 12, 8  # of 64 channels each
VAE_CHANNELS = (32, 64, 128, 128)
STAGES = {  # of 0 steps: as many as fit its share of the time
    "vae": StagePlan(0, 0, lr=1e-3),
    "clean": StagePlan(1, 0, lr=6e-4, muon_lr=1.5e-3),
    "noisy": StagePlan(2, 0, lr=3e-4, muon_lr=8e-4),
}
SHARES = {"vae": 0.12, "clean": 0.68, "noisy": 0.2}
# The learning rate falls as in a stage so many times as long, since `noisy` goes on from a warm `clean`.
HORIZON_FACTOR = {"clean": 1.7}
TIMED_STEPS = (50, 90)  # the steps whose time says how many fit: after compiling, before the first checkpoint
BATCH = {"vae": 64, "clean": 256, "noisy": 256}
REWARDS = ROOT / "benchmarks" / "sign_rewards.py"
TAUGHT = [
    "prompts_per_step=16", "images_per_prompt=8", "microbatch=128", f"rewards={{{REWARDS}:spelling: 1, {REWARDS}:colors: 1}}",
    "evaluation.every=2", f"evaluation.rewards=[{REWARDS}:spelling_exact, {REWARDS}:colors]",
]  # fmt: skip
PRESETS = {  # with lower learning rates (half of 0.4's): the transformer has twice the layers and four times the width
    "awm": ["tiny_ocr", "steps=16", "optimizer.lr=6e-4"],
    "grpo": ["tiny_grpo", "steps=16", "optimizer.lr=4e-4", "objective.keep_graphs=false"],
}
SMALL = {"timed": (1, 2), "steps": 5, "batch": 4, "taught": 1}


@functools.cache
def glyphs(device: str) -> torch.Tensor:
    """(27, SIZE, CELL) in [0, 1]: how much of a pixel of a letter's cell is ink; the last is a blank."""
    cell, scale = SIZE // 5, SIZE / world.WIDTH
    font, masks = ImageFont.truetype(str(world.FONT), round(world.FONT_SIZE * scale)), []
    for letter in (*world.LETTERS, " "):
        mask = Image.new("L", (cell, SIZE))
        ImageDraw.Draw(mask).text((cell // 2, round(SIZE / 2 + 9 * scale)), letter, fill=255, font=font, anchor="ms")
        masks.append(np.asarray(mask))
    return torch.from_numpy(np.stack(masks)).float().div(255).to(device)


def images_of(signs: list[world.Sign], device: str) -> torch.Tensor:
    """The signs drawn on the device, (B, 3, SIZE, SIZE) in [-1, 1]."""
    indices = torch.tensor([[world.LETTERS.find(c) if c != " " else 26 for c in sign.word.ljust(5)] for sign in signs])
    ink = glyphs(device)[indices.to(device)].permute(0, 2, 1, 3).flatten(2)  # (B, SIZE, 5 cells)
    ink = F.pad(ink, (0, SIZE - ink.shape[-1]))[:, None]
    color, ground = (
        torch.tensor([world.COLORS[getattr(sign, part)] for sign in signs], device=device)[:, :, None, None] / 127.5 - 1
        for part in ("color", "background")
    )
    return ground + ink * (color - ground)


def untrained(small: bool) -> diffusers.StableDiffusion3Pipeline:
    """The embedded model's pipeline with a larger transformer and a VAE of eight pixels a side of a latent."""
    pipe = pretrain.pipeline()
    layers, heads, channels = (2, 1, (8, 8, 8, 8)) if small else (LAYERS, HEADS, VAE_CHANNELS)
    settings = {"num_layers": layers, "num_attention_heads": heads, "caption_projection_dim": 64 * heads, "in_channels": 16,
                "out_channels": 16, "sample_size": SIZE // 8, "pos_embed_max_size": SIZE // 8}  # fmt: skip
    transformer = diffusers.SD3Transformer2DModel.from_config({**pipe.transformer.config, **settings})
    settings = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
                "block_out_channels": channels, "latent_channels": 16, "sample_size": SIZE}  # fmt: skip
    vae = diffusers.AutoencoderKL.from_config({**pipe.vae.config, **settings})
    return diffusers.StableDiffusion3Pipeline(**{**pipe.components, "transformer": transformer, "vae": vae})


def autocast(device: str) -> torch.autocast:
    """Matrix products in bf16."""
    return torch.autocast(device, torch.bfloat16)


def vae_loss(vae: diffusers.AutoencoderKL, rng: np.random.Generator, batch: int, device: str) -> torch.Tensor:
    """The embedded recipe's: absolute and squared errors of the pixels, and a little KL."""
    x = images_of([world.random_sign(rng) for _ in range(batch)], device)
    with autocast(device):
        posterior = vae.encode(x).latent_dist
        rebuilt = vae.decode(posterior.sample()).sample.float()
    error = rebuilt - x
    return error.abs().mean() + error.square().mean() + 1e-5 * posterior.kl().float().mean() / x[0].numel()


def flow_loss(
    pipe: diffusers.StableDiffusion3Pipeline, rng: np.random.Generator, batch: int, wrong: float, device: str
) -> torch.Tensor:
    """Flow matching (arXiv 2210.02747) on signs, each letter of their captions wrong with probability `wrong`."""
    signs = [world.random_sign(rng) for _ in range(batch)]
    captions = [world.misspell(sign, rng, wrong).prompt if rng.random() > pretrain.NO_CAPTION else "" for sign in signs]
    with torch.no_grad(), autocast(device):
        latents = pipe.vae.encode(images_of(signs, device)).latent_dist.mean
    x0 = ((latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor).float()
    # noise levels as in the embedded recipe, shifted by 3 since an image has six times as many tokens
    u = torch.sigmoid(1.2 * torch.randn(batch, device=device))
    sigma, eps = (3 * u / (1 + 2 * u)).view(-1, 1, 1, 1), torch.randn_like(x0)
    with autocast(device):
        embeds, _, pooled, _ = pipe.encode_prompt(
            captions, None, None, do_classifier_free_guidance=False, max_sequence_length=pretrain.T5_LENGTH
        )
        v = pipe.transformer((1 - sigma) * x0 + sigma * eps, embeds, pooled, 1000 * sigma.flatten(), return_dict=False)[0]
    return F.mse_loss(v.float(), eps - x0)


class OutOfTime(Exception):
    """End of the command's time; the finished steps are saved."""


def train(
    name: str,
    pipe: diffusers.StableDiffusion3Pipeline,
    parts: list[str],
    loss: Callable[..., torch.Tensor],
    args: argparse.Namespace,
) -> diffusers.StableDiffusion3Pipeline:
    """Run a stage, or the rest of it. Returns the pipeline of its moving average."""
    stage = PretrainingStage(name, STAGES[name], pipe, parts, folder=args.folder, seed=0)
    if "transformer" in parts and not args.small:
        compile_blocks(pipe.transformer, for_each_size=True)
    batch, steps_file, times = SMALL["batch"] if args.small else BATCH[name], args.folder / f"{name}_steps.json", {}
    print(
        f"{name}: {sum(p.numel() for p in stage.parameters) / 1e6:.0f} million weights, from step {stage.step}", flush=True
    )

    def timed(rng: np.random.Generator, step: int) -> torch.Tensor:
        if args.is_over():
            stage._save()
            raise OutOfTime
        if step in (first, last) and args.device == "cuda":
            torch.cuda.synchronize()
        times[step] = time.monotonic()
        return loss(rng, batch)

    first, last = (stage.step + count for count in (SMALL["timed"] if args.small else TIMED_STEPS))
    if not steps_file.exists():
        stage.plan = replace(stage.plan, steps=last + 1, horizon=10 * last)
        stage.run(timed, dict)
        fitting = last + round((SHARES[name] * args.total - stage.seconds) * (last - first) / (times[last] - times[first]))
        write_atomic(steps_file, json.dumps(SMALL["steps"] if args.small else max(fitting, last + 1)))
    steps = json.loads(steps_file.read_text())
    stage.plan = replace(stage.plan, steps=steps, horizon=round(steps * HORIZON_FACTOR.get(name, 1)))
    stage.run(timed, dict)
    return stage.ema


def sample_sheet(pipe: diffusers.StableDiffusion3Pipeline, count: int = 8) -> Image.Image:
    """Held-out signs as the pipeline draws them, side by side."""
    signs = pretrain.held_out_signs(count)
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad(), autocast(pipe.device.type):
        images = pipe(
            [sign.prompt for sign in signs], height=SIZE, width=SIZE, num_inference_steps=10, guidance_scale=1,
            max_sequence_length=pretrain.T5_LENGTH, generator=torch.Generator("cpu").manual_seed(0),
        ).images  # fmt: skip
    return side_by_side(images)


def side_by_side(images: list[Image.Image], gap: int = 8) -> Image.Image:
    """One image of several of SIZE pixels, on white."""
    sheet = Image.new("RGB", ((SIZE + gap) * len(images), SIZE), "white")
    for index, image in enumerate(images):
        sheet.paste(image, ((SIZE + gap) * index, 0))
    return sheet


def pretrain_pipeline(args: argparse.Namespace) -> None:
    """All stages, each from the result of the one before, and the finished pipeline in 16 bit."""
    torch.manual_seed(0)
    device = args.device
    pipe = untrained(args.small).to(device)
    pipe = train("vae", pipe, ["vae"], lambda rng, batch: vae_loss(pipe.vae, rng, batch, device), args)
    pipe.vae.requires_grad_(False)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        x = images_of([world.random_sign(rng) for _ in range(SMALL["batch"] if args.small else 128)], device)
        latents = pipe.vae.encode(x).latent_dist.mean
        print(f"VAE: mean error {float((pipe.vae.decode(latents).sample - x).abs().mean()):.4f} of 2")
    pipe.vae.register_to_config(shift_factor=float(latents.mean()), scaling_factor=1 / float(latents.std()))
    for name in ("clean", "noisy"):
        wrong, model = pretrain.WRONG_LETTER * (name == "noisy"), pipe
        parts = ["transformer", "text_encoder", "text_encoder_2", "text_encoder_3"]
        pipe = train(name, pipe, parts, lambda rng, batch: flow_loss(model, rng, batch, wrong, device), args)  # noqa: B023
        sample_sheet(pipe).save(args.folder / f"{name}.png")
    pipe.register_to_config(_name_or_path="")
    pretrain.save_pipeline(pipe.to("cpu"), args.folder / "pipeline")
    print(f"The pipeline is written to {args.folder / 'pipeline'}.")


def teach(args: argparse.Namespace) -> int:
    """Run `flow-grpo train` on the pretrained pipeline, or its rest, and stop it after the seconds. Returns its exit status."""
    run = args.folder / args.method
    command = [sys.executable, "-m", "flow_grpo", "train", *PRESETS[args.method], f"model={args.folder / 'pipeline'}"]
    command += [f"height={SIZE}", f"width={SIZE}", f"output_dir={run}", *TAUGHT]
    command += [
        f"steps={SMALL['taught']}",
        "prompts_per_step=1",
        "images_per_prompt=2",
        "microbatch=2",
        "evaluation.max_prompts=2",
    ] * args.small
    command += ["--resume"] * (run / "checkpoints").is_dir()
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(args.seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()
        print("The seconds are over: run the command again, it goes on from here.")
        return 0


def plot(folder: Path, count: int = 8) -> None:
    """Write FOLDER/learning_256.png: the held-out exact words over seconds of training, and signs before and after it."""
    runs = [RunReader(folder / name) for name in PRESETS if layout.is_run(folder / name)]
    runs = [run for run in runs if run.evaluations]
    if not runs:
        sys.exit(f"{folder} has no run with an evaluation: run teach first.")
    figure, (curves, *strips) = new_figure(
        10, 3.2 + 1.3 * (len(runs) + 1), rows=len(runs) + 2, gridspec_kw={"height_ratios": [2.4, *[1] * (len(runs) + 1)]}
    )
    for run in runs:
        points = [(seconds_until(run, row["step"]), row["eval/spelling_exact"]) for row in run.evaluation_rows]
        curves.plot(*zip(*points, strict=True), marker="o", markersize=3, label=run.name)
    curves.set_xlabel("seconds of sampling, rewards and updates")
    curves.set_ylabel("held-out words spelled exactly")
    curves.legend(frameon=False)
    first = min(evaluation["step"] for evaluation in runs[0].evaluations)
    last = {run.name: max(evaluation["step"] for evaluation in run.evaluations) for run in runs}
    shown = [
        ("before", runs[0], first),
        *((f"{run.name}, after {last[run.name]} steps", run, last[run.name]) for run in runs),
    ]
    for axes, (title, run, step) in zip(strips, shown, strict=True):
        pictures = layout.step_folder(run.folder / layout.PICTURES, step)
        axes.imshow(np.asarray(side_by_side([Image.open(pictures / layout.prompt_image(i)) for i in range(count)])))
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_axis_off()
    save_figure(figure, folder / "learning_256.png")
    print(f"The figure is {folder / 'learning_256.png'}.")


def seconds_until(run: RunReader, step: int) -> float:
    """Seconds of the training steps up to a step, without evaluations."""
    return sum(row["time/step"] for row in run.step_rows if row["step"] <= step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pretrain", "teach", "plot"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("method", nargs="?", choices=list(PRESETS))
    parser.add_argument("--seconds", type=float, default=520.0)
    parser.add_argument(
        "--total", type=float, default=1500.0, help="seconds of the whole pretraining, read when a stage begins"
    )
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    ends = time.monotonic() + args.seconds
    args.device, args.is_over = "cuda" if torch.cuda.is_available() else "cpu", lambda: time.monotonic() > ends
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.what == "plot":
        plot(args.folder)
        return
    if args.what == "teach":
        if args.method is None:
            sys.exit(f"name a method: {' or '.join(PRESETS)}.")
        sys.exit(teach(args))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        pretrain_pipeline(args)
    except OutOfTime:
        print("The seconds are over: run the command again, it goes on from here.")


if __name__ == "__main__":
    main()
