"""Held-out prompts with fixed seeds, scored: what `eval` runs, and training every so often."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.grid import Cell, from_bytes, open_image, read_grid, save_grid
from flow_grpo.policy import Policy
from flow_grpo.prompts import PromptSet, load_prompts
from rewards import WeightedSum


@torch.no_grad()
def draw(policy: Policy, prompts: list[str], seeds: list[int], steps: int, microbatch: int = 64) -> Tensor:
    """Images (B, 3, H, W) in [0, 1] of B prompts by the ODE, each from the noise of its seed alone."""
    schedule, shape = policy.schedule(steps)
    conditioning = policy.encode(prompts)
    start = torch.stack([sampling.noise(shape, seed, "sample") for seed in seeds])

    velocity = policy.along(schedule, conditioning)
    trajectory = sampling.rollout(velocity, schedule, start, [], "ode", 0.0, lambda i: start, microbatch)
    return policy.decode(trajectory.final, microbatch)


def evaluate(
    policy: Policy, prompts: PromptSet, rewards: WeightedSum, steps: int, seed: int, microbatch: int = 64
) -> tuple[Tensor, dict[str, Tensor]]:
    """Images of all prompts, prompt i from the noise of seed + i, and every reward's values (B,), `reward` their sum."""
    images = draw(policy, prompts.prompts, [seed + i for i in range(len(prompts))], steps, microbatch)
    batch = prompts.repeat(1)
    total, by_name = rewards(images, batch.prompts, **batch.columns())
    return images, {"reward": total, **by_name}


def before_after(folder: Path, first: bool, images: Tensor, prompts: list[str], seed: int, model: str) -> None:
    """Writes before.png, or after.png and both side by side as before_after.png: the same prompts and seeds."""
    when = "before" if first else "after"
    cells = [Cell(prompt, seed + i, f"{model}, {when} training") for i, prompt in enumerate(prompts)]
    save_grid(folder / f"{when}.png", images, cells, columns=4)
    if first or not (folder / "before.png").exists():
        return
    former, former_cells = read_grid(folder / "before.png")
    pairs = [i for pair in zip(range(len(prompts)), range(len(prompts), 2 * len(prompts)), strict=True) for i in pair]
    both, both_cells = torch.cat([former, images]), former_cells + cells
    save_grid(folder / "before_after.png", both[pairs], [both_cells[i] for i in pairs], columns=4, notes=["before", "after"])


def read_pictures(source: Path, prompts: Path | None) -> tuple[list[str], Tensor, list[str]]:
    """Names, pictures (B, 3, H, W) in [0, 1] and prompts of a sheet, a picture, or a folder of pictures.

    A folder's pictures carry their prompt inside, as `sample` writes it, or `prompts` is a file with one for each, in the
    order of their names.

    Raises:
        ValueError: what is missing, unreadable, or of another size than the rest.
    """
    if source.is_file():
        images, cells = read_grid(source)
        return [f"{source.name}[{i}]" for i in range(len(cells))], images, [cell.prompt for cell in cells]
    if not source.is_dir():
        raise ValueError(f"there is no picture or folder {source}.")
    files = sorted(f for f in source.iterdir() if f.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp"))
    files = [f for f in files if f.name != "grid.png"]
    if not files:
        raise ValueError(f"the folder {source} holds no pictures.")
    if prompts is not None:
        texts = load_prompts(prompts).prompts
        if len(texts) != len(files):
            raise ValueError(f"{prompts} has {len(texts)} prompts for {len(files)} pictures in {source}.")
        pictures = [from_bytes(np.asarray(open_image(file))[None]) for file in files]
    else:
        read = [read_grid(file) for file in files]
        pictures, texts = [images[:1] for images, _ in read], [cells[0].prompt for _, cells in read]
    odd = next((f for f, p in zip(files, pictures, strict=True) if p.shape != pictures[0].shape), None)
    if odd is not None:
        raise ValueError(f"{odd} is of another size than {files[0]}: score pictures of one size at a time.")
    return [file.name for file in files], torch.cat(pictures), texts
