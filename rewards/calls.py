"""A call of a reward: what it is given, copied so that nobody else sees what it changes, and what it may return.

A reward returns one number for each image, as a tensor, an array, a list or a generator of numbers. Also (numbers, details), of which the
details are left out, and a coroutine of any of these, which is awaited.
"""

import asyncio
import dataclasses
import functools
import inspect
import os
import threading
from collections.abc import Awaitable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.interrupt import in_thread
from flow_grpo.rewards.scopes import signature

ROWS = "metadata"  # a parameter that gets the metadata as one dict for each image
TEXTS = ("prompt", "prompts", "completion", "completions")
FORMS = {2: "(images, prompts, **metadata)", 3: "(first, second, prompts, **metadata)"}  # by the number of inputs
LARGEST = 1e15  # of a value: squares and sums of larger ones leave float32
_turn = threading.Lock()  # held by the thread that runs the loop of `_loop`, while others wait
Given = TypeVar("Given")


def accepted_metadata(reward: Any, metadata: dict[str, Any], inputs: int) -> dict[str, Any]:
    """The metadata that the reward's signature names after its first `inputs` parameters; all of it if the signature has **kwargs."""
    parameters = signature(reward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return metadata
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:inputs]
    named = {p.name for p in parameters} - set(positional)
    return {key: value for key, value in metadata.items() if key in named}


def named_columns(reward: Any) -> list[str] | None:
    """The metadata that a reward may be given, by its parameters; None for any."""
    parameters = signature(reward).parameters.values()
    takes_any = takes_rows(reward) or any(p.kind is p.VAR_KEYWORD for p in parameters)
    return None if takes_any else [p.name for p in parameters]


def takes_rows(reward: Any) -> bool:
    """Whether a reward has a parameter `metadata` (not **metadata), as those of flow_grpo and ddpo-pytorch."""
    parameter = signature(reward).parameters.get(ROWS)
    return parameter is not None and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def check_inputs(name: str, reward: Any, inputs: int = 2) -> None:
    """Check that a reward can be called with images and prompts. FlowGRPOError with the parameters that it has."""
    takes = signature(reward)
    must = f"reward {name} takes {takes}, but it must take {FORMS[inputs]}"
    try:
        takes.bind_partial(*range(inputs))
    except TypeError:
        raise FlowGRPOError(f"{must}.") from None
    if next(iter(takes.parameters)) in TEXTS:
        raise FlowGRPOError(f"{must}: images come first, then prompts.")


def check_metadata(name: str, reward: Any, metadata: dict[str, Any], inputs: int) -> None:
    """Check that the prompts have all columns that the reward needs. FlowGRPOError with the first one that is missing."""
    positional = signature(reward).bind_partial(*range(inputs)).arguments
    parameters = signature(reward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = next((p.name for p in needed if p.name not in positional and p.name not in metadata), None)
    if missing is not None:
        raise FlowGRPOError(
            f"reward {name} needs {missing}, but the prompts have no column {missing}: give a file of prompts with this column, "
            "or a value among the reward's options."
        )


def finished(returned: Any, graph: bool = False) -> Any:
    """Wait for a coroutine, read a generator, and bring a tensor to the CPU: what still runs the user's code.

    Args:
        graph: keep a tensor's graph.
    """
    if inspect.isawaitable(returned):
        returned = _awaited(returned)
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned = returned[0]  # (scores, details), as in flow_grpo
    if isinstance(returned, Iterator):
        returned = list(returned)
    if isinstance(returned, Tensor):
        returned = (returned if graph else returned.detach()).cpu()
    elif hasattr(returned, "__array__"):
        returned = np.array(returned)  # of a column of a data frame, and of a reversed array, which torch does not read
    return returned


def as_values(name: str, returned: Any, count: int, kind: str) -> Tensor:
    """The values (count,) float32 in what a reward returned, as `finished` has left it.

    Args:
        kind: "images" or "pairs of images".

    Raises:
        FlowGRPOError: it is not one number for each image, or one is too large.
    """
    must = f"for {count} {kind}; it must return one number each"
    if returned is None:
        raise FlowGRPOError(f"reward {name} returned None {must}: is a `return` missing?")
    if isinstance(returned, Mapping):
        what = f"a dict with {', '.join(map(str, returned))}"[:200]
        raise FlowGRPOError(f"reward {name} returned {what} {must}: return one of its entries.")
    try:
        if torch.as_tensor(returned).is_complex():
            raise TypeError("they are complex; return their abs() or real")
        values = torch.as_tensor(returned, dtype=torch.float64)
        values = values if values.layout is torch.strided else values.to_dense()
    except Exception as error:  # the object's own conversion may raise anything
        what, reason = f"a {type(returned).__name__} that can't be read as numbers", " ".join(str(error).split()).rstrip(".")
        raise FlowGRPOError(f"reward {name} returned {what} {must}: {reason}.") from error
    if values.shape != (count,):
        over_all = values.shape == () and kind == "images"
        hint = ": average over the pixels, as images.mean((1, 2, 3)) does, and not over the batch" if over_all else ""
        raise FlowGRPOError(f"reward {name} returned shape {tuple(values.shape)} {must}{hint}.")
    large = values[values.isfinite() & (values.abs() > LARGEST)]
    if len(large):
        limit = f"values beyond {LARGEST:g} can't be compared in float32"
        raise FlowGRPOError(f"reward {name} returned {large[0].item():g}, and {limit}: scale them.")
    return values.float()


def _awaited(awaitable: Awaitable) -> Any:
    """Run it in one event loop for all calls, whichever thread makes them, so that a client can be kept between calls."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with _turn:
            return _loop(os.getpid()).run_until_complete(awaitable)
    return in_thread(functools.partial(_awaited, awaitable)).result()  # a notebook's cell: its thread runs a loop already


@functools.cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of a process; a forked process needs its own."""
    return asyncio.new_event_loop()


def copied(given: Given) -> Given:
    """A copy in which tensors, arrays, images, lists, dicts and dataclasses can be changed; gradients pass through it.

    Other objects are shared. An object that occurs twice is copied once, as the source image of a group's rows.
    """
    return _copied(given, {})


def is_ours(code: Any) -> bool:
    """Whether a reward is of this package, whose rewards leave their inputs unchanged, so that they need no copy."""
    code = code.func if isinstance(code, functools.partial) else code
    return (getattr(code, "__module__", None) or "").startswith("flow_grpo.rewards.")


def is_concurrent(reward: Any) -> bool:
    """Whether several threads may call a reward, or its method, at a time: it only asks other machines."""
    method = reward.func if isinstance(reward, functools.partial) else reward
    return getattr(getattr(method, "__self__", method), "concurrent", False) is True


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
