"""Run folders that version 0.3 wrote are resumed, reported, evaluated and exported."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.cli_process import run

RUNS = Path(__file__).parent / "run_of_0_3"
DIGEST = "410a66381b0a0a6270a932a444a123b95a7d716a003933dc9dfd9f12fce832ef"
LORA = "pytorch_lora_weights.safetensors"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with copies of both runs."""
    return shutil.copytree(RUNS, tmp_path / "runs")


def test_the_runs_are_as_0_3_wrote_them():
    """A change of all files at once, such as a rename, must leave them alone."""
    digest = hashlib.sha256()
    for file in sorted(path for path in RUNS.rglob("*") if path.is_file() and path.name != "README.md"):
        digest.update(file.relative_to(RUNS).as_posix().encode() + file.read_bytes())
    assert digest.hexdigest() == DIGEST


def rows(run_folder: Path) -> list[str]:
    return (run_folder / "metrics.jsonl").read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "more_steps", "resumed_at", "last"), [("grpo", ["steps=5"], 3, 5), ("nft", [], 2, 6)], ids=["grpo", "nft"]
)
def test_a_run_of_0_3_is_resumed(folder, name, more_steps, resumed_at, last):
    """A finished run takes more steps, an interrupted one its remaining steps; what 0.3 recorded stays as it is."""
    before = rows(folder / name)
    written = run("train", f"{name}/config.yaml", *more_steps, "--resume", cwd=folder)
    assert f"resumed at step {resumed_at} of {last}" in written
    assert rows(folder / name)[: len(before)] == before
    added = [json.loads(row) for row in rows(folder / name)[len(before) :]]
    assert [row["step"] for row in added if "loss" in row] == list(range(resumed_at + 1, last + 1))
    assert added[-1]["step"] == last
    assert "eval/jpeg_size" in added[-1]
    trained = load_file(folder / name / "lora" / LORA)
    former = load_file(RUNS / name / "best" / LORA)
    assert trained.keys() == former.keys()
    assert any((trained[key] != former[key]).any() for key in trained), "the resumed steps moved no weight"
    assert (folder / name / "report.html").is_file()


def test_the_settings_of_0_3_are_compared_on_resume(folder):
    written = run("train", "nft/config.yaml", "objective.kl_weight=0.5", "--resume", cwd=folder, code=2)
    assert "0.03" in written
    assert "0.5" in written


def test_runs_of_0_3_are_reported(folder):
    run("report", "grpo", "nft", "--out", "report.html", cwd=folder)
    page = (folder / "report.html").read_text()
    prompt = json.loads((RUNS / "grpo/pictures/step_000000/evaluation.json").read_text())["prompts"][0]
    word = prompt.split('"')[1]
    assert word in page
    assert "jpeg_size" in page


def test_a_run_of_0_3_is_evaluated(folder):
    run("eval", "grpo", "--out", ".", cwd=folder)
    assert "sharpness" in (folder / "eval.md").read_text()


@pytest.mark.parametrize("choice", [[], ["--best"], ["--checkpoint", "3"]], ids=["last", "best", "checkpoint"])
def test_a_run_of_0_3_is_exported(folder, choice):
    """The exported weights are those that 0.3 saved, to the last bit."""
    run("export", "grpo", *choice, "--out", "exported", cwd=folder)
    exported = load_file(folder / "exported" / LORA)
    saved = load_file(RUNS / "grpo" / ("best" if choice == ["--best"] else "lora") / LORA)
    assert exported.keys() == saved.keys()
    assert all(exported[key].equal(saved[key]) for key in saved)
