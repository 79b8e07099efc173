"""What a run shows while it trains: a bar on a terminal and in a notebook, else lines that are never far apart."""

import io

import ipywidgets
import pytest
from rich.console import Console

from flow_grpo.tracking import tracker as tracking
from flow_grpo.tracking.tracker import Tracker

METRICS = {"reward": 0.5, "reward_std": 0.1, "loss": 0.1, "time/step": 1.0}


def show_bar(folder, console):
    """Tracks the first of four steps, and checks when the bar is live."""
    with Tracker(folder, 4, console) as tracker:
        assert tracker._progress.live.is_started
        tracker.log(1, METRICS)
        (bar,) = tracker._progress.tasks
        assert (bar.completed, bar.total) == (1, 4)
    assert not tracker._progress.live.is_started


def test_the_bar_is_live_within_the_run_in_a_notebook(tmp_path, monkeypatch):
    displayed = []  # in place of a kernel, to which IPython would send it
    monkeypatch.setattr("IPython.display.display", displayed.append)
    show_bar(tmp_path, Console(force_jupyter=True))
    assert any(isinstance(one, ipywidgets.Output) for one in displayed), "the widget that the bar is drawn in"


def test_the_bar_is_live_within_the_run_on_a_terminal(tmp_path):
    shown = io.StringIO()
    show_bar(tmp_path, Console(file=shown, force_terminal=True, width=120))
    assert "1/4" in shown.getvalue()


def test_without_a_terminal_there_is_no_bar(tmp_path):
    with Tracker(tmp_path, 4, Console(file=io.StringIO())) as tracker:
        assert not tracker._progress.live.is_started


@pytest.mark.parametrize(("silence", "printed"), [(0.0, [1, 2, 3, 10, 11, 40]), (1e9, [10, 40])])
def test_without_a_terminal_a_step_is_printed_once_the_run_was_silent_for_long(silence, printed, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "MAX_SILENCE", silence)
    shown = io.StringIO()
    with Tracker(tmp_path, 40, Console(file=shown, width=200)) as tracker:
        for step in (1, 2, 3, 10, 11, 40):
            tracker.log(step, METRICS)
    lines = shown.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/40" for step in printed]
    assert all("reward 0.500 ± 0.100" in line and "s left" in line for line in lines)
