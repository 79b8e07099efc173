"""The losses of a training step: what all families share, and the losses on sampling steps."""

import functools
import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.config.forward_process_objectives import ForwardProcess
from flow_grpo.config.objective import CustomFunction
from flow_grpo.config.stepwise_objectives import Stepwise
from flow_grpo.distributed.processes import Processes
from flow_grpo.policy.encoding import Conditioning
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.training.anchors import Anchors, Prediction, References
from flow_grpo.training.custom_functions import custom_loss
from flow_grpo.types import (
    RATIO_DEVIATION,
    Experience,
    Loss,
    ReplayedTransition,
    TrainedStep,
    take_rows,
)


class BatchLoss:
    """The loss of an objective on the images of a training step: what `PolicyUpdate` calls for each chunk of rows.

    Attributes:
        count: the losses of a row, of which the update takes the mean: one for each trained step, noise level or state.
        fixed_positions: whether rows must keep the chunk and position that they had in the rollout, since the loss compares with numbers
            that were computed there, and a kernel's last bits may depend on the position.
    """

    count: int
    fixed_positions = False

    def __init__(self, experience: Experience, conditioning: Conditioning, references: References) -> None:
        self.policy, self.conditioning = references.policy, conditioning
        self.trajectory, self.advantage = experience.trajectory, experience.advantage
        self.anchors = Anchors(references, experience, conditioning)

    def before_update(self, chunks: list[tuple[Tensor, Tensor]]) -> None:
        """Compute what the losses need of all rows of an optimizer step; most need nothing. Called before their losses are asked for.

        Args:
            chunks: the rows (n,) and weights (n,) of each chunk; rows that only fill it up weigh 0. Each group lies within them.
        """

    def losses(self, rows: Int[Tensor, " n"], is_real: Bool[Tensor, " n"]) -> Iterator[Loss]:
        """Yield the `count` losses of `rows`.

        The update weighs the rows and runs backward on each loss before it takes the next one, so only one graph is in memory.

        Args:
            is_real: false for rows that only fill up the chunk.
        """
        raise NotImplementedError

    def _on_device(self, values: Float[Tensor, "B ..."], rows: Int[Tensor, " n"]) -> Float[Tensor, "n ..."]:
        return take_rows(values, rows, self.policy.device)


class ClipRange:
    """Clip ranges calibrated from observed ratios, one for each step of the schedule.

    A range is the moving average of a quantile of |ratio - 1|. A step without observed ratios is not clipped.
    """

    DECAY = 0.9
    QUANTILE = 0.9

    def __init__(self) -> None:
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
                quantile = deviation.quantile(self.QUANTILE).item()
                previous = self.state.get(step, quantile)
                self.state[step] = self.DECAY * previous + (1 - self.DECAY) * quantile
        self.reset()

    def reset(self) -> None:
        """Discard what was observed since the last update."""
        self._seen = {}

    def state_dict(self) -> dict[int, float]:
        """The clip ranges by step, for a checkpoint."""
        return dict(self.state)

    def load_state_dict(self, state: dict[int, float]) -> None:
        """Restore what `state_dict` returned."""
        self.state = dict(state)

    def metrics(self) -> dict[str, float]:
        """The clip ranges by step."""
        return {f"clip_range/step_{step}": value for step, value in sorted(self.state.items())}


class StepLoss(BatchLoss):
    """The loss of an objective on per-step log-probabilities, which replays the trained transitions: one `Loss` per trained step."""

    fixed_positions = True  # the update must reproduce the rollout's probabilities exactly

    def __init__(
        self,
        experience: Experience,
        conditioning: Conditioning,
        references: References,
        *,
        objective: Stepwise,
        clip: ClipRange,
    ) -> None:
        super().__init__(experience, conditioning, references)
        self.objective, self.loss, self.clip = objective, objective_function(objective), clip
        self.count = len(self.trajectory.steps)
        if self.advantage.ndim == 1:
            self.advantage = self.advantage[:, None].expand(-1, self.count)

    def losses(self, rows: Int[Tensor, " n"], is_real: Bool[Tensor, " n"]) -> Iterator[Loss]:
        """As in `BatchLoss`. Where the rollout kept its graphs, `rows` are one of its micro-batches, whose graphs are used up."""
        graphs = self.trajectory.graphs.pop(int(rows[0]), None)
        for k, i in enumerate(self.trajectory.steps):
            current = (
                self._with_recorded(k, rows, graphs[k])
                if graphs
                else self._replayed(k, rows, self.policy, self.conditioning)
            )
            step = current.step
            assert step is not None
            known = {"observed_clip": self.clip.range_at(i)} if self.objective.has_auto_clip else {}
            loss = self.loss(step, self._on_device(self.advantage[:, k], rows), **known)
            if self.objective.has_auto_clip:
                deviation = loss.metrics[RATIO_DEVIATION]
                self.clip.observe(i, deviation.where(is_real.to(deviation.device, non_blocking=True), math.nan))
            if self.objective.weighs_by_std:
                loss = Loss(loss.value * step.std.flatten(1)[:, 0], loss.metrics)
            references = self.anchors.evaluate(functools.partial(self._replayed, k, rows))
            yield self.anchors.with_kl(loss, current, references, rows)

    def _replayed(self, k: int, rows: Int[Tensor, " n"], model: FlowPipeline, conditioning: Conditioning) -> Prediction:
        """Velocity and transition of the k-th trained step by a model."""
        velocity = model.velocity_fn(self.trajectory.schedule, conditioning, rows)
        return self._with_recorded(k, rows, sampling.replay(velocity, self.trajectory, k, rows, self.policy.device))

    def _with_recorded(self, k: int, rows: Int[Tensor, " n"], current: ReplayedTransition) -> Prediction:
        """Velocity and transition of the k-th trained step, beside what the rollout recorded."""
        trajectory, i = self.trajectory, self.trajectory.steps[k]
        delta = trajectory.schedule.sigmas[i + 1] - trajectory.schedule.sigmas[i]
        old_log_prob = self._on_device(trajectory.log_prob[:, k], rows)
        old_mean = self._on_device(trajectory.mean[:, k], rows)
        return Prediction(
            current.v, TrainedStep(current.log_prob, old_log_prob, current.mean, old_mean, std=current.std, delta=delta)
        )


def objective_function(objective: Stepwise | ForwardProcess) -> Callable[..., Loss]:
    """An objective as a function of rows and advantages."""
    return functools.partial(custom_loss, objective) if isinstance(objective, CustomFunction) else objective.loss


class LossMetrics:
    """Weighted means of the numbers that losses report, and other metrics of an update.

    What `add` is given stays on its device until `collect` fetches all of it at once.

    Attributes:
        loss, sums, weight: weighted sums of the loss, of each metric and of 1, up to the last `collect`.
        numbers: metrics that are not averaged: the largest deviation of a ratio, NaN if one is, and what the update adds.
    """

    def __init__(self) -> None:
        self.loss = 0.0
        self.sums: dict[str, float] = {}
        self.weight = 0.0
        self.numbers: dict[str, float] = {}
        self._added: list[tuple[list[str], Tensor]] = []
        self._added_numbers: dict[str, Tensor] = {}

    def add(self, loss: Loss, weight: Float[Tensor, " n"]) -> None:
        """Add a chunk's loss and metrics, its rows weighted by `weight` (n,), on the loss's device."""
        fetched = [weight.sum(), *((values.detach() * weight).sum() for values in (loss.value, *loss.metrics.values()))]
        if RATIO_DEVIATION in loss.metrics:
            fetched.append(loss.metrics[RATIO_DEVIATION].where(weight > 0, 0.0).max())
        self._added.append((list(loss.metrics), torch.stack(fetched)))

    def add_number(self, name: str, value: Tensor) -> None:
        """Add a metric that is not averaged: value (), on the device of the losses. A later one of the same name replaces it."""
        self._added_numbers[name] = value

    def collect(self) -> "LossMetrics":
        """Fetch what was added since the last call: the only method that waits for a GPU. Returns itself."""
        device_values = [values for _, values in self._added] + [number[None] for number in self._added_numbers.values()]
        added = torch.cat(device_values).cpu().tolist() if device_values else []
        for names, values in self._added:
            weight, loss, *of_metrics = added[: len(values)]
            added = added[len(values) :]
            self.weight, self.loss = self.weight + weight, self.loss + loss
            if RATIO_DEVIATION in names:
                _merge_max(self.numbers, {RATIO_DEVIATION: of_metrics.pop()})
            for name, value in zip(names, of_metrics, strict=True):
                self.sums[name] = self.sums.get(name, 0.0) + value
        self.numbers.update(zip(self._added_numbers, added, strict=True))
        self._added, self._added_numbers = [], {}
        return self

    @staticmethod
    def merge(parts: "list[LossMetrics]") -> "LossMetrics":
        """The collected metrics of several processes as one."""
        merged = LossMetrics()
        for part in parts:
            merged.loss, merged.weight = merged.loss + part.loss, merged.weight + part.weight
            for name, value in part.sums.items():
                merged.sums[name] = merged.sums.get(name, 0.0) + value
            _merge_max(merged.numbers, part.numbers)
        return merged

    def metrics(self) -> dict[str, float]:
        """Weighted means, and `numbers`."""
        return {**{name: total / self.weight for name, total in self.sums.items()}, **self.numbers}


def _merge_max(largest: dict[str, float], others: dict[str, float]) -> None:
    """The larger number of each name, or NaN."""
    for name, value in others.items():
        if name not in largest or value > largest[name] or math.isnan(value):
            largest[name] = value
