"""What a run keeps of its evaluations: images and scores in the run folder, and grids of images."""

from pathlib import Path

import torch
from torch import Tensor

from flow_grpo.config.sections import EvaluationConfig
from flow_grpo.data.grid import ImageInfo, read_grid, save_grid
from flow_grpo.data.videos import cut_strips, strip_frames
from flow_grpo.distributed.processes import Processes
from flow_grpo.evaluation import hacking
from flow_grpo.evaluation.generate import generate_images, image_seed
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards.scopes import is_video
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.samples import SampleRecorder
from flow_grpo.types import Evaluation

NUM_SAMPLES = 8  # prompts in a grid of RUN/samples
NUM_PREVIEWS = 16  # held-out prompts in the before and after grids


class EvaluationRecorder:
    """Keeps the evaluations of a run. On the main process.

    Attributes:
        samples: writes the images.
    """

    def __init__(self, folder: Path, settings: EvaluationConfig, model: str, last_step: int) -> None:
        self.folder, self.settings, self.model, self.last_step = folder, settings, model, last_step
        self.samples = SampleRecorder(folder, settings.num_images)

    @property
    def has_best_weights(self) -> bool:
        """Whether the run keeps the weights of its best evaluation. Not if it was resumed from before that one and has no better since."""
        return (self.folder / layout.BEST).is_dir()

    def save(
        self, step: int, evaluation: Evaluation, prompts: list[str], weights: dict[str, float]
    ) -> dict[str, list[hacking.EvaluationRecord]]:
        """Keep an evaluation and its images; returns all evaluations so far, by further size, and those of its own as "".

        Args:
            prompts: the held-out ones.
            weights: of the rewards that the run trains on.
        """
        seed = self.settings.seed
        seeds = [image_seed(seed, i) for i in range(len(prompts))]
        kept = self.samples.save_evaluation(step, evaluation, prompts, seeds, weights)
        if step in (0, self.last_step):
            first = prompts[:NUM_PREVIEWS]
            save_before_after(self.folder, step == 0, evaluation.images, first, seed=seed, model=self.model)
        return {size: hacking.read_history(kept, size) for size in ("",)}


def save_sample_grid(
    policy: Policy,
    step: int,
    prompts: list[str],
    *,
    model: FlowPipeline,
    folder: Path,
    name: str,
    steps: int,
    microbatch: int,
    processes: Processes,
) -> None:
    """Write a grid of the first prompts with fixed seeds. Every process must call it: each may hold a shard of the weights.

    Args:
        model: the policy as it is called in evaluations.
        name: of the model, for the grid's cells.
    """
    prompts = prompts[:NUM_SAMPLES]
    with policy.ema.applied():
        images = generate_images(
            model,
            prompts,
            seeds=list(range(len(prompts))),
            steps=steps,
            microbatch=microbatch,
            should_stop=processes.should_stop_alone,
        )
    if processes.is_main:
        infos = [ImageInfo(prompt, seed, f"{name}, step {step}") for seed, prompt in enumerate(prompts)]
        save_grid(folder / layout.SAMPLES / layout.sample_grid(step), images, infos, columns=4)


def save_before_after(
    folder: Path, is_before: bool, images: dict[int, Tensor], prompts: list[str], seed: int, model: str
) -> None:
    """Write before.png, or after.png and both next to each other as before_after.png: the same prompts and seeds.

    Args:
        is_before: whether the images are from before training.
        images: of an evaluation, by the prompt's index.
    """
    stacked = torch.stack([images[i] for i in range(len(prompts))])
    when = "before" if is_before else "after"
    cells = [ImageInfo(prompt, image_seed(seed, i), f"{model}, {when} training") for i, prompt in enumerate(prompts)]
    save_grid(folder / (layout.BEFORE if is_before else layout.AFTER), stacked, cells, columns=4)
    if is_before or not (folder / layout.BEFORE).exists():
        return
    former, former_cells = read_grid(folder / layout.BEFORE)
    if [(cell.prompt, cell.seed) for cell in former_cells] != [(str(cell.prompt), cell.seed) for cell in cells]:
        return  # written by an earlier version, with other seeds
    pairs = [i for pair in zip(range(len(prompts)), range(len(prompts), 2 * len(prompts)), strict=True) for i in pair]
    if is_video(stacked):
        former, stacked = cut_strips(former, stacked.shape[-1]), strip_frames(stacked)
    both, both_cells = torch.cat([former, stacked]), cells + cells
    save_grid(
        folder / layout.BEFORE_AFTER, both[pairs], [both_cells[i] for i in pairs], columns=4, notes=["before", "after"]
    )
