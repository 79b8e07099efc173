"""Run the command line through its entry point, in processes forked from one that has imported everything.

A new interpreter needs six seconds to import what a command uses, a fork none. The code that runs is the same. What depends on a new
interpreter, such as messages that libraries print while they are imported, needs a test with one.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flow_grpo.policy.library_logging import before_imports

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["flow_grpo.trainer", "flow_grpo.compare", "flow_grpo.evaluation.measure", "matplotlib.figure"])


@dataclass
class Command:
    """A running command: its process, and the file that collects its output."""

    process: multiprocessing.Process
    written: Path

    @property
    def output(self) -> str:
        """Everything written so far, to stdout and stderr."""
        return self.written.read_text()

    def wait_for(self, happened: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until `happened` returns true or the command ends."""
        deadline = time.monotonic() + seconds
        while not happened() and self.process.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def finish(self, code: int, seconds: float = 180) -> str:
        """Wait for the end, check the exit status, and return the output."""
        self.process.join(seconds)
        assert self.process.exitcode == code, self.output
        assert "Traceback" not in self.output, self.output
        return self.output


def begin(
    *words: str, cwd: Path, environment: Mapping[str, str] | None = None, before: Callable[[], None] | None = None
) -> Command:
    """Start flow-grpo with these words, and with these variables beside those of this process; `before` is called first in it."""
    before_imports()
    with tempfile.NamedTemporaryFile(delete=False) as file:
        written = Path(file.name)
    variables = {**os.environ, **(environment or {})}
    process = FORKS.Process(target=_run, args=(words, str(cwd), str(written), variables, before))
    process.start()
    return Command(process, written)


def run(*words: str, cwd: Path, code: int = 0) -> str:
    """Run flow-grpo, check the exit status, and return the output."""
    return begin(*words, cwd=cwd).finish(code)


def run_anew(*words: str, cwd: Path, code: int = 0) -> str:
    """Run flow-grpo in a new interpreter, check the exit status, and return the output."""
    done = subprocess.run([sys.executable, "-m", "flow_grpo", *words], cwd=cwd, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert "Traceback" not in output, output
    return output


def _run(
    words: tuple[str, ...], cwd: str, written: str, environment: dict[str, str], before: Callable[[], None] | None
) -> None:
    if before is not None:
        before()
    os.environ.clear()  # of the time when the first command was begun
    os.environ.update(environment)
    stream = os.open(written, os.O_WRONLY | os.O_APPEND)
    for standard in (sys.stdout, sys.stderr):
        standard.flush()
        os.dup2(stream, standard.fileno())
        standard.reconfigure(line_buffering=True)
    os.chdir(cwd)
    sys.argv = ["flow-grpo", *words]
    from flow_grpo.cli import run as run_command

    run_command()
