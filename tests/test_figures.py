"""Figures: they need no window system, and one that can't be drawn costs nothing else."""

import os
import subprocess
import sys

import pytest

from flow_grpo.figures import draw_or_warn, new_figure, save_figure
from flow_grpo.files import WriteError

COMMAND = (
    "import sys; from flow_grpo.cli.app import run; import pytest; pytest.raises(SystemExit, run); import matplotlib.figure"
)


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "nonsense"])
def test_a_command_imports_matplotlib_whatever_a_notebook_left_in_mplbackend(backend):
    command = [sys.executable, "-c", COMMAND, "--version"]
    assert subprocess.run(command, env={**os.environ, "MPLBACKEND": backend}).returncode == 0


def test_a_figure_that_can_not_be_drawn_is_a_warning(tmp_path):
    said = []

    def draw() -> None:
        figure, (axes,) = new_figure(1, 1)
        axes.plot([1, 2], [1])
        save_figure(figure, tmp_path / "a.png")

    assert draw_or_warn(draw, tmp_path / "a.png", said.append) is None
    (line,) = said
    assert line.startswith(f"warning: the figure {tmp_path / 'a.png'} could not be drawn: x and y must have")
    assert not list(tmp_path.iterdir())


def test_a_figure_without_room_is_an_error_with_its_path(tmp_path):
    def draw() -> None:
        raise WriteError("no room")

    with pytest.raises(WriteError):
        draw_or_warn(draw, tmp_path / "a.png", print)
