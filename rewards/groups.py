"""Rewards that see more than one image: the images of a group together, or two of them at a time.

A reward says so by its attribute `scope`: `image` (the default), `group` or `pair`. `rewards.load(name, scope=...)` sets it from outside.

    group: `reward(images, prompts, **metadata)` gets the images of one group (G, 3, H, W), their prompt G times, and returns G values.
    pair:  `reward(first, second, prompts, **metadata)` gets n pairs, two times (n, 3, H, W), and returns for each the probability, or
           0 or 1, that the first image is better. An image's value is its win rate within its group (Pref-GRPO, arXiv 2508.20751).
           Each pair is asked in both orders, unless the reward has the attribute `symmetric = True`.
"""

import inspect
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.frames import Frames, checked_frames, frames_of

IMAGE, GROUP, PAIR = SCOPES = ("image", "group", "pair")
PAIRS_PER_CALL = 32  # that a pair reward gets at a time, since they are copies of the images
ATTRIBUTES = (
    "scope",
    "symmetric",
    "opponents",
    "costly",
    "frames",
    "differentiable",
)  # of a reward, that say how it is called


class Scoped:
    """A reward whose scope, opponents or frames of a video are set from outside; it keeps its other attributes.

    Args:
        reward: called as its new scope says; for `pair` its method `compare`, if it has one.
        opponents: for `pair`: see `pairs_of`; by default the reward's own attribute.
        frames: of a video, see `rewards.frames`.

    Raises:
        FlowGRPOError: there is no such scope or choice of frames, or `opponents` is for another scope.
    """

    def __init__(
        self, reward: Any, scope: str | None = None, opponents: int | None = None, frames: Frames | None = None
    ) -> None:
        self.scope = scope_of(reward) if scope is None else _known(scope)
        self.frames = frames_of(reward) if frames is None else checked_frames(frames)
        self.costly, self.symmetric = getattr(reward, "costly", False), getattr(reward, "symmetric", False)
        self.differentiable = getattr(reward, "differentiable", False)
        if opponents is not None and (self.scope != PAIR or opponents < 1):
            raise FlowGRPOError(
                f"opponents={opponents} is for a reward of scope pair, and at least 1: set scope=pair, or leave it out."
            )
        self.opponents = getattr(reward, "opponents", None) if opponents is None and self.scope == PAIR else opponents
        if hasattr(reward, "score_groups") and opponents is None and self.scope == scope_of(reward):
            self.score_groups = reward.score_groups
        self._call = getattr(reward, "compare", reward) if scope == PAIR else reward
        self.__module__ = getattr(self._call, "__module__", "")  # whose code it is
        self.__signature__ = signature(self._call)

    def __call__(self, *inputs: Any, **metadata: Any) -> Any:
        return self._call(*inputs, **metadata)


def scope_of(reward: Any) -> str:
    """`image`, `group` or `pair`. FlowGRPOError if the reward's attribute `scope` is another text."""
    scope = getattr(reward, "scope", IMAGE)
    return _known(scope) if isinstance(scope, str) else IMAGE


def _known(scope: str) -> str:
    if scope not in SCOPES:
        raise FlowGRPOError(f"scope={scope} of a reward is none of {', '.join(SCOPES)}: set one of them.")
    return scope


def with_attributes_of(reward: Any, call: Any) -> Any:
    """The function `call`, which calls the reward, with the reward's attributes, among them whose code it is."""
    call.__module__ = getattr(reward, "__module__", "")
    for name in ATTRIBUTES:
        if hasattr(reward, name):
            setattr(call, name, getattr(reward, name))
    return call


def rows_by_group(group: Sequence[Hashable]) -> list[list[int]]:
    """The rows of each group, in the order of their first rows."""
    rows: dict[Hashable, list[int]] = {}
    for row, number in enumerate(group):
        rows.setdefault(number, []).append(row)
    return list(rows.values())


def pairs_of(rows: list[int], opponents: int | None = None) -> list[tuple[int, int]]:
    """The pairs of a group's rows that are compared: all, or enough for each image to be compared with about `opponents` others.

    With `opponents`, image i meets i + 1, i + 2, ... around a ring, and so those before it: all images meet equally many, an even
    number of at least `opponents`. Nothing is random here: the images of a group are independent samples, so their order is random already.
    """
    size = len(rows)
    shifts = size if opponents is None else -(-opponents // 2)
    if 2 * shifts >= size - 1:
        return [(rows[i], rows[j]) for i in range(size) for j in range(i + 1, size)]
    return [(rows[i], rows[(i + shift) % size]) for shift in range(1, shifts + 1) for i in range(size)]


def win_rates(size: int, pairs: list[tuple[int, int]], first_wins: Tensor) -> Tensor:
    """Values (size,) in [0, 1] of images: the share of its opponents that each beats; a tie, 0.5, is half a win.

    Args:
        first_wins: (n,) of the pairs; a probability counts as such, so that the value is the expected share.
    """
    rows = torch.tensor(pairs)
    wins = torch.zeros(size).index_add(0, rows[:, 0], first_wins).index_add(0, rows[:, 1], 1 - first_wins)
    return wins / torch.bincount(rows.flatten(), minlength=size)


def signature(reward: Any) -> inspect.Signature:
    """What a reward takes; of a module without a `__call__` of its own, its `forward`."""
    is_plain_module = isinstance(reward, torch.nn.Module) and type(reward).__call__ is torch.nn.Module.__call__
    return inspect.signature(reward.forward if is_plain_module else reward)
