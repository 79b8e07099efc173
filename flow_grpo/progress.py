"""The phase that a command is in, said when it takes long: loading the model, drawing held-out images, scoring them.

Code that may take long works within `phase(...)`; a command that wants its phases said runs within `show_phases(console)`. A phase that
lasts for 2 seconds is said, and again every 10 seconds with how much of it is done.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console

PATIENCE, INTERVAL = 2.0, 10.0  # seconds until a phase is said, and until it is said again


@dataclass
class Phase:
    """`done` of `total` units of work, or work that can't be counted."""

    name: str
    total: int | None = None
    done: int = 0
    started: float = field(default_factory=time.monotonic)
    due: float = field(default_factory=lambda: time.monotonic() + PATIENCE)

    def advance(self, count: int = 1) -> None:
        self.done += count

    def line(self, now: float) -> str:
        share = "" if self.total is None else f" {self.done} of {self.total},"
        return f"{self.name}:{share} {now - self.started:.0f} s"


_phases: list[Phase] = []  # those that are open, the innermost last
_reporting = threading.Lock()


@contextmanager
def phase(name: str, total: int | None = None) -> Iterator[Phase]:
    """Names what is done within it. Call `advance` of what it gives, if there is something to count."""
    one = Phase(name, total)
    _phases.append(one)
    try:
        yield one
    finally:
        _phases.remove(one)
        for outer in _phases:  # which has just been seen to go on
            outer.due = max(outer.due, time.monotonic() + PATIENCE)


def due_line(now: float) -> str | None:
    """The line to say now, or None."""
    innermost = _phases[-1] if _phases else None
    if innermost is None or now < innermost.due:
        return None
    innermost.due = now + INTERVAL
    return innermost.line(now)


@contextmanager
def show_phases(console: Console) -> Iterator[None]:
    """Says the phases within it on that console. The outermost of several such contexts does it."""
    if not _reporting.acquire(blocking=False):
        yield
        return
    end = threading.Event()

    def watch() -> None:
        while not end.wait(0.2):
            line = due_line(time.monotonic())
            if line is not None:
                console.print(line, highlight=False, markup=False, soft_wrap=True)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        end.set()
        watcher.join()
        _reporting.release()
