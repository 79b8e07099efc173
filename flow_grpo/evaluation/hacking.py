"""Detects reward hacking: a trained reward rises while another measure falls.

Every evaluation generates the same held-out prompts with the same seeds, so that two evaluations are compared prompt by prompt.
Watched are the rewards that are not trained on, the image metrics, and with several trained rewards each of them. At each evaluation a
warning says that one of them has fallen below an earlier evaluation, if

    it fell by more than noise     a one-sided paired t-test over prompts, at the level below, and
    it fell by more than a share   of its size, the root mean square over the prompts at that earlier evaluation: 1/50 of a reward,
                                   1/3 of the high-frequency power, 3/4 of the diversity, and
    another reward rose            a trained one, or their weighted sum: above the first evaluation by more than 3 standard errors, and
                                   not below its value at that earlier evaluation.

If all rewards fall together, the run fails but does not cheat. Images that all follow their prompts differ less: the diversity of the
embedded model halves while it learns to spell. So the thresholds for diversity and high-frequency power are high.

A run makes many comparisons. The chance that any of them warns although no metric has changed is at most FALSE_ALARMS for the whole
run, however long it is: each metric gets an equal part of it; the k-th comparison of evaluations gets the part n / ((k + n - 1) (k + n))
of that, n = 20, whose sum over all k is 1; and of that, the first evaluation gets one half and the others share the other half
(a weighted Bonferroni correction). This holds whatever the dependence between metrics and between evaluations; prompts must be
independent. Where nothing has changed, the two evaluations can change places, so that the differences are symmetric, for which the
t-test keeps its level also far out and for shares and skewed rewards, from 12 prompts on: with fewer, chance alone lets all of them fall
too often in a run of more than 40 evaluations. The tests count false alarms in simulated runs.

The best evaluation is, of those without a warning, the one with the largest mean over the rewards that are not trained on, each as
its change since the first evaluation relative to its size there. Without such rewards, or if the first evaluation has no values of
them, it is the one with the largest trained reward.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from flow_grpo.evaluation.significance import finite_mean, paired_difference, paired_fall

FALSE_ALARMS = 0.05  # the largest chance of a warning in a run in which no metric falls
HALF_SPENT = 20  # comparisons of evaluations after which half of that chance is spent
NUM_STANDARD_ERRORS = 3.0  # a smaller rise of a trained reward is noise
REWARD_DROP = 0.02  # share of a reward's size
HIGH_FREQUENCY_POWER, DIVERSITY = "high-frequency power", "diversity"  # names of metrics, also in eval.json, .md and .csv
IMAGE_DROPS = {HIGH_FREQUENCY_POWER: 1 / 3, DIVERSITY: 3 / 4}
WEIGHTED_SUM = "the trained reward"


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation, prompt by prompt."""

    step: int
    reward: list[float]  # the trained weighted sum
    untrained_rewards: dict[str, list[float]]  # rewards that are not trained on
    image_metrics: dict[str, list[float]]  # high-frequency power and diversity
    trained_rewards: dict[str, list[float]] = field(default_factory=dict)  # each alone; more is better, also of a penalty

    @property
    def watched(self) -> dict[str, list[float]]:
        """The measures whose fall is a warning. A single trained reward is what rises."""
        several = self.trained_rewards if len(self.trained_rewards) > 1 else {}
        return {**self.untrained_rewards, **{of_images(n): v for n, v in self.image_metrics.items()}, **several}


def of_images(metric: str) -> str:
    """The name of an image metric in a warning, where a reward may have the metric's own name."""
    return f"{metric} of the images"


class Drop(NamedTuple):
    """The fall of a metric."""

    since: int  # the step of the evaluation that it is compared with
    share: float  # of its size there
    risen: str  # the reward that rose


def read_history(evaluations: list[dict[str, Any]]) -> list[EvaluationRecord]:
    """The records of all evaluations so far, from their evaluation.json."""
    records = []
    for e in evaluations:
        values = {name: of_name for name, of_name in e["values"].items() if "@" not in name}  # 0.4 had further sizes
        untrained_rewards = {name: v for name, v in values.items() if name != "reward" and name not in e["trained"]}
        image_metrics = {HIGH_FREQUENCY_POWER: e["high_frequency_power"], DIVERSITY: e.get("diversity", [])}
        weights = e.get("weights", {})  # flow-grpo 0.4 kept none
        trained_rewards = {name: _signed(values[name], weights.get(name, 1.0)) for name in e["trained"] if name in values}
        records.append(EvaluationRecord(e["step"], values["reward"], untrained_rewards, image_metrics, trained_rewards))
    return records


def detect_drops(history: list[EvaluationRecord]) -> dict[str, Drop]:
    """The metrics that have fallen at the last of these evaluations, while a trained reward rose."""
    now, earlier = history[-1], history[:-1]
    several = now.trained_rewards if len(now.trained_rewards) > 1 else {}
    rewards = {name: [r.trained_rewards.get(name, []) for r in history] for name in several}
    rewards[WEIGHTED_SUM] = [r.reward for r in history]
    rises = {name: _has_risen(values) for name, values in rewards.items()}
    image_drops = {of_images(name): share for name, share in IMAGE_DROPS.items()}
    drops: dict[str, Drop] = {}
    for name in now.watched:
        values = [r.watched.get(name, []) for r in history]
        is_fall = is_significant_fall(_table(values), len(now.watched))
        share, largest = image_drops.get(name, REWARD_DROP), 0.0
        for j, before in enumerate(values[:-1]):
            risen = next((other for other, has_risen in rises.items() if has_risen[j] and other != name), None)
            loss, size = paired_difference(before, values[-1])[0], _root_mean_square(before)
            if risen is not None and is_fall[j] and loss > max(share * size, largest):
                largest = loss
                drops[name] = Drop(earlier[j].step, loss / (size or loss), risen)
    return drops


def is_significant_fall(values: Float[np.ndarray, "*runs K P"], num_metrics: int) -> Bool[np.ndarray, "*runs K-1"]:
    """Whether the last of K evaluations of a metric is below each of those before it by more than noise; NaN is no value.

    Args:
        num_metrics: how many metrics are watched.
    """
    k = values.shape[-2] - 1  # this is the k-th comparison of a run
    part = HALF_SPENT / ((k + HALF_SPENT - 1) * (k + HALF_SPENT))
    weights = np.full(k, 0.5 / max(1, k - 1))
    weights[:1] = 0.5 if k > 1 else 1.0
    p = paired_fall(values[..., :-1, :], values[..., -1:, :])
    return p < FALSE_ALARMS / num_metrics * part * weights


def _has_risen(values: list[list[float]]) -> list[bool]:
    """For each evaluation but the last, whether the last one is above the first by more than noise, and not below that one."""
    gain, error = paired_difference(values[-1], values[0])
    now = finite_mean(values[-1])
    return [gain > NUM_STANDARD_ERRORS * error and now >= finite_mean(before) for before in values[:-1]]


def _table(values: list[list[float]]) -> Float[np.ndarray, "K P"]:
    """The values of K evaluations, with NaN where one has fewer prompts."""
    table = np.full((len(values), max(map(len, values), default=0)), np.nan)
    for row, one in zip(table, values, strict=True):
        row[: len(one)] = one
    return table


def _signed(values: Iterable[float], weight: float) -> list[float]:
    return [-value for value in values] if weight < 0 else list(values)


def best_step(history: list[EvaluationRecord]) -> int:
    """The step of the best evaluation without a warning, which the first one always is; of equal ones the earliest."""
    first = history[0]

    def relative_gain(record: EvaluationRecord) -> float:
        pairs = [
            (record.untrained_rewards[name], values)
            for name, values in first.untrained_rewards.items()
            if name in record.untrained_rewards and math.isfinite(finite_mean(values))
        ]
        return statistics.mean(_relative_gain(now, then) for now, then in pairs or [(record.reward, first.reward)])

    places = sorted(range(len(history)), key=lambda i: relative_gain(history[i]), reverse=True)
    return next(history[i].step for i in places if not detect_drops(history[: i + 1]))


def warnings(history: list[EvaluationRecord], best: int | None = None) -> dict[str, str]:
    """A sentence for each metric that has dropped at the last of these evaluations.

    Args:
        best: the step of the weights in best/; None if there are none.
    """
    end = "look at the images for signs of cheating."
    if best is not None:
        end += f" best/ holds the weights of step {best}."
    trained = history[-1].trained_rewards
    return {
        name: f"{name}, which is {'' if name in trained else 'not '}trained on, has fallen by {drop.share:.0%} since step "
        f"{drop.since} while {drop.risen} rose: {end}"
        for name, drop in detect_drops(history).items()
    }


def limits() -> str:
    """The rule as one sentence for users."""
    return (
        f"The monitor warns when, while a trained reward rises, another reward falls by more than {REWARD_DROP:.0%}, the "
        f"{of_images(HIGH_FREQUENCY_POWER)} by more than {IMAGE_DROPS[HIGH_FREQUENCY_POWER]:.0%} or their diversity by "
        f"more than {IMAGE_DROPS[DIVERSITY]:.0%} of its value at an earlier evaluation, and by more than noise explains."
    )


def metrics(history: list[EvaluationRecord]) -> dict[str, float]:
    """The monitor's metrics at the last of these evaluations."""
    now = history[-1].image_metrics
    return {
        "monitor/high_frequency_power": finite_mean(now[HIGH_FREQUENCY_POWER]),
        "monitor/diversity": finite_mean(now[DIVERSITY]),
        "monitor/best_step": float(best_step(history)),
    }


def _relative_gain(now: list[float], then: list[float]) -> float:
    """The change of the mean relative to the size of the former values; of no former values, the mean itself."""
    start = finite_mean(then)
    return (finite_mean(now) - (start if math.isfinite(start) else 0.0)) / (_root_mean_square(then) or 1.0)


def _root_mean_square(values: list[float]) -> float:
    return math.sqrt(max(0.0, finite_mean([value * value for value in values])))
