"""What a reward may return: one number for each image, as a tensor, an array, a list or a generator of numbers.

Also (numbers, details), of which the details are left out, and a coroutine of any of these, which is awaited.
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flow_grpo.errors import FlowGRPOError

LARGEST = 1e15  # of a value: squares and sums of larger ones leave float32
_own = threading.local()


def finished(returned: Any, graph: bool = False) -> Any:
    """Wait for a coroutine, read a generator, and bring a tensor to the CPU: what still runs the user's code.

    Args:
        graph: keep a tensor's graph.
    """
    if inspect.isawaitable(returned):
        returned = _awaited(returned)
    if isinstance(returned, Iterator):
        returned = list(returned)
    if isinstance(returned, Tensor):
        returned = returned.dequantize() if returned.is_quantized else returned
        returned = (returned if graph else returned.detach()).cpu()
    return returned


def as_values(name: str, returned: Any, count: int, kind: str) -> Tensor:
    """The values (count,) float32 in what a reward returned.

    Args:
        kind: "images" or "pairs of images".

    Raises:
        FlowGRPOError: it is not one number for each image, or one is too large.
    """
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned = returned[0]  # (scores, details), as in flow_grpo
    must = f"for {count} {kind}; it must return one number each"
    if problem := _no_numbers(returned):
        raise FlowGRPOError(f"reward {name} returned {problem[0]} {must}{problem[1]}")
    try:
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


def _no_numbers(returned: Any) -> tuple[str, str] | None:
    """What it is instead of numbers, and a hint; None if it may be numbers."""
    if returned is None:
        return "None", ": is a `return` missing?"
    if isinstance(returned, str | bytes):
        return "text", "."
    if inspect.isasyncgen(returned):
        return "an async generator", ": return a list."
    if isinstance(returned, Mapping):
        names = ", ".join(map(str, returned))
        return f"a dict with {names}"[:200], ": return one of its entries."
    if isinstance(returned, Tensor | np.ndarray):
        is_complex = returned.is_complex() if isinstance(returned, Tensor) else np.iscomplexobj(returned)
        return ("complex numbers", ": return their abs() or real.") if is_complex else None
    items = returned if isinstance(returned, list | tuple) else [returned]
    for what, types in (("None", type(None)), ("text", str | bytes), ("a dict", Mapping), ("complex numbers", complex)):
        if any(isinstance(item, types) for item in items):
            return f"a list with {what} in it", "."
    return None


def _awaited(awaitable: Awaitable) -> Any:
    """Run it in this thread's own event loop, which lives as long, so that a client can be kept between calls."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if not hasattr(_own, "loop"):
            _own.loop = asyncio.new_event_loop()
        return _own.loop.run_until_complete(_wait(awaitable))
    return _in_a_thread(awaitable)  # a notebook's cell: its thread runs a loop already


async def _wait(awaitable: Awaitable) -> Any:
    return await awaitable


def _in_a_thread(awaitable: Awaitable) -> Any:
    result: Future = Future()

    def run() -> None:
        try:
            result.set_result(asyncio.run(_wait(awaitable)))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result()
