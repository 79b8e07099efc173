"""A run of 0.4 is resumed, reported, evaluated and exported; run_of_0_4/README.md says how it was made."""

import shutil
from pathlib import Path

import pytest
from support.cli_process import run

from flow_grpo.run_folder.metrics_file import read_metrics

SAME = ("reward", "reward_std", "loss", "grad_norm", "ratio/mean", "lr")


@pytest.fixture
def folder(tmp_path) -> Path:
    return shutil.copytree(Path(__file__).parent / "run_of_0_4", tmp_path / "run")


def test_a_run_of_0_4_is_resumed_to_the_metrics_that_it_had(folder):
    """From its first checkpoint, it repeats its second step."""
    shutil.rmtree(folder / "checkpoints" / "step_000002")
    before = [row for row in read_metrics(folder) if "loss" in row]
    run("train", "run/config.yaml", "output_dir=run", "--resume", cwd=folder.parent)
    after = [row for row in read_metrics(folder) if "loss" in row]
    assert [row["step"] for row in after] == [1, 2]
    for name in SAME:
        assert after[1][name] == pytest.approx(before[1][name], rel=1e-3, abs=1e-6), name


def test_a_run_of_0_4_is_exported(folder):
    run("export", "run", "--out", "exported", cwd=folder.parent)
    assert (folder.parent / "exported" / "pytorch_lora_weights.safetensors").stat().st_size > 50_000


def test_a_run_of_0_4_is_reported_and_evaluated(folder):
    run("report", "run", cwd=folder.parent)
    assert "jpeg_size" in (folder / "report.html").read_text()
    assert "jpeg_size" in run("eval", "run", "--seeds", "1", "--steps", "2", cwd=folder.parent)
