"""The evaluations of a run: held-out images, generated, measured, kept, and compared with the evaluations before."""

import time
from collections.abc import Callable
from pathlib import Path

from flow_grpo.config.sections import EvaluationConfig
from flow_grpo.data.prompts import PromptSet, rows_by_set
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.evaluation import hacking
from flow_grpo.evaluation.group_dependence import group_dependence_warnings
from flow_grpo.evaluation.held_out import check_evaluation_size, evaluate
from flow_grpo.evaluation.recording import NUM_PREVIEWS, EvaluationRecorder, save_sample_grid
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards import WeightedSum
from flow_grpo.tracking.tracker import Tracker
from flow_grpo.training.interrupt import Interrupted
from flow_grpo.types import Evaluation, Experience


class Evaluator:
    """Evaluates a run and keeps what it finds in the run folder.

    Args:
        settings: the section `evaluation` of the config.
        prompts: the held-out ones; None means that nothing is evaluated.
        rewards: those that are trained on, and with weight 0 those that are only measured.
        processes: those that share an evaluation; the main one writes. `Interrupted` leaves an evaluation if they are asked to stop.
        folder, model: of the run, for what is kept.
        last_step: of the run.

    Attributes:
        recorder: keeps evaluations in the run folder; on the main process of a run that trains.
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
        self.recorder: EvaluationRecorder | None = None
        if prompts is not None:
            check_evaluation_size(policy.with_guidance(settings.guidance), settings)
        elif settings.height or settings.width:
            raise FlowGRPOError(
                "a size of held-out images is set, but there are no held-out prompts: set evaluation.prompts."
            )

    def start_recording(self, info: Callable[[str], None]) -> None:
        """Keep the evaluations of the run from here on; `info` prints a note on earlier ones. On the main process."""
        self.recorder = EvaluationRecorder(self.folder, self.settings, self.model, self.last_step)
        if self.recorder.samples.used_other_noise:
            info("note: flow-grpo 0.3 drew the evaluations so far from other noise than those to come.")

    def is_due(self, step: int) -> bool:
        """Whether this step is evaluated: the first, the last, and every `evaluation.every`."""
        every = self.settings.every
        return step in (0, self.last_step) or bool(every and step % every == 0)

    def evaluate(self, microbatch: int) -> Evaluation:
        """Generate the held-out images with the averaged weights, and measure them. Every process must call it."""
        settings = self.settings
        if self.prompts is None:
            raise FlowGRPOError("there are no held-out prompts: set evaluation.prompts.")
        with self.policy.ema.applied(), self.policy.without_zero_lora():
            return evaluate(
                self.policy.with_guidance(settings.guidance).at_size(settings.height, settings.width),
                self.prompts,
                self.rewards,
                base=self.policy.base_model,
                steps=settings.steps,
                seed=settings.seed,
                microbatch=microbatch,
                processes=self.processes,
                images_per_prompt=settings.images_per_prompt,
                num_kept_images=max(NUM_PREVIEWS, settings.num_images),
            )

    def evaluate_and_record(self, step: int, microbatch: int, tracker: Tracker, save_best: Callable[[], object]) -> None:
        """Evaluate, keep the result, log it with warnings, and call `save_best` if it is the best so far."""
        started = time.perf_counter()
        evaluation = self.evaluate(microbatch)
        seconds = time.perf_counter() - started
        histories = self._record(step, evaluation) if self.recorder else {}
        if self.processes.all_gather(bool(histories) and hacking.best_step(histories[""]) == step)[0]:
            save_best()  # before the metrics name it
        warnings = self.processes.gather_or_raise(
            lambda: self._reward_warnings(step, evaluation), (FlowGRPOError, Interrupted)
        )[0]
        if self.recorder:
            self._log(step, evaluation, histories, seconds, tracker)
            for warning in warnings:
                tracker.warn(step, warning)

    def save_sample_grid(self, step: int, prompts: PromptSet, microbatch: int) -> None:
        """Write a grid of the first prompts with fixed seeds. Every process must call it."""
        save_sample_grid(
            self.policy,
            step,
            prompts.prompts,
            model=self.policy.with_guidance(self.settings.guidance),
            folder=self.folder,
            name=self.model,
            steps=self.settings.steps,
            microbatch=microbatch,
            processes=self.processes,
        )

    def record_groups(self, step: int, experience: Experience) -> None:
        """Keep some groups of the first training step and of those that are evaluated."""
        if self.recorder and (step == 1 or self.is_due(step)):
            self.recorder.samples.save_groups(step, experience, self.policy.decode)

    def _record(self, step: int, evaluation: Evaluation) -> dict[str, list[hacking.EvaluationRecord]]:
        """Keep an evaluation. Returns the run's evaluations by size; the key "" is the evaluation's own size."""
        assert self.recorder
        assert self.prompts
        trained = {name: weight for name, weight in self.rewards.weights.items() if weight}
        return self.recorder.save(step, evaluation, self.prompts.prompts, trained)

    def _reward_warnings(self, step: int, evaluation: Evaluation) -> list[str]:
        """At the first evaluation, a sentence for each reward whose held-out values mean nothing."""
        if step > 0 or not self.recorder:
            return []
        assert self.prompts
        return group_dependence_warnings(self.rewards.rewards, self.prompts, evaluation.images, self.processes.should_stop)

    def _log(
        self,
        step: int,
        evaluation: Evaluation,
        histories: dict[str, list[hacking.EvaluationRecord]],
        seconds: float,
        tracker: Tracker,
    ) -> None:
        assert self.recorder
        assert self.prompts
        by_set = {
            f"reward/{name}": evaluation.values["reward"][rows].nanmean().item()
            for name, rows in rows_by_set(self.prompts.metadata).items()
        }
        more = {name: value for size, history in histories.items() for name, value in hacking.metrics(history, size).items()}
        more["time/evaluation"] = seconds
        tracker.log_evaluation(
            step, {**evaluation.means(), **by_set}, more, self.recorder.samples.preview_images(step, self.prompts.prompts)
        )
        best = hacking.best_step(histories[""]) if self.recorder.has_best_weights else None
        for size, history in histories.items():
            for name, sentence in hacking.warnings(history, best).items():
                where = ("", name) if not size else (f"at {size} pixels, ", f"{name}@{size}")
                tracker.warn(step, where[0] + sentence, fallen=where[1])
