"""Held-out prompts with fixed seeds, scored: what `eval` runs, and training every so often."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from flow_grpo.data.grid import ImageInfo, read_grid, save_grid
from flow_grpo.data.prompts import PromptSet
from flow_grpo.distributed.processes import Processes
from flow_grpo.evaluation.generate import generate_images, image_seed
from flow_grpo.evaluation.image_metrics import high_frequency_power, rms_difference
from flow_grpo.policy.policy import Policy
from flow_grpo.progress import phase
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.samples import best_and_worst
from flow_grpo.training.interrupt import Interrupted, call
from flow_grpo.types import Evaluation
from rewards import WeightedSum


def evaluate(
    policy: Policy,
    prompts: PromptSet,
    rewards: WeightedSum,
    steps: int,
    seed: int,
    microbatch: int = 64,
    processes: Processes | None = None,
    keep: int = 0,
    twice: int = 0,
    stopping: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Draws each prompt from the noise of `image_seed(seed, its place)` and scores it by every reward.

    Several processes take the prompts in turns.

    Args:
        keep: the pictures of so many prompts, from the first on, are in the result, and of the best and worst by `reward`.
        twice: so many prompts, from the first on, are drawn from a second noise too, to see how much their pictures differ.
        stopping: `Interrupted` leaves the evaluation if it says so, as in `Rollouts`.
    """
    processes = processes or Processes()
    alone = processes.world_size == 1
    own = list(range(processes.rank, len(prompts), processes.world_size))
    batch = prompts.take(own, 1)

    def drawn(count: int, number: int) -> Tensor:
        """Our own ones of the first `count` prompts. All processes draw as many, as they must where they share weights."""
        mine, most = [i for i in own if i < count], -(-count // processes.world_size)
        places = mine + own[:1] * (most - len(mine))
        seeds = [image_seed(seed, i, number) for i in places]
        what = "drawing held-out images (sampling steps)"
        texts = prompts.take(places, 1).prompts
        return generate_images(policy, texts, seeds, steps, microbatch, what, lambda: alone and stopping())[: len(mine)]

    images = drawn(len(prompts), 0)
    others = drawn(min(twice, len(prompts)), 1) if twice else images[:0]

    def scored() -> dict[str, Tensor]:
        total, by_name = rewards(images, batch.prompts, **batch.columns())
        return {"reward": total, **by_name}

    def whole(parts: list[Tensor]) -> Tensor:
        """What the processes found of prompts from the first on, in the prompts' order."""
        places = [rank + i * processes.world_size for rank, part in enumerate(parts) for i in range(len(part))]
        return torch.cat(parts)[torch.tensor(places, dtype=torch.long).argsort()]

    with phase(f"scoring {len(images)} held-out images"):
        by_process = processes.gather_or_raise(lambda: call(scored, stopping), (ValueError, Interrupted))
    values = {name: whole([part[name] for part in by_process]) for name in by_process[0]}
    looks = processes.all_gather((high_frequency_power(images), rms_difference(images[: len(others)], others)))
    shown = {*range(keep), *(best_and_worst(values["reward"].tolist()) if keep else ())}
    kept = processes.all_gather({place: images[i].clone() for i, place in enumerate(own) if place in shown})
    pictures = {place: picture for part in kept for place, picture in part.items()}
    return Evaluation(values, whole([s for s, _ in looks]), whole([d for _, d in looks]), pictures)


def save_before_after(
    folder: Path, first: bool, drawn: dict[int, Tensor], prompts: list[str], seed: int, model: str
) -> None:
    """Writes before.png, or after.png and both side by side as before_after.png: the same prompts and seeds.

    Args:
        drawn: an evaluation's pictures, by the prompt's place.
    """
    images = torch.stack([drawn[place] for place in range(len(prompts))])
    when = "before" if first else "after"
    cells = [ImageInfo(prompt, image_seed(seed, i), f"{model}, {when} training") for i, prompt in enumerate(prompts)]
    save_grid(folder / (layout.BEFORE if first else layout.AFTER), images, cells, columns=4)
    if first or not (folder / layout.BEFORE).exists():
        return
    former, former_cells = read_grid(folder / layout.BEFORE)
    if [(cell.prompt, cell.seed) for cell in former_cells] != [(cell.prompt, cell.seed) for cell in cells]:
        return  # an earlier version drew it from other noise
    pairs = [i for pair in zip(range(len(prompts)), range(len(prompts), 2 * len(prompts)), strict=True) for i in pair]
    both, both_cells = torch.cat([former, images]), former_cells + cells
    save_grid(
        folder / layout.BEFORE_AFTER, both[pairs], [both_cells[i] for i in pairs], columns=4, notes=["before", "after"]
    )
