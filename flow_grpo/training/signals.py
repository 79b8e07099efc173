"""Ctrl-C and SIGTERM ask a run to stop; a second Ctrl-C ends the process at once.

Python runs a handler only between two of its own instructions: a call that never gives the interpreter back, such as a regular expression
that backtracks for years, is ended by Ctrl-\\ or kill -9. The command line imports this file before it parses the command, so nothing
large is imported here at the top.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import _exit
from typing import Any

from flow_grpo.errors import INTERRUPTED

DEBOUNCE = 0.5  # seconds within which two signals are one: `timeout`, for example, sends each twice
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
    loaded = sys.modules.get("flow_grpo.rewards.threads")
    if loaded is not None and loaded.DaemonThread.any_busy():
        sys.stdout.flush()
        sys.stderr.flush()
        _exit(code)


@contextmanager
def handle_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at Ctrl-C, SIGTERM and the end of the terminal, within the context. The second Ctrl-C ends a command at once.

    In a notebook or a script of the user's own, where Ctrl-C is a KeyboardInterrupt, the second Ctrl-C raises KeyboardInterrupt.
    """
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, signal.default_int_handler)
        stop()

    try:
        previous = {
            signal.SIGINT: signal.signal(signal.SIGINT, interrupt) if own else exit_on_second_interrupt(stop),
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: stop()),
        }
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # a closed terminal; `nohup` ignores it
            previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda number, frame: stop())
    except ValueError:  # not the main thread: whoever runs us there handles signals
        previous = {}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
