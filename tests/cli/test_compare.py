"""`flow-grpo compare` through its real entry point."""

import json
from pathlib import Path

import pytest
from support.cli_process import begin, run, run_anew
from support.embedded import short_run
from support.paths import SAMPLE_REWARDS

from flow_grpo.compare import Budget, compare


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the config of a short run."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "short.yaml").write_text(short_run(folder / "run").to_yaml())
    return folder


def compare_words(folder: Path, images: int = 8, evaluations: int = 1) -> list[str]:
    other = (folder / "short.yaml").read_text().replace("lr: 0.001\n  warmup", "lr: 0.003\n  warmup")
    (folder / "other.yaml").write_text(other)
    budget = ["--budget", f"images={images}", "--evaluations", f"{evaluations}"]
    return ["compare", "short.yaml", "other.yaml", "--seeds", "1", *budget]


def compared(folder: Path, out: str, images: int = 16, evaluations: int = 2, **more) -> None:
    """What the command does with `compare_words`."""
    compare_words(folder)
    configs = [str(folder / "short.yaml"), str(folder / "other.yaml")]
    compare(
        configs,
        1,
        Budget(images, "images", evaluations),
        folder / out,
        overrides=[],
        metric="reward",
        log=lambda line: None,
        **more,
    )


def curve(folder: Path, out: str, name: str) -> list[dict]:
    lines = (folder / out / name / "seed0" / "curve.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_compare_gives_every_run_the_same_budget(folder):
    words = [*compare_words(folder), "--measure", "reward", "--target", "0.0"]
    output = run_anew(*words, "--out", "whole", cwd=folder)
    assert "deprecat" not in output, "other libraries keep quiet in the runs' own processes too"
    assert all(len(line) <= 80 for line in output.splitlines() if "│" in line)
    assert "to target, s" in output
    assert "gain per KL" in (folder / "whole" / "compare.md").read_text()
    curves = {name: curve(folder, "whole", name) for name in ("short", "other")}
    for name in curves:
        assert [point["images"] for point in curves[name]] == [0, 8]
        assert [point["step"] for point in curves[name]] == [0, 1]
        assert curves[name][0]["kl"] == 0 < curves[name][-1]["kl"]
    assert curves["short"][-1]["values"] != curves["other"][-1]["values"]
    assert (folder / "whole" / "compare.png").stat().st_size > 10_000
    assert json.loads((folder / "whole" / "compare.json").read_text())["short"]["seeds"] == 1


@pytest.mark.slow
def test_a_comparison_that_is_killed_goes_on_where_it_was(folder):
    compared(folder, "at_once")
    words = [*compare_words(folder, images=16, evaluations=2), "--measure", "reward"]
    command = begin(*words, "--out", "parts", cwd=folder)
    command.wait_for((folder / "parts" / "other" / "seed0" / "curve.jsonl").exists)
    command.process.kill()
    command.process.join()
    compared(folder, "parts")
    for name in ("short", "other"):
        values = [[point["values"] for point in curve(folder, out, name)] for out in ("at_once", "parts")]
        assert values[0] == values[1]


@pytest.mark.slow
def test_compare_says_what_it_trains_and_warns_of_a_reward_whose_values_depend_on_other_images(folder):
    words = ["compare", "short.yaml", "--seeds", "1", "--budget", "images=8", "--evaluations", "1", "--out", "ranked"]
    output = run(*words, "--measure", "reward", "--set", f"rewards={{'{SAMPLE_REWARDS}:rank': 1}}", cwd=folder)
    assert output.count("warning: short: reward rank: an image's value depends on the other images") == 1
    assert "short seed 0: " in output


def test_a_metric_that_is_not_measured_is_said_after_the_first_evaluation(folder):
    words = [*compare_words(folder), "--out", "fresh", "--measure", "orc"]
    assert "no held-out metric orc; it has reward, brightness." in run(*words, cwd=folder, code=2)
    assert len(list((folder / "fresh").rglob("curve.jsonl"))) == 1


def test_compare_says_at_once_what_does_not_fit_its_folder(folder):
    words = [*compare_words(folder), "--out", "whole"]
    for more in ([], ["--stop", "--target", "1"]):
        assert "no held-out metric orc; it has reward" in run(*words, "--measure", "orc", *more, cwd=folder, code=2)
    words[words.index("images=8")] = "images=12"
    assert "started with 8 images between evaluations, not 12 images" in run(*words, cwd=folder, code=2)


def test_a_comparison_that_trained_nothing_takes_another_budget(folder):
    for images in (8, 12):
        words = [*compare_words(folder, images=images), "--out", "not_begun", "--set", "evaluation.prompts=null"]
        assert "names no held-out prompts to compare on" in run(*words, cwd=folder, code=2)


def test_compare_ends_with_the_status_of_a_run_that_may_succeed_later(folder):
    unreachable = "rewards={ocr: {remote: http://127.0.0.1:9}}"
    output = run(*compare_words(folder), "--out", "unreachable", "--set", unreachable, cwd=folder, code=75)
    assert "no server for the reward ocr answers" in output


def test_a_comparison_goes_on_with_more_evaluations_at_the_same_distance(folder):
    compared(folder, "whole", images=16, evaluations=2)
    lines = (folder / "whole" / "short" / "seed0" / "curve.jsonl").read_text().splitlines()
    assert [json.loads(line)["images"] for line in lines] == [0, 8, 16]


def test_compare_ends_runs_at_their_target(folder):
    compared(folder, "stopped", target=0.0, stop=True)
    assert len((folder / "stopped" / "short" / "seed0" / "curve.jsonl").read_text().splitlines()) == 1
