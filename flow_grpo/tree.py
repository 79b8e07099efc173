"""A group as a tree (BranchGRPO, arXiv 2509.06040): its images share their start and each step up to where they part.

At each of the first trained steps every state splits into as many branches as `branches` says; their product is the number of images of
a group, so that each is a leaf of its own in the end. Images that share a state stand next to each other: where `sharing` images share
one, those of a group numbered k sharing to (k + 1) sharing - 1 do. The first of them is the state's leader.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flow_grpo.types import PromptBatch


def images_per_state(branches: Sequence[int], steps: int) -> list[int]:
    """How many images share a state before each of `steps` trained steps, and after the last one: steps + 1 numbers, falling to 1.

    Without branches each image is alone from the beginning.
    """
    split = [1, *accumulate(branches, lambda a, b: a * b)][: steps + 1]
    sizes = [prod(branches) // parts for parts in split]
    return sizes + [sizes[-1]] * (steps + 1 - len(sizes))


def state_leader(image: Int[Tensor, " B"], sharing: int) -> Int[Tensor, " B"]:
    """For each image the first one with the same state, both by their number in the group; `sharing` images share a state."""
    return image // sharing * sharing


def state_ids(batch: PromptBatch, branches: Sequence[int], steps: int) -> Int[Tensor, "B steps"]:
    """A number for the state of each row before each trained step: rows with the same number have the same state."""
    columns = [_state_ids(batch, sharing) for sharing in images_per_state(branches, steps)[:-1]]
    return torch.stack(columns, 1) if columns else batch.group.new_zeros(len(batch.group), 0)


def noise_batches(batch: PromptBatch, branches: Sequence[int], steps: int) -> list[PromptBatch]:
    """For each trained step the batch whose image numbers name the noise of that step: images on one branch have its leader's."""
    return [replace(batch, image=state_leader(batch.image, sharing)) for sharing in images_per_state(branches, steps)[1:]]


def branch_rewards(
    reward: Float[Tensor, "B *R"], batch: PromptBatch, branches: Sequence[int], steps: int
) -> list[Float[Tensor, "B *R"]]:
    """For each trained step the reward of the branch that each row takes there: the mean over the images of that branch.

    A branch of one image has its reward to the last bit.
    """
    rewards = []
    for sharing in images_per_state(branches, steps)[1:]:
        _, branch, size = _state_ids(batch, sharing).unique(return_inverse=True, return_counts=True)
        total = torch.zeros(len(size), *reward.shape[1:], dtype=torch.float64).index_add(0, branch, reward.double())
        rewards.append((total / size.reshape(-1, *[1] * (reward.ndim - 1)))[branch].to(reward.dtype))
    return rewards


def _state_ids(batch: PromptBatch, sharing: int) -> Int[Tensor, " B"]:
    """A number for each row that tells states apart across groups, where `sharing` images of a group share one."""
    group_stride = int(batch.image.max()) + 1
    return batch.group * group_stride + state_leader(batch.image, sharing)
