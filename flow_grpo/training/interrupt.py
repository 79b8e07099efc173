"""Ctrl-C and SIGTERM ask a run to stop; a second Ctrl-C ends the process at once.

A second process watches, and ends one that does not answer. The command line imports this file before it parses the command, so
nothing large is imported here at the top.
"""

import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import _exit  # the real one, also while a reward runs, whose own os._exit is refused
from typing import Any

from flow_grpo.errors import INTERRUPTED

DEBOUNCE = 0.5  # seconds within which two signals are one: `timeout`, for example, sends each twice
KILL_AFTER = {signal.SIGINT: 1.0, signal.SIGTERM: 60.0}  # seconds until a process that does not answer is killed
ANSWER = b"\0"
SHOW_CURSOR = b"\x1b[?25h"


def exit_on_second_interrupt(first: Callable[[], None]) -> Any:
    """Call `first` at the next Ctrl-C and end the process at the one after; return the former handler."""
    began = math.inf

    def handler(number: int, frame: Any) -> None:
        nonlocal began
        if began == math.inf:
            began = time.monotonic()
            first()
        elif time.monotonic() - began > DEBOUNCE:
            exit_now()

    return signal.signal(signal.SIGINT, handler)


def exit_now() -> None:
    """End the process here and now, with its terminal as it was before."""
    for stream in (1, 2):
        if os.isatty(stream):
            os.write(stream, SHOW_CURSOR + b"\n")
    _exit(INTERRUPTED)


def exit_if_busy(code: int) -> None:
    """End the process with this status if a reward is still within a call, which nobody waits for; else return."""
    loaded = sys.modules.get("flow_grpo.rewards.interrupt")
    if loaded is not None and loaded.DaemonThread.any_busy():
        sys.stdout.flush()
        sys.stderr.flush()
        _exit(code)


def start() -> None:
    """Start a process that kills this one when Python cannot run its signal handlers: at the second Ctrl-C, or after SIGTERM in a run.

    A call that never gives the interpreter back, such as a regular expression that backtracks for years, keeps all handlers from
    running. What python does at once is to write the signal's number to a pipe; the other process reads it.
    """
    if not hasattr(os, "fork"):
        return
    read_end, write_end = os.pipe()
    process = os.getpid()
    if os.fork():
        os.close(read_end)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        return
    try:
        os.close(write_end)
        os.setsid()  # Ctrl-C is not for this one
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        if _unanswered(read_end, KILL_AFTER) and os.getppid() == process:
            os.kill(process, signal.SIGKILL)
    finally:
        _exit(0)


def acknowledge() -> None:
    """Tell the watchdog that this process handles SIGTERM. No-op in launched ranks, which their launcher kills."""
    if "RANK" in os.environ:
        return
    write_end = signal.set_wakeup_fd(-1)
    if write_end >= 0:
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        with suppress(OSError):  # the watchdog itself is gone
            os.write(write_end, ANSWER)


def _unanswered(read_end: int, patience: dict[signal.Signals, float]) -> bool:
    """Return True once a deadline passes without an answer, False if the process has exited."""
    deadline = _Deadline(patience)
    while True:
        timeout = None if deadline.time == math.inf else max(0.0, deadline.time - time.monotonic())
        if not select.select([read_end], [], [], timeout)[0]:
            return True
        numbers, now = os.read(read_end, 64), time.monotonic()
        if not numbers:
            return False
        for number in numbers:
            deadline.update(number, now)


class _Deadline:
    """When the watched process must have answered: after SIGTERM if it handles that signal, and after the second SIGINT.

    Attributes:
        time: seconds of the monotonic clock; infinity while no answer is due.
    """

    def __init__(self, patience: dict[signal.Signals, float]) -> None:
        self.patience = patience
        self.time = self._first_interrupt = math.inf
        self._answers = False

    def update(self, number: int, now: float) -> None:
        """Take the number of a signal, or an answer, that came at the time `now`."""
        if number == ANSWER[0]:
            self.time, self._answers = math.inf, True
        elif number == signal.SIGTERM and self._answers:
            self.time = min(self.time, now + self.patience[signal.SIGTERM])
        elif number == signal.SIGINT and now - self._first_interrupt > DEBOUNCE:
            self.time = min(self.time, now + self.patience[signal.SIGINT])
        elif number == signal.SIGINT:
            self._first_interrupt = min(self._first_interrupt, now)


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
