"""Ranks end with their launcher. Nothing else ends them when it is killed by kill -9."""

import ctypes
import functools
import os
import signal
import sys
import threading
import time
from os import _exit  # the real one, also while a reward runs, whose own os._exit is refused

LAUNCHER = "FLOW_GRPO_LAUNCHER"  # process id of our own launcher, in the environment of its ranks
PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Ends this process, if a launcher of ranks started it, within a second of the launcher's end.

    A rank's parent is torch's elastic agent, which torchrun, `accelerate launch` and `--num-processes` run within their own process.
    Linux kills the rank whatever it does. Elsewhere a thread sees that the parent is another one, when the interpreter gives it a
    turn. Not tested on macOS; on Windows a process keeps the id of a parent that has ended, so that nothing is noticed.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with(int(os.environ.get(LAUNCHER, os.getppid())))


@functools.cache
def _end_with(launcher: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        _exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
