"""Figures in one style: a grid, no upper and right borders, written as PNG. One that can't be drawn costs no result."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flow_grpo.files import WriteError, atomic_file
from flow_grpo.text import first_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(
    width: float, height: float, *, rows: int = 1, columns: int = 1, **settings: Any
) -> "tuple[Figure, list[Axes]]":
    """A figure of that many inches and its axes, row by row.

    Args:
        settings: further arguments of matplotlib's `Figure.subplots`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **settings).flat)


def save_figure(figure: "Figure", file: Path) -> None:
    """Write a figure, with a grid behind its curves."""
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    with atomic_file(file) as partial:
        figure.savefig(partial, dpi=120)


def draw_or_warn(draw: Callable[[], Path | None], file: Path, warn: Callable[[str], None]) -> Path | None:
    """Call `draw`, which writes the figure `file`, and return its value. If it can't be drawn, warn and return None.

    Raises:
        WriteError: the disk is full, or the file can't be written.
    """
    try:
        return draw()
    except WriteError:
        raise
    except Exception as error:  # numbers, fonts and their cache, memory: Matplotlib raises many kinds
        warn(f"warning: the figure {file} could not be drawn: {first_line(error)}")
        return None
