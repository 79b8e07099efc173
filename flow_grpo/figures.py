"""Figures in one style: a grid, no upper and right borders, written as PNG."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flow_grpo.files import atomic_file

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
