"""Stop a run by Ctrl-C or SIGTERM: at the next forward pass or while it waits for rewards."""

import concurrent.futures
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from flow_grpo.training.watchdog import acknowledge, exit_on_second_interrupt

if TYPE_CHECKING:
    from torch import Tensor

    from flow_grpo.rewards.interrupt import DaemonThread

Result = TypeVar("Result")
POLL = 0.2  # seconds between two looks at whether a wait is to end


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


def wait_for(future: "Future[Result]", should_stop: Callable[[], bool]) -> Result:
    """Return the future's result. `Interrupted` if `should_stop` says so before there is one."""
    while not concurrent.futures.wait([future], POLL).done:
        if should_stop():
            raise Interrupted
    return future.result()


@contextmanager
def background(should_stop: Callable[[], bool]) -> "Iterator[DaemonThread]":
    """Open a thread for calls that may hang, and leave it when it is idle, or at once if the run is interrupted."""
    from flow_grpo.rewards.interrupt import DaemonThread

    thread = DaemonThread()
    try:
        yield thread
    except (Interrupted, KeyboardInterrupt):
        thread.close()
        raise
    except BaseException:
        wait_for(thread.close(), should_stop)  # no reward is called twice at a time
        raise
    wait_for(thread.close(), should_stop)


def call_interruptibly(function: Callable[[], Result], should_stop: Callable[[], bool]) -> Result:
    """Call a function that may hang, in a thread, and return its result. Raises `Interrupted` like `wait_for`."""
    with background(should_stop) as thread:
        return wait_for(thread.submit(function), should_stop)


def interruptible(velocity: "Callable[..., Tensor]", should_stop: Callable[[], bool]) -> "Callable[..., Tensor]":
    """Return the velocity function, which raises `Interrupted` if `should_stop` says so before a forward pass."""

    def checked_velocity(*args: Any) -> "Tensor":
        if should_stop():
            raise Interrupted
        return velocity(*args)

    return checked_velocity


@contextmanager
def handle_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at Ctrl-C and SIGTERM, within the context. The second Ctrl-C ends a command at once.

    In a notebook or a script of the user's own, where Ctrl-C is a KeyboardInterrupt, the second one is that.
    """
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, signal.default_int_handler)
        stop()

    def terminate(number: int, frame: Any) -> None:
        acknowledge()
        stop()

    try:
        former = {
            signal.SIGINT: signal.signal(signal.SIGINT, interrupt) if own else exit_on_second_interrupt(stop),
            signal.SIGTERM: signal.signal(signal.SIGTERM, terminate),
        }
        acknowledge()
    except ValueError:  # not the main thread: whoever runs us there handles signals
        former = {}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
