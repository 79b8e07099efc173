"""What both kinds of loss share: the objective with its settings bound, and averages of what losses report.

`StepLoss` (step_loss.py) replays the trained transitions, `ForwardProcessLoss` (forward_process_loss.py) adds new noise to the final
latents. Both yield one `Loss` for each of their `count` trained steps or noise levels; `PolicyUpdate` weights the rows and runs
backward on each before it takes the next, so only one graph is in memory.
"""

import functools
import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flow_grpo import methods, objectives
from flow_grpo.config.objective import ObjectiveConfig
from flow_grpo.training.custom import custom_loss
from flow_grpo.types import Loss, NoisedImage, TrainedStep


class LossMetrics:
    """Weighted means and largest values of the numbers that losses report."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.sums: dict[str, float] = {}
        self.largest: dict[str, float] = {}
        self.weight = 0.0
        self.numbers: dict[str, float] = {}

    def add(self, loss: Loss, weight: Float[Tensor, " n"]) -> None:
        """Add a chunk's loss and metrics, its rows weighted by `weight` (n,)."""
        self.loss += (loss.value * weight).sum().item()
        self.weight += weight.sum().item()
        for name, values in loss.metrics.items():
            self.sums[name] = self.sums.get(name, 0.0) + (values * weight).sum().item()
            largest = values[weight > 0].max()
            self.largest[name] = torch.maximum(largest, largest.new_tensor(self.largest.get(name, 0.0))).item()  # NaN stays

    @staticmethod
    def merge(parts: "list[LossMetrics]") -> "LossMetrics":
        """The metrics of several processes as one."""
        merged = LossMetrics()
        for part in parts:
            merged.loss, merged.weight = merged.loss + part.loss, merged.weight + part.weight
            for name, value in part.sums.items():
                merged.sums[name] = merged.sums.get(name, 0.0) + value
            _merge_max(merged.largest, part.largest)
            _merge_max(merged.numbers, part.numbers)
        return merged

    def metrics(self) -> dict[str, float]:
        """Weighted means; of deviations the largest value."""
        means = {name: total / self.weight for name, total in self.sums.items()}
        largest = {name: value for name, value in self.largest.items() if name.endswith("max_deviation")}
        return {**means, **largest, **self.numbers}


def _merge_max(largest: dict[str, float], others: dict[str, float]) -> None:
    """The larger number of each name, or NaN."""
    for name, value in others.items():
        if name not in largest or value > largest[name] or math.isnan(value):
            largest[name] = value


def objective_function(o: ObjectiveConfig, method: methods.Objective) -> Callable[..., Loss]:
    """An objective as a function of rows and advantages, with its settings bound; keywords override them."""
    if ":" in o.name:
        return functools.partial(custom_loss, o)
    return with_settings(getattr(objectives, method.function or o.name), o)


def with_settings(function: Callable[..., Any], o: ObjectiveConfig) -> Callable[..., Any]:
    """A function of `objectives.py` as a function of rows and advantages, with its settings bound."""
    takes = signature(function).parameters
    settings = {name: getattr(o, name) for name in takes if hasattr(o, name) and name != "advantage"}

    def bound(rows: TrainedStep | NoisedImage, advantage: Float[Tensor, " n"], **more: float) -> Any:
        first = {"advantage": advantage} if "advantage" in takes else {}
        return function(rows, **first, **{**settings, **more})

    return bound


def mean_by_group(value: Float[Tensor, " n"], group: Int[Tensor, " n"], counts: Bool[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Each row's mean over the rows of its group that count; 0 for groups without any."""
    place = group.unique(return_inverse=True)[1]
    weight = counts.to(value)
    sums, sizes = (torch.zeros(len(group)).to(value).index_add(0, place, one) for one in (value * weight, weight))
    return (sums / sizes.clamp_min(1))[place]
