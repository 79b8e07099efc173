"""What launchers say in their environment: which process this is, whether they restart it, and their own command."""

import os
import shlex
import sys
from pathlib import Path

import psutil

from flow_grpo.distributed.parent import LAUNCHER

AUTO = "auto"  # of `resume`: go on if there is a checkpoint, else start


def restarts() -> bool:
    """Whether the launcher starts processes again that have failed: torchrun --max-restarts, or SLURM's requeue.

    torchrun sets its largest number in each of its processes. Its count differs between nodes, as only the node that failed counts.
    """
    return any(int(os.environ.get(name) or 0) > 0 for name in ("TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT"))


def go_on(resume: str = "--resume auto") -> str:
    """The command that goes on with this run: the launcher's own where one is known, with `--resume`."""
    if "flow_grpo.cli.app" not in sys.modules:
        return f'train(resume="{AUTO}")'
    words = ["flow-grpo", *sys.argv[1:]]
    if launcher := os.environ.get(LAUNCHER) or ("TORCHELASTIC_RUN_ID" in os.environ and os.getppid()):
        words = _readable(psutil.Process(int(launcher)).cmdline())
    elif "RANK" in os.environ:
        words = ["...", *words]  # srun or mpirun, which is not a parent of all its processes
    resumes = any(word.startswith("--resume") for word in words)
    return shlex.join(words if resumes else [*words, *resume.split()]).replace("'...'", "...")


def _readable(words: list[str]) -> list[str]:
    """A command line without its interpreter, unless that is asked to run a module."""
    is_script = len(words) > 1 and Path(words[0]).name.startswith("python") and not words[1].startswith("-")
    return [Path(words[1]).name, *words[2:]] if is_script else [Path(words[0]).name, *words[1:]]
