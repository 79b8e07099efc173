"""Detects reward hacking: the trained reward rises while another measure drops.

Every evaluation generates the same held-out prompts with the same seeds, so that two evaluations are compared prompt by prompt. The
rule, at each evaluation:

    the trained reward has risen    above the first evaluation's by more than 3 standard errors, and is not below its value at the best
                                    evaluation of the next line, and
    another metric has dropped      below its best evaluation so far by more than 3 standard errors, and by more than a share of its
                                    size (the root mean square over the prompts at that best evaluation): 1/50 of a reward that is
                                    not trained on, 1/3 of the high-frequency power, 3/4 of the diversity.

So neither noise nor a small change causes a warning, and if a metric drops together with the trained reward, the run fails but does
not cheat. Images that all follow their prompts differ less: the diversity of the embedded model halves while it learns to spell. So
the thresholds for diversity and high-frequency power are high.

The best evaluation is the one with the largest mean over the rewards that are not trained on, each as its change since the first
evaluation relative to its size there. Without such rewards, or if the first evaluation has no values of them, it is the evaluation
with the largest trained reward.
"""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from flow_grpo.evaluation.significance import MIN_PROMPTS_FOR_ERROR, finite_mean, paired_difference
from flow_grpo.run_folder.metrics_file import metric_name, metric_size

NUM_STANDARD_ERRORS = 3.0  # a smaller difference is noise
MIN_PROMPTS = MIN_PROMPTS_FOR_ERROR  # with fewer held-out prompts there is no warning
REWARD_DROP = 0.02  # share of a reward's size
HIGH_FREQUENCY_POWER, DIVERSITY = "high-frequency power of the images", "diversity of the images"
IMAGE_DROPS = {HIGH_FREQUENCY_POWER: 1 / 3, DIVERSITY: 3 / 4}


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation, prompt by prompt."""

    step: int
    reward: list[float]  # the trained weighted sum
    untrained_rewards: dict[str, list[float]]  # rewards that are not trained on
    image_metrics: dict[str, list[float]]  # high-frequency power and diversity


def read_history(evaluations: list[dict[str, Any]], size: str = "") -> list[EvaluationRecord]:
    """The records of all evaluations so far, from their evaluation.json.

    Args:
        size: a further size, HEIGHTxWIDTH; evaluations without it are left out.
    """
    records = []
    for e in evaluations:
        if size and size not in e.get("sizes", {}):
            continue
        of_size = {metric_name(name): values for name, values in e["values"].items() if metric_size(name) == size}
        untrained_rewards = {
            name: values for name, values in of_size.items() if name != "reward" and name not in e["trained"]
        }
        images = e["sizes"][size] if size else e
        image_metrics = {HIGH_FREQUENCY_POWER: images["high_frequency_power"], DIVERSITY: images.get("diversity", [])}
        records.append(EvaluationRecord(e["step"], of_size["reward"], untrained_rewards, image_metrics))
    return records


def detect_drops(history: list[EvaluationRecord]) -> dict[str, tuple[int, float]]:
    """The metrics that have dropped at the last of these evaluations: since which step, and by which share of their size."""
    first, now = history[0], history[-1]
    gain, error = paired_difference(now.reward, first.reward)
    drops: dict[str, tuple[int, float]] = {}
    if gain <= NUM_STANDARD_ERRORS * error:
        return drops
    rewards = {record.step: finite_mean(record.reward) for record in history}
    for name, values in {**now.untrained_rewards, **now.image_metrics}.items():
        by_step = {record.step: {**record.untrained_rewards, **record.image_metrics}.get(name, []) for record in history}
        best_at = max(by_step, key=lambda step: finite_mean(by_step[step]))
        if rewards[now.step] < rewards[best_at]:
            continue
        loss, error = paired_difference(by_step[best_at], values)
        size = _root_mean_square(by_step[best_at])
        share = IMAGE_DROPS[name] if name in now.image_metrics else REWARD_DROP
        if loss > max(NUM_STANDARD_ERRORS * error, share * size):
            drops[name] = (best_at, loss / (size or loss))  # all of it, if the best was 0 for each prompt
    return drops


def best_step(history: list[EvaluationRecord]) -> int:
    """The step of the best evaluation; of equal ones the earliest."""
    first = history[0]

    def relative_gain(record: EvaluationRecord) -> float:
        pairs = [
            (record.untrained_rewards[name], values)
            for name, values in first.untrained_rewards.items()
            if name in record.untrained_rewards and math.isfinite(finite_mean(values))
        ]
        return statistics.mean(_relative_gain(now, then) for now, then in pairs or [(record.reward, first.reward)])

    return max(history, key=relative_gain).step


def warnings(history: list[EvaluationRecord], best: int | None = None) -> dict[str, str]:
    """A sentence for each metric that has dropped at the last of these evaluations.

    Args:
        best: the step of the weights in best/; None if there are none.
    """
    end = "while the trained reward rose: look at the images for signs of cheating."
    if best is not None:
        end += f" best/ holds the weights of step {best}."
    return {
        name: f"{name}, which is not trained on, has fallen by {share:.0%} since step {since} {end}"
        for name, (since, share) in detect_drops(history).items()
    }


def limits() -> str:
    """The rule as one sentence for users."""
    return (
        "The monitor warns when, while the trained reward rises, a reward that is not trained on falls by more than "
        f"{REWARD_DROP:.0%}, the {HIGH_FREQUENCY_POWER} by more than {IMAGE_DROPS[HIGH_FREQUENCY_POWER]:.0%} or their diversity by "
        f"more than {IMAGE_DROPS[DIVERSITY]:.0%} of its best value, and by more than noise explains."
    )


def metrics(history: list[EvaluationRecord], size: str = "") -> dict[str, float]:
    """The monitor's metrics at the last of these evaluations, which are of that further size."""
    now = history[-1].image_metrics
    means = {
        "monitor/high_frequency_power": finite_mean(now[HIGH_FREQUENCY_POWER]),
        "monitor/diversity": finite_mean(now[DIVERSITY]),
    }
    if size:
        return {f"{name}@{size}": mean for name, mean in means.items()}
    return {**means, "monitor/best_step": float(best_step(history))}


def _relative_gain(now: list[float], then: list[float]) -> float:
    """The change of the mean relative to the size of the former values; of no former values, the mean itself."""
    start = finite_mean(then)
    return (finite_mean(now) - (start if math.isfinite(start) else 0.0)) / (_root_mean_square(then) or 1.0)


def _root_mean_square(values: list[float]) -> float:
    return math.sqrt(max(0.0, finite_mean([value * value for value in values])))
