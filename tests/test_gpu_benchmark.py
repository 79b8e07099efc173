"""benchmarks/gpu.py on a CPU: each row's settings are valid, a row trains, and a row that fails is seen."""

import argparse
import fcntl
import importlib
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
import torch
from PIL import Image

from dev.tiny import world
from flow_grpo.run_folder.metrics_file import read_metrics

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Import a file of benchmarks/ as the command does."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_each_row_is_a_valid_config_that_differs_from_the_others_of_its_table(script):
    settings, measurements = script("gpu_step").settings, script("gpu_rows").MEASUREMENTS
    for measurement in measurements.values():
        for small in (False, True):
            configs = [settings(row, "a/folder", small) for row in measurement.rows.values()]
            assert all(args.prompts_per_step * args.images_per_prompt % args.microbatch == 0 for args in configs)
        rows = measurement.rows.items()
        full = [
            (settings(row, "a/folder", False).model_dump_json(), row.card, row.reward, row.kernels, row.cache == title)
            for title, row in rows
        ]
        assert len(set(full)) == len(full)


def test_goals_are_of_columns_that_are_shown(script):
    for measurement in script("gpu_rows").MEASUREMENTS.values():
        assert all(set(row.goals) <= set(measurement.columns) for row in measurement.rows.values())


@pytest.mark.parametrize(
    ("value", "wanted", "shown"),
    [
        (1.5, ">= 1.5", " (>= 1.5: yes)"),
        (1.4, ">= 1.5", " (>= 1.5: no)"),
        (16.1, "<= 16", " (<= 16: no)"),
        (0.0, "= 0", " (= 0: yes)"),
        (1e-7, "= 0", " (= 0: no)"),
        (1.1, "0.85 to 1.15", " (0.85 to 1.15: yes)"),
        (1.2, "0.85 to 1.15", " (0.85 to 1.15: no)"),
        (float("nan"), "= 0", " (= 0: no)"),
        (3.0, None, ""),
    ],
)
def test_a_goal_stands_beside_its_value(script, value, wanted, shown):
    assert script("gpu").goal(value, wanted) == shown


def test_a_row_trains_a_small_model_and_gives_each_column(script, tmp_path):
    rows = script("gpu_rows")
    row = rows.MEASUREMENTS["waits"].rows["offload groups, checkpointing"]
    values = script("gpu_step").measure(
        row, ("images/s", "ratio off 1", "planned / measured", *rows.SHARES), str(tmp_path), True, alone=lambda: None
    )
    assert list(values["values"])[:2] == ["images/s", "ratio off 1"]
    assert values["values"]["ratio off 1"] == 0
    assert values["values"]["images/s"] > 0
    assert 0.5 < sum(values["values"][share] for share in rows.SHARES) <= 1


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("rewards", "awm, hpsv3"),
        ("gradients", "mend, LoRA"),
        ("small_cards", "Z-Image, 24 GB"),
        ("compile", "awm, not compiled"),
        ("kernels", "cuDNN attention and float8"),
    ],
)
def test_a_row_of_each_measurement_runs_small(script, tmp_path, name, title):
    measurement = script("gpu_rows").MEASUREMENTS[name]
    row = measurement.rows[title]
    with torch.compiler.set_stance("force_eager"):  # compiling takes minutes
        values = script("gpu_step").measure(row, measurement.columns, str(tmp_path), True, alone=lambda: None)["values"]
    assert list(values) == list(measurement.columns)
    assert all(value == value for value in values.values())
    assert values.get("reward", 1) > 0
    assert 0 < values.get("latents changed by", 0.1) < 0.5


def test_a_kept_row_is_not_measured_again(script, monkeypatch, tmp_path, capsys):
    gpu, measured = script("gpu"), []
    measurement = gpu.MEASUREMENTS["waits"]
    rows = {title: measurement.rows[title] for title in ("plain", "checkpointing")}

    def run_row(name, title, small, seconds):
        measured.append(title)
        return {"values": {"waits": 8.0}} if title == "plain" or len(measured) > 2 else {"failed": "memory ran out"}

    monkeypatch.setattr(gpu, "run_row", run_row)
    keep = tmp_path / "rows.json"
    assert not gpu.run_rows("waits", measurement, rows, True, keep=keep)
    assert gpu.run_rows("waits", measurement, rows, True, keep=keep)
    assert measured == ["plain", "checkpointing", "checkpointing"]
    assert capsys.readouterr().out.count("| plain | 8 |") == 2
    gpu.run_rows("waits", measurement, {"plain": rows["plain"]}, False, keep=keep)
    assert measured[3:] == ["plain"], "a row of small models is none of large ones"


def test_a_row_that_fails_is_in_the_table_and_fails_the_command(script, monkeypatch, capsys):
    gpu = script("gpu")
    monkeypatch.setattr(gpu, "LONGEST", 0.2)
    measurement = gpu.MEASUREMENTS["waits"]
    assert not gpu.run_rows("waits", measurement, {"plain": measurement.rows["plain"]}, small=True)
    assert "| plain | failed: stopped after 0 s, " in capsys.readouterr().out


def test_a_row_without_its_package_or_without_time_is_skipped(script, monkeypatch, capsys):
    gpu = script("gpu")
    row = gpu.MEASUREMENTS["waits"].rows["plain"]
    assert gpu.run_rows("waits", gpu.MEASUREMENTS["waits"], {"x": gpu.Row(row.overrides, package="no_such_package")}, True)
    monkeypatch.setattr(gpu, "SECONDS", 1)
    assert gpu.run_rows("waits", gpu.MEASUREMENTS["waits"], {"plain": row}, True)
    out = capsys.readouterr().out
    assert "| x | skipped: no_such_package is not installed |" in out
    assert "| plain | skipped: 1 s are left; give its name to measure it alone |" in out


def test_signs_of_256_pixels_are_those_of_their_prompts(script):
    """The rewards of the run read the words in the pretraining's images, and these have the prompts' colours."""
    learning, rewards = script("learning_256"), script("sign_rewards")
    signs = [world.Sign("ABCDE", "red", "white"), world.Sign("XYZ", "yellow", "black"), world.Sign("MILK", "blue", "orange")]
    images = learning.images_of(signs, "cpu")
    assert images.shape == (3, 3, 256, 256)
    prompts = [sign.prompt for sign in signs]
    images = (images + 1) / 2
    assert rewards.spelling_exact(images, prompts).tolist() == [1, 1, 1]
    assert rewards.spelling(images, prompts[1:] + prompts[:1]).max() < 0.5
    for sign, image in zip(signs, images, strict=True):
        ground, color = (torch.tensor(world.COLORS[name])[:, None] / 255 for name in (sign.background, sign.color))
        pixels = image.flatten(1)
        assert ((pixels - ground).abs().amax(0) < 1e-3).float().mean() > 0.5
        assert ((pixels - color).abs().amax(0) < 1e-3).float().mean() > 0.02


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch.optim.Muon, of torch 2.9")
def test_the_learning_run_goes_on_where_it_stopped_and_teaches(script, tmp_path, monkeypatch, capsys):
    learning, seen = script("learning_256"), []
    monkeypatch.setattr(learning, "vae_loss", lambda vae, *rest, loss=learning.vae_loss: seen.append(0) or loss(vae, *rest))
    args = argparse.Namespace(folder=tmp_path, small=True, total=1.0, device="cpu", is_over=lambda: len(seen) == 1)
    with pytest.raises(learning.OutOfTime):
        learning.pretrain_pipeline(args)
    args.is_over = lambda: False
    learning.pretrain_pipeline(args)
    assert len(seen) == learning.SMALL["steps"], "the first step was not repeated"
    assert "from step 1" in capsys.readouterr().out
    run = tmp_path / "awm"
    for steps in (1, 2):
        monkeypatch.setitem(learning.SMALL, "taught", steps)
        args = argparse.Namespace(folder=tmp_path, small=True, method="awm", seconds=600.0)
        assert learning.teach(args) == 0
        assert read_metrics(run)[-1]["step"] == steps
    assert (run / "report.html").is_file()
    learning.plot(tmp_path, count=2)
    assert Image.open(tmp_path / "learning_256.png").width > 1000


@pytest.mark.slow
def test_the_command_measures_a_row_in_a_process_of_its_own(tmp_path):
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu.py"),
        "waits",
        "plain",
        "offload_trajectories",
        "--small",
        "--jobs",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("| 0 (= 0: yes) |") == 2


def test_a_row_is_measured_alone(script, monkeypatch, tmp_path):
    """While another row gets ready, the measuring of one waits; while one is measured, no other one begins."""
    gpu, seen = script("gpu"), []

    def measure(row, columns, folder, small, alone, other_bytes):
        other = gpu.LOCK.open("w")
        fcntl.flock(other, fcntl.LOCK_SH)  # another row gets ready: both may
        Thread(target=lambda: (time.sleep(0.05), seen.append("other is ready"), other.close())).start()
        alone()
        seen.append("alone")
        with gpu.LOCK.open("w") as third, pytest.raises(BlockingIOError):
            fcntl.flock(third, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return {}

    monkeypatch.setattr(gpu, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(script("gpu_step"), "measure", measure)
    gpu.print_measured("waits", "plain", True)
    assert seen == ["other is ready", "alone"]
