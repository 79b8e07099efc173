"""Copies of what a user's code is given, so that code that works in place changes nothing for others."""

import dataclasses
import functools
from typing import Any, TypeVar

import numpy as np
from PIL import Image
from torch import Tensor

Given = TypeVar("Given")


def copied(given: Given) -> Given:
    """A copy in which tensors, arrays, images, lists, dicts and dataclasses can be changed; gradients pass through it.

    Other objects are shared. An object that occurs twice is copied once, as the source image of a group's rows.
    """
    return _copied(given, {})


def is_ours(code: Any) -> bool:
    """Whether a reward is of this package, whose rewards leave their inputs unchanged, so that they need no copy."""
    code = code.func if isinstance(code, functools.partial) else code
    return (getattr(code, "__module__", None) or "").startswith("flow_grpo.rewards.")


def _copied(given: Any, known: dict[int, Any]) -> Any:
    if id(given) not in known:
        known[id(given)] = _new(given, known)
    return known[id(given)]


def _new(given: Any, known: dict[int, Any]) -> Any:
    if isinstance(given, Tensor):
        return given.clone()
    if isinstance(given, np.ndarray | Image.Image):
        return given.copy()
    if type(given) is dict:
        return {key: _copied(value, known) for key, value in given.items()}
    if type(given) in (list, tuple):
        return type(given)(_copied(value, known) for value in given)
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        fields = [field.name for field in dataclasses.fields(given) if field.init]
        return dataclasses.replace(given, **{name: _copied(getattr(given, name), known) for name in fields})
    return given
