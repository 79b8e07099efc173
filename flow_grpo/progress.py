"""Messages for slow phases of a command: loading the model, generating held-out images, scoring them.

Slow code runs within `phase(...)`, and a command that shows its phases within `show_phases(console)`. A phase is shown once it has
lasted 2 seconds: in a terminal in a line that is replaced, below the progress bars if there are any, and elsewhere in a new line
every 10 seconds. Of nested phases the innermost that has lasted so long is shown.
"""

import codecs
import io
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import Progress
from rich.text import Text

PATIENCE, INTERVAL = 2.0, 10.0  # seconds until a phase is shown, and until it is shown again
REPLACED = "flow_grpo.replaced"  # of `errors` in `open`
IN_ASCII = {"−": "-", "–": "-", "±": "+-", "…": "...", "×": "x"}


@dataclass
class Phase:
    """Work of which `done` of `total` units are done, named by `unit`; `total` is None if it can't be counted."""

    name: str
    total: int | None = None
    unit: str = ""
    done: int = 0
    shown: bool = False  # in a line
    started: float = field(default_factory=lambda: time.monotonic())

    def advance(self, count: int = 1) -> None:
        """Count finished items."""
        self.done += count

    def line(self, now: float) -> str:
        """The phase as a line of text at a time in seconds."""
        share = "" if self.total is None else f" {self.done} of {self.total}{self.unit and ' '}{self.unit},"
        return f"{self.name}:{share} {now - self.started:.0f} s"


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(IN_ASCII.get(character, "?") for character in text), error.end


def replace_unprintable() -> None:
    """From here on, characters that a terminal or a log can't show are replaced: they are no reason to end a run."""
    codecs.register_error(REPLACED, _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors != REPLACED:
            stream.reconfigure(errors=REPLACED)


_phases: list[Phase] = []  # the open phases, the innermost last
_displays: list["Display"] = []  # of the open `show_phases`; the last one shows
_consoles: list[Console] = []  # of the outermost `show_phases`
_switching = threading.RLock()  # held while the displays change, or one of them is written


@contextmanager
def phase(name: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
    """Name the work within the block. Call `advance` of the yielded phase to count finished units."""
    current = Phase(name, total, unit)
    _phases.append(current)
    try:
        yield current
    finally:
        _phases.remove(current)


def current_phase(now: float) -> Phase | None:
    """The innermost phase that has lasted long enough; None if there is none."""
    return next((current for current in reversed(_phases) if now - current.started >= PATIENCE), None)


def current_line(now: float) -> str:
    """The line of `current_phase`; "" if there is none."""
    current = current_phase(now)
    return current.line(now) if current else ""


class Lines:
    """A new line for each phase and every 10 seconds, as in a file."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._due = 0.0

    def refresh(self, now: float) -> None:
        """Print the line that is due."""
        current = current_phase(now)
        if current and (not current.shown or now >= self._due):
            current.shown, self._due = True, now + INTERVAL
            self.console.print(current.line(now), highlight=False, markup=False, soft_wrap=True)

    def clear(self) -> None:
        """Leave the lines."""


class StatusLine:
    """A line of a terminal that is replaced, and goes away with its phase. What the same console prints stands above it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None

    def refresh(self, now: float) -> None:
        """Replace the line."""
        line = current_line(now)
        if not line:
            self.clear()
        elif self._live is None:
            redirect = not self.console.stderr  # other programs' prints stay on stdout
            self._live = Live(
                _one_line(line), console=self.console, auto_refresh=False, transient=True, redirect_stdout=redirect
            )
            self._live.start(refresh=True)
        else:
            self._live.update(_one_line(line), refresh=True)

    def clear(self) -> None:
        """Remove the line."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class PhaseProgress(Progress):
    """Progress bars with a line below them."""

    line = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bars, and the line."""
        yield from super().get_renderables()
        if self.line:
            yield _one_line(self.line)

    def stop(self) -> None:
        """Stop, and leave the bars alone in the terminal."""
        self.line = ""
        super().stop()


class BelowBars:
    """The line below progress bars."""

    def __init__(self, bars: PhaseProgress) -> None:
        self.bars = bars

    def refresh(self, now: float) -> None:
        """Replace the line; the bars draw it."""
        self.bars.line = current_line(now)

    def clear(self) -> None:
        """Remove the line."""
        self.bars.line = ""


Display = Lines | StatusLine | BelowBars  # where phases are shown, several times a second


def _one_line(line: str) -> Text:
    return Text(line, style="dim", no_wrap=True, overflow="ellipsis")


@contextmanager
def show_phases(console: Console, bars: PhaseProgress | None = None) -> Iterator[None]:
    """Show slow phases within the block: below the bars, if there are any, else on the console.

    Of nested blocks the outermost shows, unless an inner one has bars.
    """
    if _displays and bars is None:
        yield
        return
    display: Display = BelowBars(bars) if bars else StatusLine(console) if console.is_terminal else Lines(console)
    end = threading.Event()
    with _switching:
        if is_inner := bool(_displays):
            _displays[-1].clear()
        else:
            _consoles.append(console)
        _displays.append(display)

    def watch() -> None:
        while not end.wait(0.2):
            with _switching:
                _displays[-1].refresh(time.monotonic())

    watcher = threading.Thread(target=watch, daemon=True)
    if not is_inner:
        watcher.start()
    try:
        yield
    finally:
        end.set()
        if not is_inner:
            watcher.join()
        with _switching:
            display.clear()
            _displays.remove(display)
            if not is_inner:
                _consoles.clear()


def tell(sentence: str) -> None:
    """Print what a command's user should know to its console; in Python it is a warning."""
    if _consoles:
        _consoles[0].print(sentence, highlight=False, markup=False, soft_wrap=True)
    else:
        warnings.warn(sentence, stacklevel=3)
