"""Group-relative advantages: an image's reward against the other images of its prompt. No critic."""

import torch
from torch import Tensor

CLAMP = 5.0


def group_advantages(reward: Tensor, group: Tensor, method: str = "grpo", eps: float = 1e-4) -> Tensor:
    """Advantage of each of B images, (B,), clamped to +-5.

    Args:
        reward: (B,), finite.
        group: (B,) int64, which prompt a row belongs to; at least two rows each.
        method: one of `METHODS`.
        eps: added to a standard deviation before dividing by it.

    Raises:
        ValueError: an unknown method, a group of one image (whose advantage would always be 0), or a reward that is
            not finite.
    """
    if method not in METHODS:
        raise ValueError(f"unknown advantage {method!r}; choose one of {', '.join(METHODS)}.")
    if not torch.isfinite(reward).all():
        raise ValueError("rewards must be finite numbers; one is NaN or infinite.")
    _, group, size = group.unique(return_inverse=True, return_counts=True)
    if (size < 2).any():
        raise ValueError("a group of one image has no advantage: draw at least two images per prompt.")
    return METHODS[method](reward.float(), group, size, eps).clamp(-CLAMP, CLAMP)


def grpo(reward, group, size, eps):
    """GRPO, arXiv 2402.03300."""
    centred = _centred(reward, group, size)
    return centred / (_group_mean(centred**2, group, size).sqrt() + eps)


def batch_std(reward, group, size, eps):
    """Flow-GRPO's "global std", arXiv 2505.05470: the mean of the group, the std of the whole batch."""
    return _centred(reward, group, size) / (reward.std(correction=0) + eps)


def dr_grpo(reward, group, size, eps):
    """Dr. GRPO, arXiv 2503.20783: no std, so easy and hard prompts weigh the same per unit of reward."""
    return _centred(reward, group, size)


def rloo(reward, group, size, eps):
    """RLOO, arXiv 2402.14740: against the mean of the others of the group."""
    return _centred(reward, group, size) * (size / (size - 1))[group]


def reinforce_pp(reward, group, size, eps):
    """REINFORCE++, arXiv 2501.03262: against the whole batch."""
    return (reward - reward.mean()) / (reward.std(correction=0) + eps)


def rank(reward, group, size, eps):
    """Ranks within the group mapped to [-1, 1], ties shared (pairwise preference, arXiv 2508.20751)."""
    same = group[:, None] == group[None, :]
    beaten = (same & (reward[:, None] > reward[None, :])).sum(1) - (same & (reward[:, None] < reward[None, :])).sum(1)
    return beaten / (size - 1)[group]


def has_signal(reward: Tensor, group: Tensor, method: str = "grpo") -> Tensor:
    """(B,) bool: the rows whose group has rewards that differ. The others have advantage 0, and updates leave them out.

    `reinforce_pp` compares with the whole batch, so there it is all rows or none.
    """
    if method == "reinforce_pp":
        group = torch.zeros_like(group)
    _, group = group.unique(return_inverse=True)
    limit = reward.new_full((int(group.max()) + 1,), torch.inf)
    high = (-limit).scatter_reduce(0, group, reward, "amax")
    low = limit.scatter_reduce(0, group, reward, "amin")
    return (high > low)[group]


METHODS = {
    "grpo": grpo,
    "batch_std": batch_std,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "rank": rank,
}


def _centred(reward: Tensor, group: Tensor, size: Tensor) -> Tensor:
    return reward - _group_mean(reward, group, size)


def _group_mean(value: Tensor, group: Tensor, size: Tensor) -> Tensor:
    """(B,): for each row the mean of its group."""
    return (value.new_zeros(len(size)).index_add(0, group, value) / size)[group]
