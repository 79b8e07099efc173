"""Messages for slow phases of a command: loading the model, generating held-out images, scoring them.

Slow code runs within `phase(...)`, and a command that shows its phases within `show_phases(console)`. A phase is shown once it has
lasted 2 seconds, and then every 10 seconds with the share that is done. Of nested phases the innermost is shown, or one around it that
has advanced while its inner phases were too short to be shown.
"""

import io
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console

PATIENCE, INTERVAL = 2.0, 10.0  # seconds until a phase is shown, and until it is shown again


@dataclass
class Phase:
    """Work of which `done` of `total` units are done, named by `unit`; `total` is None if it can't be counted."""

    name: str
    total: int | None = None
    unit: str = ""
    done: int = 0
    shown: int | None = None  # what of it was done when it was last shown, if it ever was
    started: float = field(default_factory=lambda: time.monotonic())
    due: float = field(default_factory=lambda: time.monotonic() + PATIENCE)

    def advance(self, count: int = 1) -> None:
        """Count finished items."""
        self.done += count

    def is_due(self, now: float, is_innermost: bool) -> bool:
        """Whether to show it at this time."""
        return now >= self.due and (is_innermost or self.done != (self.shown or 0))

    def line(self, now: float) -> str:
        """The phase as a line of text at a time in seconds."""
        share = "" if self.total is None else f" {self.done} of {self.total}{self.unit and ' '}{self.unit},"
        return f"{self.name}:{share} {now - self.started:.0f} s"


def replace_unprintable() -> None:
    """From here on, characters that a terminal or a log can't show are replaced: they are no reason to end a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "replace":
            stream.reconfigure(errors="replace")


_phases: list[Phase] = []  # the open phases, the innermost last
_reporting = threading.Lock()


@contextmanager
def phase(name: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
    """Names the work within the block. Call `advance` of the yielded phase to count finished units."""
    current = Phase(name, total, unit)
    _phases.append(current)
    try:
        yield current
    finally:
        _phases.remove(current)
        if current.shown is not None:
            for outer in _phases:
                outer.due = max(outer.due, time.monotonic() + PATIENCE)


def due_line(now: float) -> str | None:
    """The line to show now, or None."""
    for depth, current in enumerate(reversed(_phases)):
        if current.is_due(now, is_innermost=depth == 0):
            current.shown, current.due = current.done, now + INTERVAL
            return current.line(now)
    return None


@contextmanager
def show_phases(console: Console) -> Iterator[None]:
    """Print slow phases within the block to the console. Of nested blocks, the outermost prints."""
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
