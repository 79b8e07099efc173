"""The campaigns as one command: a line for each, and an exit status that says whether one failed."""

import subprocess
import sys

import pytest
from campaigns import __main__ as command
from support.paths import ROOT

KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
ENDS = {
    "passed": "print('a line')\nprint('nothing lost')\n",
    "skipped": f"import sys\nprint('no tmpfs')\nsys.exit({command.SKIPPED})\n",
    "failed": "import sys\nprint('1 difference')\nsys.exit(1)\n",
    "killed": KILLED,
}


@pytest.mark.parametrize("third", ENDS)
def test_a_failed_campaign_is_an_error_and_a_skipped_one_is_not(tmp_path, monkeypatch, capsys, third):
    """In place of the campaigns, scripts that end at once: the third of them in each of the ways."""
    ends = dict(zip(command.CAMPAIGNS, ["passed", "skipped", third, *["passed"] * 4], strict=True))
    for name, end in ends.items():
        (tmp_path / f"{name}.py").write_text(ENDS[end])
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["campaigns"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert bool(end.value.code) == (third in ("failed", "killed"))
    lines = capsys.readouterr().out.splitlines()
    said = {"killed": "failed"}
    assert [line.split(" in ")[0] for line in lines] == [f"{name}: {said.get(end, end)}" for name, end in ends.items()]
    assert lines[0].endswith("nothing lost")


@pytest.mark.slow
def test_all_campaigns_run_one_after_another():
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "campaigns"), "--smallest"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(command.CAMPAIGNS)
    assert "kills: passed" in done.stdout
