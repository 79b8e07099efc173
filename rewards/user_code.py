"""Run code that a user wrote, such as a reward, without letting it end the run or change global settings unnoticed.

What the code raises, `sys.exit` included, becomes a `UserCodeError`: one sentence with the file, the line and its source.
Global settings that it changes (see `SETTINGS`) are restored, with one warning on stderr for each. Random numbers that it draws from
the global generators of torch, numpy and random come from separate streams.

Not caught: `os._exit` and native code that exits or crashes. A reward with `isolate: true` only ends its own subprocess then, which is
reported.
"""

import gc
import linecache
import os
import random
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from flow_grpo import user_files
from flow_grpo.errors import FlowGRPOError

TRACEBACK = "FLOW_GRPO_TRACEBACK"  # environment variable: print full tracebacks
KNOWN = "an error"  # the name of a FlowGRPOError in a sentence: its text is a sentence already
LONGEST_LINE = 120  # characters of a source line that are shown
LIBRARIES = {"site-packages", "dist-packages"}  # files in such folders are not the user's
OWN_PACKAGES = {"rewards", "flow_grpo"}


# global settings of a process: getter and setter
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device, torch.set_default_device),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.use_deterministic_algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "torch's float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    **{
        f"torch.backends.cudnn.{name}": (
            partial(getattr, torch.backends.cudnn, name),
            partial(setattr, torch.backends.cudnn, name),
        )
        for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
    },
    "Python's garbage collector": (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    "the working directory": (os.getcwd, os.chdir),
}
changed: dict[str, list[str]] = {}  # settings that the code of a name has changed
_streams: dict[str, tuple] = {}  # states of the global generators for the code of a name


class UserCodeError(FlowGRPOError):
    """An exception of a user's code as one sentence; the exception is the cause."""


class UserCodeMemoryError(UserCodeError, torch.OutOfMemoryError):
    """The device had no memory left for a user's code, so that a training step is worth repeating with less at a time."""


@contextmanager
def guarded(name: str, sentence: Callable[[str], str]) -> Iterator[None]:
    """Context in which a user's code runs.

    Args:
        name: what the code is, for example "reward redness".
        sentence: returns the beginning of the error message, given the name of the exception's class, or `KNOWN`.

    Raises:
        UserCodeError: the code raised anything but the KeyboardInterrupt of Ctrl-C. It is a UserCodeMemoryError if memory ran out.
    """
    with one_sentence(sentence), _settings_kept(name), _own_random_numbers(name):
        yield


# -- what it raises ---------------------------------------------------------------------------------------------------


@contextmanager
def one_sentence(sentence: Callable[[str], str]) -> Iterator[None]:
    """The part of `guarded` that several threads may enter at a time: an exception becomes a UserCodeError."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C arrives only there
        if os.environ.get(TRACEBACK):
            traceback.print_exception(error)
        reason = _text(error)
        kind = UserCodeMemoryError if isinstance(error, torch.OutOfMemoryError) else UserCodeError
        name = KNOWN if isinstance(error, FlowGRPOError) else type(error).__name__
        raise kind(f"{sentence(name)}: {reason}{_location(error)}") from error


def _text(error: BaseException) -> str:
    try:
        return " ".join(str(error).split()) or "no message"
    except Exception as second:  # its own __str__ raised
        return f"its text raised {type(second).__name__}"


def _location(error: BaseException) -> str:
    """The innermost line of the traceback that is not in a library; "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return _format_location(error.filename, error.lineno or 1, "<module>")
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_users(frame)]
    if not frames:
        return ""
    code, line = frames[-1]
    return _format_location(code.co_filename, line, getattr(code, "co_qualname", code.co_name))


def _is_users(frame: FrameType) -> bool:
    module, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
    if module.startswith(f"{user_files.__name__}."):
        return True
    return module.partition(".")[0] not in OWN_PACKAGES | sys.stdlib_module_names and not LIBRARIES & set(Path(file).parts)


def _format_location(file: str, line: int, function: str) -> str:
    """Format a source line: ` (my_reward.py:7 in redness: `x = metadata["oops"]`)`, the path relative to the working directory."""
    source = linecache.getline(file, line).strip()
    location = f"{file.removeprefix(f'{_read(os.getcwd)}{os.sep}')}:{line}" + (
        "" if function == "<module>" else f" in {function}"
    )
    return f" ({location}: `{source[:LONGEST_LINE]}`)" if source else f" ({location})"


# -- what it changes --------------------------------------------------------------------------------------------------


@contextmanager
def _settings_kept(name: str) -> Iterator[None]:
    before = {what: _read(get) for what, (get, _) in SETTINGS.items()}
    try:
        yield
    finally:
        for what, (get, put) in SETTINGS.items():
            now = _read(get)
            if before[what] is not None and now != before[what]:
                put(before[what])
                _warn(name, what, f"from {before[what]} to {now}")


def _read(get: Callable[[], Any]) -> Any:
    """Read a setting; None if that fails: a deleted working directory, or a precision set by both APIs of torch."""
    try:
        return get()
    except (OSError, RuntimeError):
        return None


def _warn(name: str, what: str, how: str) -> None:
    """Warn once for each setting, on the main process only."""
    known = changed.setdefault(name, [])
    if what not in known:
        known.append(what)
        if os.environ.get("RANK", "0") == "0":
            print(
                f"warning: {name} changed {what} {how} for the whole process; it was set back.", file=sys.stderr, flush=True
            )


@contextmanager
def _own_random_numbers(name: str) -> Iterator[None]:
    """Give the code its own random streams, which continue where its last call left them; it can seed only these."""
    outside: tuple[Any, Any, Any] = torch.get_rng_state(), np.random.get_state(), random.getstate()
    if name in _streams:
        _set_random_state(_streams[name])
    else:
        numbers = outside[0].numpy().tobytes() + outside[1][1].tobytes() + str(outside[2]).encode()
        seed = zlib.crc32(name.encode() + numbers)
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        _streams[name] = torch.get_rng_state(), np.random.get_state(), random.getstate()
        _set_random_state(outside)


def _set_random_state(state: tuple[torch.Tensor, Any, Any]) -> None:
    torch_state, numpy_state, python_state = state
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)
    random.setstate(python_state)
