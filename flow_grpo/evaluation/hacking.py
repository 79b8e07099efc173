"""Watches for reward hacking: the trained reward goes up while something that should hold falls.

Every evaluation draws the same held-out prompts from the same seeds, so two of them are compared prompt by prompt: a difference
is the mean of the prompts' own differences, its standard error their standard deviation over the root of their number. The rule,
at each evaluation:

    the trained reward has risen    above the first evaluation's by more than 3 standard errors, not fallen since the best one below, and
    a watched measure has fallen    below its best evaluation so far by more than 3 standard errors, and by more than a share of
                                    its size, the root mean square over the prompts at that best one: a fiftieth of a reward
                                    that is not trained on, a third of the high-frequency power, three quarters of the
                                    diversity.

So neither noise nor a trifle warns, and what falls together with the trained reward is a run that fails, not one that cheats.
Pictures that all do as they are told differ less: the embedded model's diversity halves while it learns to spell. So diversity has
to collapse, and high-frequency power to be lost as blur loses it, before either warns.

The best evaluation is the one whose rewards that are not trained on, each as its change since the first evaluation in shares of
its size there, have the largest mean; without such rewards it is the trained reward's best.
"""

import math
import statistics
from dataclasses import dataclass
from typing import Any

ERRORS = 3.0  # standard errors that noise does not reach
LEAST = 8  # prompts: fewer say nothing
SHARE = 0.02
SHARPNESS, DIVERSITY = "high-frequency power of the images", "diversity of the images"
SHARES = {SHARPNESS: 1 / 3, DIVERSITY: 3 / 4}


@dataclass(frozen=True)
class Reading:
    """One evaluation, prompt by prompt."""

    step: int
    reward: list[float]  # the trained sum
    held_out: dict[str, list[float]]  # rewards that are not trained on
    looks: dict[str, list[float]]  # high-frequency power and diversity


def read_history(evaluations: list[dict[str, Any]]) -> list[Reading]:
    """The evaluation.json of each evaluation so far, as the rule compares them."""
    found = []
    for e in evaluations:
        held_out = {name: values for name, values in e["values"].items() if name != "reward" and name not in e["trained"]}
        looks = {SHARPNESS: e["sharpness"], DIVERSITY: e["diversity"]}
        found.append(Reading(e["step"], e["values"]["reward"], held_out, looks))
    return found


def falls(history: list[Reading]) -> dict[str, tuple[int, float]]:
    """What has fallen at the last of these evaluations: since which step, and by which share of its size."""
    first, now = history[0], history[-1]
    gain, error = difference(now.reward, first.reward)
    found: dict[str, tuple[int, float]] = {}
    if gain <= ERRORS * error:
        return found
    rewards = {reading.step: _mean(reading.reward) for reading in history}
    for name, values in {**now.held_out, **now.looks}.items():
        of = {reading.step: {**reading.held_out, **reading.looks}.get(name, []) for reading in history}
        best = max(of, key=lambda step: _mean(of[step]))
        if rewards[now.step] < rewards[best]:
            continue
        loss, error = difference(of[best], values)
        size = _size(of[best])
        share = SHARES[name] if name in now.looks else SHARE
        if loss > max(ERRORS * error, share * size):
            found[name] = (best, loss / size)
    return found


def best(history: list[Reading]) -> int:
    """The step of the best evaluation, the earliest of equals."""
    first = history[0]

    def standing(reading: Reading) -> float:
        pairs = [(reading.held_out[name], values) for name, values in first.held_out.items() if name in reading.held_out]
        pairs = pairs or [(reading.reward, first.reward)]
        return statistics.mean((_mean(now) - _mean(then)) / (_size(then) or 1.0) for now, then in pairs)

    return max(history, key=standing).step


def warnings(history: list[Reading]) -> dict[str, str]:
    """A sentence for each measure that has fallen at the last of these evaluations."""
    end = (
        f"while the trained reward rose: look at the pictures for cheating. best/ holds the weights of step {best(history)}."
    )
    return {
        name: f"{name}, which is not trained on, has fallen by {share:.0%} since step {since} {end}"
        for name, (since, share) in falls(history).items()
    }


def limits() -> str:
    """What the monitor watches and from where on it warns, as one sentence."""
    return (
        f"The monitor warns when, while the trained reward rises, a reward that is not trained on falls by more than {SHARE:.0%}, "
        f"the {SHARPNESS} by more than {SHARES[SHARPNESS]:.0%} or their diversity by more than {SHARES[DIVERSITY]:.0%} of its best "
        "value, and by more than noise explains."
    )


def numbers(history: list[Reading]) -> dict[str, float]:
    """What the metrics hold of the monitor at the last of these evaluations."""
    looks = history[-1].looks
    means = {"monitor/sharpness": _mean(looks[SHARPNESS]), "monitor/diversity": _mean(looks[DIVERSITY])}
    return {**means, "monitor/best_step": float(best(history))}


def difference(now: list[float], then: list[float]) -> tuple[float, float]:
    """The mean of the prompts' differences and its standard error, which is infinite for fewer than 8 prompts."""
    found = [a - b for a, b in zip(now, then, strict=False) if math.isfinite(a - b)]
    if len(found) < LEAST:
        return _mean(found), math.inf
    return _mean(found), statistics.stdev(found) / math.sqrt(len(found))


def _mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else -math.inf


def _size(values: list[float]) -> float:
    return math.sqrt(max(0.0, _mean([value * value for value in values])))
