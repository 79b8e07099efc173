"""Which rewards an image is scored by, where its prompt names them: the metadata column `rewards`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flow_grpo.errors import FlowGRPOError

COLUMN = "rewards"


def row_weights(column: list | None, weights: dict[str, float], names: dict[str, str]) -> Tensor | None:
    """The weight (B, R) of each of R trained rewards for each of B images, 0 where it does not score the image; None for all images alike.

    Args:
        column: for each image its rewards: a list of names, a text with commas, or weights by name (None is the reward's own weight).
            None in place of all that means all rewards.
        weights: the rewards' own weights by name.
        names: the rewards by the names that a prompt may give them.

    Raises:
        FlowGRPOError: a prompt names a reward that is not there, or none that has a weight.
    """
    if column is None or not weights or all(entry is None for entry in column):
        return None
    return torch.tensor([list(_weights_of(entry, weights, names).values()) for entry in column])


def _weights_of(entry: Any, weights: dict[str, float], names: dict[str, str]) -> dict[str, float]:
    if entry is None:
        return weights
    selected = dict.fromkeys(weights, 0.0)
    for name, weight in named(entry).items():
        if name not in names:
            raise FlowGRPOError(
                f"a prompt names the reward {name}, but the run has {', '.join(names)}: add it to `rewards`."
            )
        if names[name] in weights:
            selected[names[name]] = weights[names[name]] if weight is None else weight
    if not any(selected.values()):
        raise FlowGRPOError(f"a prompt names no reward to train on, but {entry!r}: name one of {', '.join(weights)}.")
    return selected


def named(entry: Any) -> dict[str, float | None]:
    """The rewards that an entry of the column names, and their weights if it has any. FlowGRPOError if it is not such an entry."""
    if isinstance(entry, str):
        return {name.strip(): None for name in entry.split(",")}
    if isinstance(entry, dict):
        return entry
    if isinstance(entry, Iterable) and all(isinstance(name, str) for name in entry):
        return dict.fromkeys(entry)
    raise FlowGRPOError(f"the column `{COLUMN}` names the rewards of a prompt, so {entry!r} is no entry of it: give names.")


def names_reward(entry: Any, name: str) -> bool:
    """Whether an entry of the column includes the reward of that name. FlowGRPOError as of `named`."""
    return entry is None or name in named(entry)
