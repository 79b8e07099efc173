"""The command line through its entry point, in processes forked from one that has imported everything.

A new interpreter takes six seconds to import what a command needs, a fork none. The code that runs is the same; what depends on a new
interpreter (which libraries speak while they are imported) is tested with one.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flow_grpo.policy.library_logging import before_imports

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["flow_grpo.trainer", "flow_grpo.compare.runs", "flow_grpo.evaluation.measure", "matplotlib.figure"]
)


@dataclass
class Command:
    """A command that runs: its process, and where what it writes is gathered."""

    process: multiprocessing.Process
    written: Path

    @property
    def output(self) -> str:
        """All that it has written so far, to both streams."""
        return self.written.read_text()

    def wait_for(self, happened: Callable[[], bool], seconds: float = 120) -> None:
        """Until that is so, or the command is over."""
        deadline = time.monotonic() + seconds
        while not happened() and self.process.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def finish(self, code: int, seconds: float = 180) -> str:
        """Waits for its end, which must be that exit status, and returns what it wrote."""
        self.process.join(seconds)
        assert self.process.exitcode == code, self.output
        assert "Traceback" not in self.output, self.output
        return self.output


def begin(*words: str, cwd: Path) -> Command:
    """Starts flow-grpo with these words."""
    before_imports()
    with tempfile.NamedTemporaryFile(delete=False) as file:
        written = Path(file.name)
    process = FORKS.Process(target=_run, args=(words, str(cwd), str(written), dict(os.environ)))
    process.start()
    return Command(process, written)


def run(*words: str, cwd: Path, code: int = 0) -> str:
    """Runs flow-grpo and returns everything it wrote."""
    return begin(*words, cwd=cwd).finish(code)


def _run(words: tuple[str, ...], cwd: str, written: str, environment: dict[str, str]) -> None:
    os.environ.clear()  # of the time when the first command was begun
    os.environ.update(environment)
    stream = os.open(written, os.O_WRONLY | os.O_APPEND)
    for standard in (sys.stdout, sys.stderr):
        standard.flush()
        os.dup2(stream, standard.fileno())
        standard.reconfigure(line_buffering=True)
    os.chdir(cwd)
    sys.argv = ["flow-grpo", *words]
    from flow_grpo.cli import app as cli

    cli.run()
