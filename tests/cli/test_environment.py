"""Homes that can't be written, and what is written into a home."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

IMPORTS = """
from flow_grpo.policy.library_logging import before_imports
before_imports()
import matplotlib.figure
import onnxruntime  # as pipelines of diffusers do
import time
time.sleep(0.5)
import flow_grpo.rewards.ocr
"""


@pytest.mark.parametrize("is_writable", [True, False])
def test_imports_write_no_telemetry_into_the_home_and_nothing_to_the_terminal(tmp_path, is_writable):
    home = tmp_path if is_writable else Path("/proc/nohome")
    given = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "MPL"))}
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, env={**given, "HOME": str(home)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.rglob("*") if "icrosoft" in str(path) or "onnx" in str(path)] == []


def test_a_closed_stdin_is_the_null_device_and_a_working_folder_may_be_gone(tmp_path):
    """Else the first socket that a command opens has the number 0, and `python -m` asks for the folder's name."""
    code = "import os; from flow_grpo.cli.console import prepare_streams; prepare_streams(); print(os.fstat(0).st_rdev)"
    commands = {
        "stdin": [sys.executable, "-c", code],
        "folder": [sys.executable, "-m", "flow_grpo", "--version"],
    }
    ends = {}
    for name, command in commands.items():
        folder = tmp_path / name
        folder.mkdir()
        start = (lambda: os.close(0)) if name == "stdin" else folder.rmdir
        ends[name] = subprocess.run(command, cwd=folder, capture_output=True, text=True, preexec_fn=start)
    assert (ends["stdin"].stdout, ends["stdin"].stderr) == (f"{os.stat(os.devnull).st_rdev}\n", "")
    assert ends["folder"].stdout.startswith("flow-grpo 0"), ends["folder"].stderr


def test_python_without_docstrings_is_one_sentence():
    done = subprocess.run([sys.executable, "-OO", "-m", "flow_grpo", "schema"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: Python's option -OO (PYTHONOPTIMIZE=2) takes out docstrings")
