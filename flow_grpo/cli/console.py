"""The one console of all commands, and how an error ends them: with one sentence."""

import errno
import functools
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TextIO, TypeVar

from rich.console import Console

from flow_grpo.errors import PEER_LOST, TEMPORARY, USER_ERROR, FlowGRPOError, PeerLost, is_retryable
from flow_grpo.progress import replace_unprintable
from flow_grpo.text import escape_markup, visible

TRACEBACK = "FLOW_GRPO_TRACEBACK"  # environment variable, which other processes of a run inherit
RANK_ERROR_DELAY = 3.0  # seconds, within which the launcher ends the other ranks of a run in which one rank has failed
SHARED_ERROR_DELAY = 15.0  # the same for an error that the first rank is known to print
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
console = Console(emoji=False)  # else `:fire:` of a name or sentence becomes a picture
errors = Console(stderr=True, emoji=False)


class Output:
    """A standard stream that can fail without ending the work: nobody may read it any more, or it may be a file on a full disk.

    A file at the end of stdout that is not whole is an error all the same, since a command's result may be there.
    """

    def __init__(self, stream: TextIO | None, is_result: bool) -> None:
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115 - it was closed: `>&-`
        self._is_result = is_result

    def write(self, text: str) -> int:
        """Write, as far as somebody reads."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, as far as somebody reads."""
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            with suppress(OSError, ValueError):  # the rest of the buffers goes nowhere
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            if self._is_result and error.errno != errno.EPIPE:
                raise FlowGRPOError(f"the output could not be written: {error.strerror}.") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def prepare_streams() -> None:
    """Let no character, closed pipe or full disk at the other end of stdout and stderr end a command with a traceback.

    A descriptor of a standard stream that is closed becomes the null device, so that no file or socket gets its number.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    replace_unprintable()
    sys.stdout, sys.stderr = Output(sys.stdout, True), Output(sys.stderr, False)  # type: ignore[assignment]


def say(line: object) -> None:
    """Print one line without markup or wrapping, with control characters escaped."""
    console.print(visible(line), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection while modules and models are loaded, nor later of the objects that exist when it ends (gc.freeze).

    Each collection would look at all of these objects again, which takes a second and a half of a run of 40 seconds.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def without_library_messages(command: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function so that log lines and progress bars of other libraries are kept out of its output."""

    @functools.wraps(command)
    def quiet(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        from flow_grpo.policy.library_logging import quiet_libraries

        quiet_libraries()
        return command(*args, **options)

    return quiet


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print an error that the user can fix as one sentence, our own or of a path that can't be used, and exit.

    The status is USER_ERROR, or TEMPORARY if the same command may succeed later.
    Other errors are bugs, of ours or of a library, and keep their traceback.
    """
    try:
        yield
    except PeerLost as error:
        if error.prints_error:
            _print_error(str(error))
        sys.stdout.flush()
        os._exit(PEER_LOST)  # a normal exit would wait for the other process
    except (FlowGRPOError, OSError) as error:
        if not isinstance(error, FlowGRPOError) and error.filename is None:
            raise
        if os.environ.get(TRACEBACK) and not type(error).__name__.startswith("UserCode"):  # `guarded` prints theirs
            traceback.print_exception(error)
        fail(
            str(error), is_shared=getattr(error, "is_shared", False), status=TEMPORARY if is_retryable(error) else USER_ERROR
        )
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        fail("the device ran out of memory: set a smaller microbatch, or smaller images by height and width.")


def fail(message: str, is_shared: bool = False, status: int = USER_ERROR) -> None:
    """Print the error and exit. Ranks other than the first wait, so that an error of all ranks is printed once.

    Args:
        is_shared: all ranks are known to have it. A busy machine may take long to end the others.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(SHARED_ERROR_DELAY if is_shared else RANK_ERROR_DELAY)
    _print_error(message)
    sys.exit(status)


def _print_error(message: str) -> None:
    errors.print(f"[bold red]error[/bold red]: {escape_markup(' '.join(message.split()))}", highlight=False, soft_wrap=True)
