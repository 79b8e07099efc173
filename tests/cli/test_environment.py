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
import flow_grpo.rewards.ocr
"""


@pytest.mark.parametrize("is_writable", [True, False])
def test_imports_write_no_telemetry_into_the_home_and_nothing_to_the_terminal(tmp_path, is_writable):
    home = tmp_path if is_writable else Path("/proc/nohome")
    given = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "MPL"))}
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, env={**given, "HOME": str(home)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.rglob("*") if "icrosoft" in str(path) or "onnx" in str(path)] == []
