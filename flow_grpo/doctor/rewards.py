"""Checks of the rewards of a run on its own images: their values, determinism, prompts, other images, time."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flow_grpo.doctor.result import ERROR, OK, WARNING, CheckResult
from flow_grpo.doctor.reward_probe import RewardStats, measure, mismatched, results, score_once, value_range
from flow_grpo.rewards import WeightedSum
from flow_grpo.rewards.calls import RewardInputs
from flow_grpo.training.setup import HUMAN


@dataclass(frozen=True)
class RewardChecks:
    """The scores of the rewards that could score the images, and the results of the checks.

    Attributes:
        rows: the images that each reward was called with, if prompt sets name rewards.
    """

    stats: dict[str, RewardStats]
    results: list[CheckResult]
    rows: dict[str, list[int]] = field(default_factory=dict)

    def values(self, count: int) -> dict[str, Tensor]:
        """The values (B,) of all B images by reward, NaN where the reward was not called."""
        values = {name: torch.full((count,), torch.nan) for name in {**self.stats, **self.rows}}
        for name, stats in self.stats.items():
            values[name][self.rows.get(name, list(range(count)))] = stats.original
        return values

    @property
    def seconds(self) -> float:
        """Seconds of all rewards for each image."""
        return sum(stats.seconds for stats in self.stats.values())

    def can_score(self, rewards: WeightedSum) -> bool:
        """Whether these rewards of a rollout would not stop the run."""
        called = [name for name in rewards.rewards if name != HUMAN and self.rows.get(name, [0])]
        return all(name in self.stats and (self.stats[name].finite or name in rewards.drop_on_error) for name in called)


def check_rewards(
    rewards: WeightedSum, in_rollouts: Collection[str], inputs: RewardInputs, sampling_seconds: float
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
    measured: dict[str, RewardStats] = {}
    errors: dict[str, str] = {}
    for name in called:
        own, reward = inputs.take(rows[name]) if name in rows else inputs, rewards.rewards[name]
        try:
            once = name not in in_rollouts
            measured[name] = score_once(name, reward, own) if once else measure(name, reward, own, mismatched(own))
        except ValueError as error:
            errors[name] = str(error)
    scoring = sum(stats.seconds for name, stats in measured.items() if name in in_rollouts)
    rollout, found = sampling_seconds / len(inputs.prompts) + scoring, []
    for name in names:
        drops = name in rewards.drop_on_error
        if name not in called:
            found.append(not_called(name))
        elif name in errors:
            found.append(reward_failed(name, errors[name], drops))
        else:
            stats = measured[name]
            others = [other for key, other in measured.items() if key != name and rewards.weights[key]]
            found += (
                results(name, stats, others, drops)
                if rewards.weights[name]
                else [value_range(name, stats.original, drops, if_constant=OK)]
            )
            found.append(latency(name, stats.seconds, stats.seconds / rollout if name in in_rollouts else None))
    return RewardChecks(measured, found, rows)


def scored_rows(rewards: WeightedSum, inputs: RewardInputs) -> dict[str, list[int]]:
    """The rows of the images that each trained reward scores; empty if no prompt set names rewards."""
    weights = rewards.row_weights(inputs.metadata)
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


def latency(name: str, seconds: float, share: float | None) -> CheckResult:
    """Seconds for each image; `share` is that of a rollout's time, None if no rollout calls the reward."""
    check, value = f"{name}: time per image", f"{1000 * seconds:.1f} ms"
    if share is None:
        return CheckResult(check, value, OK, "in evaluations only, with loading")
    if share <= 0.5:
        return CheckResult(check, value, OK, f"{share:.0%} of a rollout")
    message = f"{share:.0%} of a rollout: score larger batches, or run it on another machine by `remote`."
    return CheckResult(check, value, WARNING, message)
