"""What both kinds of loss share: the objective as a function, and averages of what losses report.

`BatchLoss` is their interface.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flow_grpo.config.objective import Objective, is_custom
from flow_grpo.training.custom import custom_loss
from flow_grpo.types import RATIO_DEVIATION, Loss


class BatchLoss(Protocol):
    """What `PolicyUpdate` needs of a loss on the images of a training step.

    `StepLoss` replays the trained transitions, `ForwardProcessLoss` adds new noise to the final latents.

    Attributes:
        count: the losses of a row, of which the update takes the mean: one for each trained step or noise level.
        fixed_positions: whether rows must keep the chunk and position that they had in the rollout, since the loss compares with numbers
            that were computed there, and a kernel's last bits may depend on the position.
    """

    count: int
    fixed_positions: bool

    def before_update(self, chunks: list[tuple[Tensor, Tensor]]) -> None:
        """Compute what the losses need of all rows of an optimizer step. The update calls it before it asks for their losses.

        Args:
            chunks: the rows (n,) and weights (n,) of each chunk; rows that only fill it up weigh 0.
        """

    def losses(self, rows: Int[Tensor, " n"], is_real: Bool[Tensor, " n"]) -> Iterator[Loss]:
        """Yield the `count` losses of `rows`. The update calls it for each chunk.

        It weighs the rows and runs backward on each loss before it takes the next one, so only one graph is in memory.

        Args:
            is_real: false for rows that only fill up the chunk.
        """


class LossMetrics:
    """Weighted means of the numbers that losses report, and other metrics of an update.

    What `add` is given stays on its device until `collect` fetches all of it at once.

    Attributes:
        loss, sums, weight: weighted sums of the loss, of each metric and of 1, as of the last `collect`.
        numbers: metrics that are no means: the largest deviation of a ratio, NaN if one is, and what the update adds.
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


def objective_function(objective: Objective) -> Callable[..., Loss]:
    """An objective as a function of rows and advantages."""
    return functools.partial(custom_loss, objective) if is_custom(objective.name) else objective.loss


def mean_by_group(value: Float[Tensor, " n"], group: Int[Tensor, " n"], counts: Bool[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Each row's mean over the rows of its group that count; 0 for groups without any."""
    index = group.unique(return_inverse=True)[1].to(value.device, non_blocking=True)
    weight = counts.to(value)
    sums, sizes = (torch.zeros(len(group)).to(value).index_add(0, index, values) for values in (value * weight, weight))
    return (sums / sizes.clamp_min(1))[index]
