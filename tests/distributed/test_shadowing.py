"""Files of the user's that have the names of modules, in the folder where a command runs or beside a script."""

import os
import subprocess
import sys

import pytest
from support.paths import ROOT

from flow_grpo.distributed import launchers


@pytest.fixture
def folder(tmp_path):
    """A folder with a package flow_grpo, and files named like modules that flow_grpo imports."""
    (tmp_path / "flow_grpo").mkdir()
    for name in ("flow_grpo/__init__.py", "datasets.py", "yaml.py", "typer.py"):
        (tmp_path / name).write_text("raise SystemExit('the file of the user')\n")
    (tmp_path / "rewards.py").write_text("def mine(images, prompts):\n    return [1.0] * len(prompts)\n")
    return tmp_path


def output_of(*words, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_rank_does_not_see_the_working_folder_first(folder, monkeypatch):
    assert "flow-grpo 0" in output_of("-c", launchers.COMMAND, "--version", cwd=folder)
    commands = []
    monkeypatch.setattr(
        "torch.distributed.run.run", lambda args: commands.append([args.training_script, *args.training_script_args])
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(launchers.LAUNCHER, "")
    assert launchers.launch(2, ["train", "my.yaml"]) == 0
    assert commands == [[sys.executable, "-c", launchers.COMMAND, "train", "my.yaml"]]


def test_python_m_does_not_see_the_working_folder_first(folder):
    (folder / "flow_grpo" / "__init__.py").unlink()
    assert "flow-grpo 0" in output_of("-m", "flow_grpo", "--version", cwd=folder)


def test_a_script_beside_its_own_rewards_py_has_both(folder):
    (folder / "flow_grpo" / "__init__.py").unlink()
    (folder / "yaml.py").unlink()
    script = "import rewards, flow_grpo.rewards.loading\nassert rewards.mine\nprint(flow_grpo.rewards.REGISTRY['ocr'])\n"
    (folder / "script.py").write_text(script)
    assert "flow_grpo.rewards.ocr:OCR" in output_of("script.py", cwd=folder)
    ours = "import rewards.pixels, flow_grpo.rewards.pixels as same\nassert rewards.pixels is same\n"
    output_of("-c", ours, cwd=ROOT)
