"""Checks of each reward on images of the run: values, determinism, prompts, other images, side effects, time."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flow_grpo.doctor.result import ERROR, OK, WARNING, CheckResult, Status
from flow_grpo.doctor.reward_probe import SAME, SATURATED, GradientStats, RewardCall, RewardProbe, call_once, probe
from flow_grpo.evaluation.group_dependence import GROUP_DEPENDENT, RewardInputs
from flow_grpo.rewards import WeightedSum
from flow_grpo.training.setup import HUMAN

MAX_SLOPE_ERROR = 0.5  # of the predicted slope
MIN_WITHIN_SHARE = 0.05  # of the standard deviation over all images; a reward with less rates prompts


@dataclass(frozen=True)
class RewardChecks:
    """The scores of the rewards that could score the images, and the results of the checks.

    Attributes:
        rows: the images that each reward was called with, if prompt sets name rewards.
    """

    calls: dict[str, RewardCall]
    results: list[CheckResult]
    rows: dict[str, list[int]] = field(default_factory=dict)

    def values(self, count: int) -> dict[str, Tensor]:
        """The values (B,) of all B images by reward, NaN where the reward was not called."""
        values = {name: torch.full((count,), torch.nan) for name in {**self.calls, **self.rows}}
        for name, call in self.calls.items():
            values[name][self.rows.get(name, list(range(count)))] = call.values
        return values

    @property
    def seconds(self) -> float:
        """Seconds of all rewards for each image."""
        return sum(call.seconds for call in self.calls.values())

    def can_score(self, rewards: WeightedSum) -> bool:
        """Whether these rewards of a rollout would not stop the run."""
        called = [name for name in rewards.rewards if name != HUMAN and self.rows.get(name, [0])]
        return all(name in self.calls and (self.calls[name].finite or name in rewards.drop_on_error) for name in called)


def check_rewards(
    rewards: WeightedSum, in_rollouts: Collection[str], inputs: RewardInputs, group_size: int, sampling_seconds: float
) -> RewardChecks:
    """Check each reward but a human one.

    Args:
        rewards: all rewards of the run; those with weight 0 are only measured.
        in_rollouts: the names of rewards that rollouts call. The others, which only evaluations call, are called once.
        sampling_seconds: what sampling the images took.
    """
    names = sorted(rewards.rewards, key=lambda name: not rewards.weights[name])  # the trained ones first
    rows = scored_rows(rewards, inputs)
    called = [name for name in names if name != HUMAN and rows.get(name, [0])]
    calls: dict[str, RewardCall] = {}
    errors: dict[str, str] = {}
    for name in called:
        scored_inputs = inputs.take(rows[name]) if name in rows else inputs
        try:
            calls[name] = (probe if name in in_rollouts else call_once)(name, rewards.rewards[name], scored_inputs)
        except ValueError as error:
            errors[name] = str(error)
    trained = {name: call for name, call in calls.items() if rewards.weights[name]}
    scoring = sum(call.seconds for name, call in calls.items() if name in in_rollouts)
    rollout, results = sampling_seconds / len(inputs.prompts) + scoring, []
    for name in names:
        if name not in called:
            results.append(not_called(name))
            continue
        drops = name in rewards.drop_on_error
        if name in errors:
            results.append(reward_failed(name, errors[name], drops))
            continue
        if name in trained:
            other_calls = [call for other_name, call in trained.items() if other_name != name]
            results += check_trained(name, calls[name], group_size, drops, other_calls)
        else:
            results += check_monitored(name, calls[name], drops)
        seconds = calls[name].seconds
        results.append(latency(name, seconds, seconds / rollout if name in in_rollouts else None))
    return RewardChecks(calls, results, rows)


def scored_rows(rewards: WeightedSum, inputs: RewardInputs) -> dict[str, list[int]]:
    """The rows of the images that each trained reward scores; empty if no prompt set names rewards."""
    weights = rewards.row_weights(inputs.columns)
    if weights is None:
        return {}
    return {name: weights[:, i].nonzero()[:, 0].tolist() for i, name in enumerate(rewards.trained_weights)}


def replace_human_reward(rewards: WeightedSum) -> None:
    """Put brightness in place of a human reward, so that nobody is asked and no vote on these images is kept."""
    if HUMAN in rewards.rewards:
        rewards.rewards[HUMAN] = brightness


def brightness(images: Tensor, prompts: list[str], **metadata: Any) -> Tensor:
    """Stand in for a person: the mean of all channels, (B,)."""
    return images.mean((1, 2, 3))


def check_trained(
    name: str, call: RewardCall, group_size: int, drops: bool, other_calls: list[RewardCall]
) -> list[CheckResult]:
    """The results for a reward that is trained on, together with those of `other_calls`."""
    assert isinstance(call, RewardProbe)
    alone = all(other_call.constant for other_call in other_calls)
    results = [value_range(name, call.values, drops, if_constant=ERROR if alone else WARNING)]
    if call.finite and not call.constant:
        groups = call.values.view(-1, group_size)
        within = groups.std(1, correction=0).mean().item()
        results += [group_std(name, groups), determinism(name, call.repeated, within)]
    if call.finite and call.mismatched is not None:
        change = (call.mismatched - call.repeated[0]).mean().item()
        another = any(isinstance(other_call, RewardProbe) and other_call.reads_prompt for other_call in other_calls)
        results.append(reads_prompt(name, call.reads_prompt, change, another))
    if not call.sees_groups:
        results.append(group_dependence(name, call.depends_on_group))
    return [*results, *gradient(name, call.gradient), side_effects(name, call)]


def check_monitored(name: str, call: RewardCall, drops: bool) -> list[CheckResult]:
    """The results for a reward that is measured and not trained on."""
    results = [value_range(name, call.values, drops, if_constant=OK)]
    return [*results, side_effects(name, call)] if call.settings else results


# -- evaluating -------------------------------------------------------------------------------------------------------


def not_called(name: str) -> CheckResult:
    """The result for a reward that asks a person, or that no prompt of the first step names."""
    message = "no prompt of the first step has this reward"
    if name == HUMAN:
        message = "not called: before a run, mean brightness is used where a ranking is needed."
    return CheckResult(f"{name}: values", "not called", OK, message)


def reward_failed(name: str, error: str, drops: bool) -> CheckResult:
    """A reward that failed; `drops` if its on_error drops the groups of images that it can't score."""
    advice = "" if drops else " Fix it; if it fails only now and then, on_error=drop leaves out those images."
    return CheckResult(f"{name}: values", "none", ERROR, f"{error.rstrip('.')}.{advice}")


def value_range(name: str, scores: Tensor, drops: bool, if_constant: Status) -> CheckResult:
    """Range of the scores (B,) of images of several prompts; `if_constant` is the status if all are equal."""
    check, finite = f"{name}: values", scores[scores.isfinite()]
    missing = len(scores) - len(finite)
    if missing:
        status = WARNING if drops and len(finite) else ERROR
        message = "are not finite: " + ("those groups are left out." if drops else "fix it, or set its on_error=drop.")
        return CheckResult(check, f"{missing} of {len(scores)}", status, message)
    low, high = scores.min(), scores.max()
    if low == high:
        message = "all are equal: return a number that differs between images; if it is clamped, widen its range."
        return CheckResult(check, f"{low:.3g}", if_constant, "all are equal" if if_constant == OK else message)
    value, at_high, at_low = f"{low:.3g} to {high:.3g}", (scores == high).float().mean(), (scores == low).float().mean()
    if if_constant != OK and at_high >= SATURATED:
        message = f"{at_high:.0%} have the highest: use harder prompts or a stricter reward, or raise its cap."
        return CheckResult(check, value, WARNING, message)
    if if_constant != OK and at_low >= SATURATED:
        message = (
            f"{at_low:.0%} have the lowest: use easier prompts or a milder reward, or fine-tune the model first (`stages`)."
        )
        return CheckResult(check, value, WARNING, message)
    return CheckResult(check, value, OK, f"mean {scores.mean():.3g}")


def group_std(name: str, groups: Tensor) -> CheckResult:
    """Spread within groups (P, G) of values that are not all equal. The policy learns from differences between the images of a prompt."""
    check, within, overall = f"{name}: std within groups", groups.std(1, correction=0).mean(), groups.std(correction=0)
    if within > MIN_WITHIN_SHARE * overall:
        return CheckResult(check, f"{within:.2g}", OK, f"of {overall:.2g} over all images")
    if within > SAME * overall:
        message = (
            f"only {within / overall:.1%} of the {overall:.2g} over all images: it rates the prompt rather than the image."
        )
        return CheckResult(check, f"{within:.2g}", WARNING, message)
    message = "the images of a prompt all get the same value: it depends on the prompt and not on the image."
    return CheckResult(check, f"{within:.2g}", ERROR, message)


def determinism(name: str, repeated: list[Tensor], within: float) -> CheckResult:
    """Whether two calls give the same images the same values (n,); `within` is the standard deviation within a group."""
    check = f"{name}: deterministic"
    first, second = repeated[:2]
    if torch.equal(first, second):
        return CheckResult(check, "yes", OK)
    noise = ((first - second).square().mean() / 2).sqrt().item()
    value = f"no, noise std {noise:.2g}"
    if noise**2 > 0.5 * within**2:
        message = "most of the difference between images is its own noise: seed it, or average several calls."
        return CheckResult(check, value, ERROR, message)
    return CheckResult(check, value, WARNING, f"std within groups is {within:.2g}: seed it if you can.")


def reads_prompt(name: str, reads: bool, change: float, another: bool) -> CheckResult:
    """Whether the reward reads prompts.

    Args:
        change: mean effect of another image's prompt.
        another: whether another trained reward reads prompts.
    """
    check = f"{name}: reads the prompt"
    if reads:
        return CheckResult(check, "yes", OK, f"{change:+.2g} with a wrong prompt")
    if another:
        return CheckResult(check, "no", OK, "another reward does")
    message = "the images may stop matching their prompts: add a reward that reads it, such as clip, or a kl_weight."
    return CheckResult(check, "no", WARNING, message)


def group_dependence(name: str, depends: bool) -> CheckResult:
    """Evaluate whether an image's value depends on the other images of a call."""
    check = f"{name}: depends on other images"
    return CheckResult(check, "yes", WARNING, GROUP_DEPENDENT) if depends else CheckResult(check, "no", OK)


def gradient(name: str, stats: GradientStats | str | None) -> list[CheckResult]:
    """Whether the gradient of a reward predicts its values, how much of it is in a few positions, and how sharp the reward is."""
    check = f"{name}: gradient"
    if stats is None:
        return []
    if isinstance(stats, str):
        return [CheckResult(check, "none", WARNING, f"objectives by its gradient can't use it: {stats}")]
    if not stats.slope > 0:
        message = "it is 0, so that nothing can be learned from it: is the reward constant or clipped on these images?"
        return [CheckResult(check, f"{stats.slope:.2g}", WARNING, message)]
    right = abs(stats.ratio - 1) <= MAX_SLOPE_ERROR
    message = "of the predicted slope" if right else (
        f"the value changes by {stats.measured:.2g} a unit along the gradient, which predicts {stats.slope:.2g}: is a part of the "
        "reward left out of the graph?"
    )  # fmt: skip
    return [
        CheckResult(check, f"{stats.ratio:.2f}", OK if right else WARNING, message),
        CheckResult(
            f"{check} in 1% of the image", f"{stats.energy:.0%}", OK, "of its energy; 1% if it were the same everywhere"
        ),
        CheckResult(
            f"{name}: sharpness S1", f"{stats.sharpness:.2g}", OK, "it rises while a reward is hacked, by arXiv 2603.21175"
        ),
    ]


def side_effects(name: str, call: RewardCall) -> CheckResult:
    """Evaluate what a call changes besides what it returns."""
    check = f"{name}: side effects"
    if call.settings:
        message = f"it changes {', '.join(call.settings)} of the whole process; this is undone after each call."
        return CheckResult(check, "settings changed", WARNING, message)
    if call.has_gradient:
        return CheckResult(check, "a gradient", WARNING, "its values keep an unused graph: run it under torch.no_grad().")
    return CheckResult(check, "none", OK)


def latency(name: str, seconds: float, share: float | None) -> CheckResult:
    """Seconds for each image; `share` is that of a rollout's time, None if no rollout calls the reward."""
    check, value = f"{name}: time per image", f"{1000 * seconds:.1f} ms"
    if share is None:
        return CheckResult(check, value, OK, "in evaluations only, with loading")
    if share <= 0.5:
        return CheckResult(check, value, OK, f"{share:.0%} of a rollout")
    message = f"{share:.0%} of a rollout: score larger batches, or run it on another machine by `remote`."
    return CheckResult(check, value, WARNING, message)
