"""The evaluations of a run: held-out images, generated, measured, kept, and compared with the evaluations before."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from flow_grpo.config.sections import EvaluationConfig
from flow_grpo.data.grid import ImageInfo, cut_strips, read_grid, save_grid, strip_frames
from flow_grpo.data.prompts import PromptSet, rows_by_set
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError, Interrupted
from flow_grpo.evaluation import hacking
from flow_grpo.evaluation.generate import SEED, evaluate, image_seed
from flow_grpo.evaluation.group_dependence import group_dependence_warnings
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards import WeightedSum
from flow_grpo.rewards.images import to_bytes
from flow_grpo.rewards.scopes import is_video
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.samples import SampleRecorder, group_images, most_spread_groups
from flow_grpo.tracking.tracker import Tracker
from flow_grpo.types import Evaluation, Experience

NUM_PREVIEWS = 16  # held-out prompts in the before and after grids


class Evaluator:
    """Evaluates a run and keeps what it finds in the run folder.

    Args:
        settings: the section `evaluation` of the config.
        prompts: the held-out ones; None means that nothing is evaluated.
        rewards: those that are trained on, and with weight 0 those that are only measured.
        processes: those that share an evaluation; the main one writes. If they are asked to stop, an evaluation raises
            `Interrupted`.
        folder, model: of the run, for what is kept.
        last_step: of the run.

    Attributes:
        samples: writes images and values to the run folder; on the main process of a run that trains.
    """

    def __init__(
        self,
        policy: Policy,
        settings: EvaluationConfig,
        prompts: PromptSet | None,
        rewards: WeightedSum,
        *,
        processes: Processes,
        folder: Path,
        model: str,
        last_step: int,
    ) -> None:
        self.policy, self.settings, self.prompts, self.rewards = policy, settings, prompts, rewards
        self.processes = processes
        self.folder, self.model, self.last_step = folder, model, last_step
        self.samples: SampleRecorder | None = None

    def start_recording(self) -> None:
        """Keep the evaluations of the run from here on. On the main process."""
        self.samples = SampleRecorder(self.folder)

    def evaluate(self, microbatch: int) -> Evaluation:
        """Generate the held-out images with the averaged weights, and measure them. Every process must call it."""
        settings = self.settings
        prompts = self._held_out
        with self.policy.ema.applied(), self.policy.without_zero_lora():
            return evaluate(
                self.policy.with_guidance(settings.guidance),
                prompts,
                self.rewards,
                base=self.policy.base_model,
                steps=settings.steps,
                seed=SEED,
                microbatch=microbatch,
                processes=self.processes,
                images_per_prompt=settings.images_per_prompt,
                num_kept_images=NUM_PREVIEWS,
            )

    def evaluate_and_record(self, step: int, microbatch: int, tracker: Tracker, save_best: Callable[[], object]) -> None:
        """Evaluate, keep the result, log it with warnings, and call `save_best` if it is the best so far."""
        started = time.perf_counter()
        evaluation = self.evaluate(microbatch)
        seconds = time.perf_counter() - started
        history = self._record(step, evaluation, self.samples) if self.samples else []
        if self.processes.all_gather(bool(history) and hacking.best_step(history) == step)[0]:
            save_best()  # before the metrics name it
        warnings = self.processes.gather_or_raise(
            lambda: self._reward_warnings(step, evaluation), (FlowGRPOError, Interrupted)
        )[0]
        if self.samples:
            images = self.samples.preview_images(step, self._held_out.prompts)
            tracker.log_evaluation(
                step, self._means(evaluation), {**hacking.metrics(history), "time/evaluation": seconds}, images
            )
            has_best_weights = (
                self.folder / layout.BEST
            ).is_dir()  # not if it was resumed from before, and is no better since
            best = hacking.best_step(history) if has_best_weights else None
            for name, sentence in hacking.warnings(history, best).items():
                tracker.warn(step, sentence, fallen=name)
            for warning in warnings:
                tracker.warn(step, warning)

    def record_groups(self, step: int, experience: Experience) -> None:
        """Keep some groups of a training step. Every process must call it.

        Each decodes its own images of these groups. There are none of given images, which have no rewards.
        """
        scores, batch = experience.scores, experience.batch
        if scores is None:
            return
        parts = self.processes.all_gather((self.samples is not None, batch.group, batch.image, scores.total))
        is_recorded, *of_rows = zip(*parts, strict=True)
        if not is_recorded[0]:
            return
        group, image, reward = (torch.cat(part) for part in of_rows)
        order = (group * (image.max() + 1) + image).argsort()  # the same for any number of processes
        group, image = group[order], image[order]
        shown = [
            list(zip(group[rows].tolist(), image[rows].tolist(), strict=True))
            for rows in most_spread_groups(reward[order], group)
        ]
        local = zip(batch.group.tolist(), batch.image.tolist(), strict=True)
        mine = {key: row for row, key in enumerate(local) if any(key in keys for keys in shown)}
        images = group_images(experience, mine, lambda latents, count: to_bytes(self.policy.decode(latents, count)))
        pictures = self.processes.gather_on_main(images)
        if self.samples:
            found = {key: picture for part in pictures for key, picture in part.items()}
            size = int((group == group[0]).sum())
            self.samples.save_groups(step, [[found[key] for key in keys] for keys in shown], size)

    @property
    def _held_out(self) -> PromptSet:
        if self.prompts is None:
            raise FlowGRPOError("there are no held-out prompts: set evaluation.prompts.")
        return self.prompts

    def _record(self, step: int, evaluation: Evaluation, samples: SampleRecorder) -> list[hacking.EvaluationRecord]:
        """Keep an evaluation and its images. Returns the run's evaluations so far."""
        prompts = self._held_out.prompts
        trained = {name: weight for name, weight in self.rewards.weights.items() if weight}
        seeds = [image_seed(SEED, i) for i in range(len(prompts))]
        kept = samples.save_evaluation(step, evaluation, prompts, seeds, trained)
        if step in (0, self.last_step):
            save_before_after(self.folder, step == 0, evaluation.images, prompts[:NUM_PREVIEWS], model=self.model)
        return hacking.read_history(kept)

    def _reward_warnings(self, step: int, evaluation: Evaluation) -> list[str]:
        """At the first evaluation, a sentence for each reward whose held-out values mean nothing."""
        if step > 0 or not self.samples:
            return []
        should_stop = self.processes.should_stop
        # others failed on all images, which another sentence says, or belong to no held-out prompt set
        scored = [name for name, values in evaluation.values.items() if values.isfinite().any()]
        rewards = {name: reward for name, reward in self.rewards.rewards.items() if name in scored}
        return group_dependence_warnings(rewards, self._held_out, evaluation.images, should_stop)

    def _means(self, evaluation: Evaluation) -> dict[str, float]:
        """The mean of each measure, and of the reward in each prompt set."""
        by_set = {
            f"reward/{name}": evaluation.values["reward"][rows].nanmean().item()
            for name, rows in rows_by_set(self._held_out.metadata).items()
        }
        return {**evaluation.means(), **by_set}


def save_before_after(folder: Path, is_before: bool, images: dict[int, Tensor], prompts: list[str], model: str) -> None:
    """Write before.png, or after.png and both next to each other as before_after.png: the same prompts and seeds.

    Args:
        is_before: whether the images are from before training.
        images: of an evaluation, by the prompt's index.
    """
    stacked = torch.stack([images[i] for i in range(len(prompts))])
    when = "before" if is_before else "after"
    cells = [ImageInfo(prompt, image_seed(SEED, i), f"{model}, {when} training") for i, prompt in enumerate(prompts)]
    save_grid(folder / (layout.BEFORE if is_before else layout.AFTER), stacked, cells, columns=4)
    if is_before or not (folder / layout.BEFORE).exists():
        return
    try:
        previous, previous_cells = read_grid(folder / layout.BEFORE)
    except FlowGRPOError:
        return  # it is damaged, and no reason to lose a run
    if [(cell.prompt, cell.seed) for cell in previous_cells] != [(str(cell.prompt), cell.seed) for cell in cells]:
        return  # of other prompts, which a run goes on with if its inputs.json is deleted, or of another version's seeds
    pairs = [i for pair in zip(range(len(prompts)), range(len(prompts), 2 * len(prompts)), strict=True) for i in pair]
    if is_video(stacked):
        previous, stacked = cut_strips(previous, stacked.shape[-1]), strip_frames(stacked)
    both, both_cells = torch.cat([previous, stacked]), cells + cells
    save_grid(
        folder / layout.BEFORE_AFTER, both[pairs], [both_cells[i] for i in pairs], columns=4, notes=["before", "after"]
    )
