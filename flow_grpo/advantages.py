"""Group-relative advantages: an image's reward against the other images of its prompt. No critic."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from flow_grpo.errors import FlowGRPOError

CLAMP = 5.0
EPS = 1e-4  # added to a standard deviation before dividing by it
Reward = Real[Tensor, " B"] | Real[Tensor, "B R"]  # one reward, or several
Weights = Float[Tensor, " R"] | Float[Tensor, "B R"]  # of several rewards, or those of each row
TotalReward = Real[Tensor, " B"]  # one reward, or the weighted sum of several
Group = Int[Tensor, " B"]  # of each row
GroupSize = Int[Tensor, " P"]  # the number of rows of each group
Advantage = Float[Tensor, " B"]
Method = Callable[[Tensor, Tensor], Tensor]


def group_advantages(
    reward: Reward,
    group: Int[Tensor, " B"],
    method: str | Method = "grpo",
    weights: Weights | None = None,
) -> Float[Tensor, " B"]:
    """Advantage of each of B images, clamped to +-5.

    Args:
        reward: finite. Of several rewards, all methods but `gdpo` take the weighted sum.
        group: which prompt a row belongs to; at least two rows each.
        method: one of `ADVANTAGES`, or the user's function: (reward (B,), group (B,)) -> (B,).
        weights: of several rewards, 1 each if not given; (B, R) for rows with weights of their own, equal within a group.

    Raises:
        FlowGRPOError: an unknown method, a group of one image (whose advantage would always be 0), a reward that is not
            finite, or a user's function that does not return B finite numbers.
    """
    if not callable(method) and method not in ADVANTAGES:
        raise FlowGRPOError(f"unknown advantage {method!r}; choose one of {', '.join(ADVANTAGES)}.")
    if not torch.isfinite(reward).all():
        raise FlowGRPOError("rewards must be finite numbers; one is NaN or infinite.")
    _, group, size = group.unique(return_inverse=True, return_counts=True)
    if (size < 2).any():
        raise FlowGRPOError("a group of one image has no advantage: sample at least two images per prompt.")
    if callable(method):
        advantage = _checked(method(weighted_sum(reward, weights), group), len(group))
    elif ADVANTAGES[method].each_reward:
        advantage = ADVANTAGES[method].function(reward.float().reshape(len(reward), -1), group, size, weights)
    else:
        advantage = ADVANTAGES[method].function(weighted_sum(reward, weights), group, size)
    return advantage.clamp(-CLAMP, CLAMP)


def compared_rewards(
    reward: Real[Tensor, "B R"], weights: Weights, method: str | Method = "grpo"
) -> tuple[Real[Tensor, "B K"], Float[Tensor, " K"] | Float[Tensor, "B K"]]:
    """The K rewards that groups are compared by, and their weights: the weighted sum alone, or with `gdpo` all R rewards."""
    if not _takes_each_reward(method):
        reward, weights = weighted_sum(reward, weights)[:, None], torch.ones(1)
    return reward, weights


def weighted_sum(reward: Reward, weights: Weights | None = None) -> Float[Tensor, " B"]:
    """The sum over rewards, by their weights."""
    if reward.ndim == 1:
        return reward.float()
    return reward.float().sum(1) if weights is None else (reward.float() * weights).sum(1)


def grpo(reward: TotalReward, group: Group, size: GroupSize) -> Advantage:
    """GRPO, arXiv 2402.03300."""
    centred = _centred(reward, group, size)
    return centred / (_group_mean(centred**2, group, size).sqrt() + EPS)


def batch_std(reward: TotalReward, group: Group, size: GroupSize) -> Advantage:
    """Flow-GRPO's "global std", arXiv 2505.05470: the mean of the group, the std of the whole batch."""
    return _centred(reward, group, size) / (reward.std(correction=0) + EPS)


def dr_grpo(reward: TotalReward, group: Group, size: GroupSize) -> Advantage:
    """Dr. GRPO, arXiv 2503.20783: no std, so easy and hard prompts weigh the same per unit of reward."""
    return _centred(reward, group, size)


def rloo(reward: TotalReward, group: Group, size: GroupSize) -> Advantage:
    """RLOO, arXiv 2402.14740: against the mean of the others of the group."""
    return _centred(reward, group, size) * (size / (size - 1))[group]


def reinforce_pp(reward: TotalReward, group: Group, size: GroupSize) -> Advantage:
    """REINFORCE++, arXiv 2501.03262: against the whole batch."""
    return (reward - reward.mean()) / (reward.std(correction=0) + EPS)


def rank(reward: TotalReward, group: Group, size: GroupSize) -> Advantage:
    """Ranks within the group mapped to [-1, 1], ties shared (pairwise preference, arXiv 2508.20751)."""
    same = group[:, None] == group[None, :]
    beaten = (same & (reward[:, None] > reward[None, :])).sum(1) - (same & (reward[:, None] < reward[None, :])).sum(1)
    return beaten / (size - 1)[group]


def gdpo(
    reward: Float[Tensor, "B R"],
    group: Int[Tensor, " B"],
    size: Int[Tensor, " P"],
    weights: Weights | None = None,
) -> Float[Tensor, " B"]:
    """GDPO, arXiv 2601.05242: each of R rewards normalised in its group, then their sum over the batch.

    A reward of small spread then counts as much as one of large spread, whatever their units.
    """
    total = weighted_sum(torch.stack([grpo(column, group, size) for column in reward.unbind(1)], 1), weights)
    return (total - total.mean()) / (total.std(correction=0) + EPS)


def shares(
    reward: Real[Tensor, "B R"], weights: Weights, group: Int[Tensor, " B"], method: str | Method = "grpo"
) -> tuple[Float[Tensor, " R"], Float[Tensor, "R R"]]:
    """The part of each of R rewards in the advantage: its share of it, and the correlations of the rewards.

    A share is the reward's contribution to the variance within groups, where each group counts as much as in the advantage. Shares sum
    to 1; one is below 0 if its reward works against the sum. Rewards without any spread have share 0 and correlation 0 with the
    others. For `rank`, whose parts do not add up, they are those of `grpo`; for a
    user's function, those of `dr_grpo`.
    """
    _, group, size = group.unique(return_inverse=True, return_counts=True)
    reward = reward.double()  # rewards that cancel each other do so to the last bit
    advantage_of = grpo if _takes_each_reward(method) else dr_grpo
    parts = torch.stack(
        [w * advantage_of(r, group, size) for r, w in zip(reward.unbind(1), weights.unbind(-1), strict=True)], 1
    )
    if method in ("grpo", "rank"):
        parts = parts / (_group_mean(parts.sum(1) ** 2, group, size).sqrt() + EPS)[:, None]
    products = parts.T @ parts
    spread = products.diagonal().sqrt()
    correlation = products / (spread[:, None] * spread[None, :]).clamp_min(1e-12)
    return (products.sum(1) / products.sum().clamp_min(1e-12)).float(), correlation.float()


def has_signal(reward: Reward, group: Int[Tensor, " B"], method: str | Method = "grpo") -> Bool[Tensor, " B"]:
    """The rows whose group has rewards that differ. The advantage of the others is 0.

    `reinforce_pp` and a user's function may compare with the whole batch, so there it is all rows or none.
    """
    if reward.ndim == 2:
        return torch.stack([has_signal(column, group, method) for column in reward.unbind(1)]).any(0)
    if callable(method) or ADVANTAGES[method].over_batch:
        group = torch.zeros_like(group)
    _, group = group.unique(return_inverse=True)
    empty = reward.new_zeros(int(group.max()) + 1)
    low, high = (empty.scatter_reduce(0, group, reward, kind, include_self=False) for kind in ("amin", "amax"))
    return (high > low)[group]


@dataclass(frozen=True)
class AdvantageMethod:
    """A row of `ADVANTAGES`.

    Attributes:
        function: (reward, group, size) -> advantage.
        over_batch: it compares with the whole batch, so that a group whose rewards are equal still has advantages that are not 0.
        each_reward: it takes several rewards one by one, not their weighted sum.
    """

    function: Callable[..., Tensor]
    over_batch: bool = False
    each_reward: bool = False


ADVANTAGES = {
    "grpo": AdvantageMethod(grpo),
    "batch_std": AdvantageMethod(batch_std),
    "dr_grpo": AdvantageMethod(dr_grpo),
    "rloo": AdvantageMethod(rloo),
    "reinforce_pp": AdvantageMethod(reinforce_pp, over_batch=True),
    "gdpo": AdvantageMethod(gdpo, each_reward=True),
    "rank": AdvantageMethod(rank),
}


def _takes_each_reward(method: str | Method) -> bool:
    """Whether several rewards are compared one by one, not by their weighted sum."""
    return not callable(method) and ADVANTAGES[method].each_reward


def _centred(reward: Tensor, group: Tensor, size: Tensor) -> Tensor:
    return reward - _group_mean(reward, group, size)


def _group_mean(value: Tensor, group: Tensor, size: Tensor) -> Tensor:
    """(B,): for each row the mean of its group, summed in float64: equal values are their own mean, to the last bit."""
    total = torch.zeros(len(size), dtype=torch.float64, device=value.device).index_add(0, group, value.double())
    return (total / size)[group].to(value.dtype)


def _checked(advantage: Any, rows: int) -> Float[Tensor, " B"]:
    with suppress(TypeError, ValueError):  # None, or a text
        advantage = torch.as_tensor(advantage, dtype=torch.float32)
        if advantage.shape == (rows,) and torch.isfinite(advantage).all():
            return advantage
    raise FlowGRPOError(f"the advantage function must return {rows} finite numbers, one for each image.")
