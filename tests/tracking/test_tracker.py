"""What a run shows while it trains: a bar on a terminal and in a notebook, else lines that are never far apart."""

import io
import json
import shlex

import ipywidgets
import pytest
from rich.console import Console
from support.fake_run import synthetic_run

from flow_grpo.run_folder.reader import RunReader
from flow_grpo.tracking import tracker as tracking
from flow_grpo.tracking.tracker import Tracker, next_command, print_table

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
    assert all("reward 0.500 ± 0.100" in line for line in lines)
    assert ["s left" in line for line in lines] == [step > 1 for step in printed], "the first step may compile"


def finished(folder) -> list[str]:
    """What the end of a run prints, without the borders of its table."""
    shown = io.StringIO()
    tracker = Tracker(folder, 40, Console(file=shown, width=200))
    assert tracker.finish(folder / "lora" / "weights.safetensors", folder / "report.html")["reward"] == pytest.approx(0.695)
    return [line.strip("│ ") for line in shown.getvalue().splitlines()]


def test_the_end_names_both_weights_with_their_scores_and_a_command_that_tries_them(tmp_path):
    """The best evaluation is the last one, then an earlier one. A single reward is not in the table a second time, as their sum."""
    folder = synthetic_run(tmp_path / "a run")
    lines = finished(folder)
    assert f"LoRA: {folder}/lora/weights.safetensors (step 40, ocr 0.695)" in lines
    assert not any("best evaluation" in line for line in lines)
    assert [line.split()[0] for line in lines if line[:1].isalpha()][:5] == ["held-out", "ocr", "clip", "LoRA:", "curve:"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["monitor/best_step"] = 20
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "best").mkdir()
    lines = finished(folder)
    assert f"LoRA of the best evaluation: {folder}/best (step 20, clip 0.900, not trained on)" in lines
    command = shlex.split(lines[-1].removeprefix("try it: "))
    assert command[:2] == ["flow-grpo", "sample"]
    assert command[2] in RunReader(folder).evaluations[-1]["prompts"]
    assert command[3:] == ["--lora", str(folder)]


def test_no_command_is_shown_for_a_prompt_that_is_long_has_an_image_or_controls_the_terminal(tmp_path):
    for i, prompt in enumerate(("x" * 1000, "red \x1b[31m")):
        assert next_command(RunReader(synthetic_run(tmp_path / str(i), prompts=[prompt] * 8))) is None
    edited = RunReader(synthetic_run(tmp_path / "edits"))
    edited.evaluations[-1]["sources"] = ["0" * 64] * 20
    assert next_command(edited) is None
    assert next_command(RunReader(synthetic_run(tmp_path / "bare", pictures=False))) is None


def test_a_table_in_a_narrow_terminal_shortens_names_and_no_numbers():
    console = Console(file=io.StringIO(), width=54)
    columns = {name: {"grid.png[0]  a prompt of many words": 123456.78} for name in ("size", "bytes", "clip")}
    print_table(console, "scores", columns)
    assert console.file.getvalue().count("123456.7800") == 3
