"""Long phases are said, with and without a terminal."""

import io
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from support.embedded import short_run
from support.paths import SAMPLE_REWARDS

from flow_grpo import progress
from flow_grpo.cli.rewards import probe as rewards_test
from flow_grpo.cli.score import score as run_score
from flow_grpo.data import image_sets
from flow_grpo.data.grid import ImageInfo, save_grid
from flow_grpo.data.prompts import PromptSet
from flow_grpo.doctor.dry_run import dry_run
from flow_grpo.evaluation import measure
from flow_grpo.plan import hardware
from flow_grpo.progress import Lines, Phase, PhaseProgress, phase, show_phases
from flow_grpo.rewards import WeightedSum
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training.setup import build_rewards


@pytest.fixture
def line_at():
    """What is printed at a time in seconds, without a terminal."""
    console = Console(file=io.StringIO())
    lines = Lines(console)

    def refresh(now: float) -> str:
        console.file = io.StringIO()
        lines.refresh(now)
        return console.file.getvalue().rstrip()

    return refresh


def test_a_phase_is_reported_after_two_seconds_and_every_ten(line_at):
    with phase("generating 8 images", total=80, unit="sampling steps") as one:
        one.advance(24)
        assert one.line(one.started + 2) == "generating 8 images: 24 of 80 sampling steps, 2 s"
    with phase("scoring", total=8) as one:
        start = one.started
        assert line_at(start + 1.5) == ""
        one.advance(3)
        assert line_at(start + 2.5) == "scoring: 3 of 8, 2 s"
        assert line_at(start + 12) == ""
        assert line_at(start + 13) == "scoring: 3 of 8, 13 s"
    assert line_at(start + 99) == ""


def test_the_innermost_phase_is_reported_and_the_outer_one_waits_after_it(line_at):
    with phase("outer") as outer:
        assert line_at(outer.started + 2).startswith("outer")
        with phase("inner") as inner:
            assert line_at(inner.started + 3).startswith("inner")
        assert line_at(inner.started + 4) == "", "it has just been seen to go on"
        assert line_at(inner.started + 13).startswith("outer")


def test_short_inner_phases_do_not_hide_the_progress_of_the_outer_one(monkeypatch, line_at):
    """Without a terminal, `eval` counts its images, although each batch takes less than the time until a phase is shown."""
    clock, said = [time.monotonic()], []
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slow(images, prompts):
        clock[0] += 1.5
        said.append(line_at(clock[0]))
        return images.mean((1, 2, 3))

    rows = measure.images_to_generate(PromptSet(list("abcdefghij"), [{}] * 10), 1)
    reward = WeightedSum({"slow": slow}, {"slow": 0.0})
    measure.score(rows, lambda places: torch.rand(1, 3, 8, 8), reward, 1, name="grid")
    assert [line for line in said if line] == ["measuring grid: 1 of 10 images, 3 s", "measuring grid: 8 of 10 images, 14 s"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_slow_phase_is_reported_while_it_lasts(monkeypatch, terminal):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    console, ended = Console(file=io.StringIO(), force_terminal=terminal), threading.Event()
    with show_phases(console), show_phases(console), phase("loading a model"):
        deadline = time.monotonic() + 60
        while "loading a model" not in console.file.getvalue():
            assert time.monotonic() < deadline
            ended.wait(0.01)
    with phase("outside"):
        ended.wait(0.5)
    assert "outside" not in console.file.getvalue()


def test_in_a_terminal_a_phase_is_below_the_bar_and_a_line_of_its_own_is_replaced(monkeypatch):
    """What is printed meanwhile has lines of its own, and nothing of a phase is left at the end."""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    console, ended = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=60), threading.Event()

    def wait_for(text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in console.file.getvalue():
            assert time.monotonic() < deadline
            ended.wait(0.01)

    bars = PhaseProgress(console=console, refresh_per_second=20)
    bars.add_task("training", total=8)
    with show_phases(console), phase("loading a model"):
        wait_for("loading a model: ")
        console.print("a result")
        with show_phases(console, bars), bars, phase("sampling 64 images"):
            wait_for("sampling 64 images: ")
            console.print("another result")
    shown = console.file.getvalue()
    assert "\r\x1b[2Ka result\n" in shown
    assert "\x1b[2Kanother result\n" in shown, "after the line before it is erased"
    assert "-:--:--\nsampling 64 images: " in shown, "below the bar"
    assert not re.search("-:--:--(sampling|loading)", shown), "not in its line"
    assert shown.endswith("-:--:--\n\x1b[?25h"), "the bar is what stays"


def test_a_run_says_its_first_evaluation_and_a_slow_reward(tmp_path, monkeypatch, capsys):
    """Generating images and the reward last until the run has said that they are being waited for."""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.2)
    trainer, seen, said = FlowGRPOTrainer(args=short_run(tmp_path / "run", "steps=1")), [], []
    line_of = Phase.line

    def noted(one, now):
        said.append(line_of(one, now))
        return said[-1]

    monkeypatch.setattr(Phase, "line", noted)
    advance = Phase.advance

    def slow_advance(one, count=1):
        deadline = time.monotonic() + 60
        while one.name.startswith("generating") and not one.shown:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        advance(one, count)

    monkeypatch.setattr(Phase, "advance", slow_advance)

    def slow(images, prompts):
        count, deadline = len(said), time.monotonic() + 60
        while not any("scoring" in line for line in said[count:]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        seen.append(len(prompts))
        return images.mean((1, 2, 3))

    (name,) = trainer.rewards.rewards
    trainer.rewards.rewards[name] = trainer.eval_rewards.rewards[name] = slow
    trainer.train()
    output = capsys.readouterr().out
    assert seen == [2, 2, 2, 1, 1, 8, 2], "the first evaluation's, together again, alone, a step's, the last evaluation's"
    assert "generating 2 held-out images" in output
    assert "scoring 2 held-out images" in output
    assert "scoring images" in output


@pytest.fixture
def names(monkeypatch):
    """The names of all phases of a test."""
    names = []

    def noted(name, *rest):
        names.append(name)
        return Phase(name, *rest)

    monkeypatch.setattr(progress, "Phase", noted)
    return names


def test_plan_a_dry_run_and_the_look_at_a_reward_say_what_they_are_at(tmp_path, monkeypatch, names):
    monkeypatch.setattr(hardware, "SECONDS", 0.0)
    dry_run(args := short_run(tmp_path / "run"))
    brightness = f"{SAMPLE_REWARDS}:brightness"
    save_grid(
        file := tmp_path / "grid.png", torch.rand(2, 3, 8, 8), [ImageInfo(prompt, 0, "m") for prompt in "ab"], columns=2
    )
    rewards_test(brightness, file, out=tmp_path / "ranked.png")
    for what in (
        f"tracing the code of {args.model}",
        "measuring this machine",
        f"calling reward {brightness}",
        f"loading reward {brightness}",
    ):
        assert what in names
    assert f"scoring 2 images by {brightness}, original and perturbed" in names


def test_score_eval_and_a_run_say_which_reward_they_load_and_when_they_score(tmp_path, names):
    brightness = f"{SAMPLE_REWARDS}:brightness"
    file = tmp_path / "grid.png"
    save_grid(file, torch.rand(3, 3, 8, 8), [ImageInfo(prompt, 0, "m") for prompt in "abc"], columns=3)
    run_score(file, [brightness])
    assert names == [f"loading reward {brightness}", "scoring 3 images by brightness"]
    names.clear()
    reward_sum, _ = build_rewards(short_run(tmp_path / "run", f"rewards={{'{brightness}': 1}}"), monitored=False)
    assert names == [f"loading reward {brightness}"]
    names.clear()
    images = image_sets.read(file)
    values = measure.score(images, images.images, reward_sum, batch_size=2)
    assert names == ["measuring images", "scoring 2 images by brightness", "scoring 1 image by brightness"]
    assert len(values["brightness"]) == 3
