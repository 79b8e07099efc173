"""The loss of objectives on per-step log-probabilities, and clip ranges calibrated from observed ratios."""

import functools
import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.config.objective import Objective
from flow_grpo.distributed.processes import Processes
from flow_grpo.policy.encoding import Conditioning
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.policy.policy import Policy
from flow_grpo.training.anchors import Anchors, Prediction
from flow_grpo.training.losses import objective_function
from flow_grpo.types import RATIO_DEVIATION, Experience, Loss, ReplayedTransition, TrainedStep, take_rows


class ClipRange:
    """Clip ranges calibrated from observed ratios, one for each step of the schedule.

    A range is the moving average of a quantile of |ratio - 1|. A step without observed ratios is not clipped.
    """

    DECAY = 0.9

    def __init__(self, quantile: float | None) -> None:
        self.quantile = quantile
        self.state: dict[int, float] = {}
        self._seen: dict[int, list[Tensor]] = {}

    def range_at(self, step: int) -> float:
        """The clip range at a step of the schedule; infinite before any ratio was seen."""
        return self.state.get(step, math.inf)

    def observe(self, step: int, deviation: Float[Tensor, " n"]) -> None:
        """Record |ratio - 1| of an update's rows; NaN is left out."""
        self._seen.setdefault(step, []).append(deviation)

    def update(self, processes: Processes) -> None:
        """Update the ranges from what all processes observed. Ratios of exactly 1 (before the first update) are ignored."""
        deviations: dict[int, list[Tensor]] = {}
        seen = {step: [values.cpu() for values in parts] for step, parts in self._seen.items()}
        for observed in processes.all_gather(seen):
            for step, parts in observed.items():
                deviations.setdefault(step, []).extend(parts)
        for step, parts in sorted(deviations.items()):
            deviation = torch.cat(parts)
            deviation = deviation[deviation.isfinite()]  # fp16 may overflow
            if deviation.any():
                assert self.quantile is not None
                deviation_quantile = deviation.quantile(self.quantile).item()
                previous = self.state.get(step, deviation_quantile)
                self.state[step] = self.DECAY * previous + (1 - self.DECAY) * deviation_quantile
        self.reset()

    def reset(self) -> None:
        """Discard what was observed since the last update."""
        self._seen = {}

    def metrics(self) -> dict[str, float]:
        """The clip ranges by step."""
        return {f"clip_range/step_{step}": value for step, value in sorted(self.state.items())}


class StepLoss:
    """The loss of an objective on per-step log-probabilities: one `Loss` per trained step.

    Attributes:
        fixed_positions: as of `BatchLoss`.
    """

    fixed_positions = True  # the update must reproduce the rollout's probabilities exactly

    def __init__(
        self,
        policy: Policy,
        experience: Experience,
        conditioning: Conditioning,
        *,
        objective: Objective,
        clip: ClipRange,
    ) -> None:
        trajectory, advantage = experience.trajectory, experience.advantage
        self.policy, self.objective = policy, objective
        self.loss = objective_function(objective)
        self.conditioning, self.anchors = conditioning, Anchors(policy, experience, conditioning, objective)
        self.trajectory, self.clip = trajectory, clip
        self.count = len(trajectory.steps)
        self.advantage = advantage if advantage.ndim == 2 else advantage[:, None].expand(-1, self.count)

    def before_update(self, chunks: list[tuple[Tensor, Tensor]]) -> None:
        """Do nothing: no objective on steps needs a number of a whole group."""

    def losses(self, rows: Int[Tensor, " n"], is_real: Bool[Tensor, " n"]) -> Iterator[Loss]:
        """One loss per trained step, its values those of `rows`; only the rows marked in `is_real` are calibrated on.

        Where the rollout kept its graphs, `rows` are one of its micro-batches, whose graphs are used up.
        """
        graphs = self.trajectory.graphs.pop(int(rows[0]), None)
        for k, i in enumerate(self.trajectory.steps):
            current = (
                self._computed(k, rows, graphs[k]) if graphs else self._replayed(k, rows, self.policy, self.conditioning)
            )
            step = current.step
            assert step is not None
            known = {"observed_clip": self.clip.range_at(i)} if self.objective.has_auto_clip else {}
            loss = self.loss(step, self._of_step(self.advantage, k, rows), **known)
            if self.objective.has_auto_clip:
                deviation = loss.metrics[RATIO_DEVIATION]
                self.clip.observe(i, deviation.where(is_real.to(deviation.device, non_blocking=True), math.nan))
            if self.objective.weighs_by_std:
                loss = Loss(loss.value * step.std.flatten(1)[:, 0], loss.metrics)
            references = self.anchors.evaluate(functools.partial(self._replayed, k, rows))
            yield self.anchors.with_kl(loss, current, references)

    def _replayed(self, k: int, rows: Int[Tensor, " n"], model: FlowPipeline, conditioning: Conditioning) -> Prediction:
        """Velocity and transition of the k-th trained step by a model."""
        velocity = model.velocity_fn(self.trajectory.schedule, conditioning, rows)
        return self._computed(k, rows, sampling.replay(velocity, self.trajectory, k, rows, self.policy.device))

    def _computed(self, k: int, rows: Int[Tensor, " n"], current: ReplayedTransition) -> Prediction:
        """Velocity and transition of the k-th trained step, beside what the rollout recorded."""
        trajectory, i = self.trajectory, self.trajectory.steps[k]
        delta = trajectory.schedule.sigmas[i + 1] - trajectory.schedule.sigmas[i]
        old_log_prob = self._of_step(trajectory.log_prob, k, rows)
        old_mean = self._of_step(trajectory.mean, k, rows)
        return Prediction(
            current.v, TrainedStep(current.log_prob, old_log_prob, current.mean, old_mean, std=current.std, delta=delta)
        )

    def _of_step(self, values: Float[Tensor, "B K ..."], k: int, rows: Int[Tensor, " n"]) -> Float[Tensor, "n ..."]:
        """The values of the k-th trained step, on the policy's device."""
        return take_rows(values[:, k], rows, self.policy.device)
