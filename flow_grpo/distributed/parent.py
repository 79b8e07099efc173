"""End a rank when its launcher ends, also by kill -9."""

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
    """End this process within a second of its launcher's end, if a launcher started it.

    A rank's parent is torch's elastic agent, which torchrun, `accelerate launch` and `--num-processes` run within their own process.
    On Linux the kernel kills the rank. Elsewhere a thread polls the parent's id. Not tested on macOS; on Windows a process keeps
    the id of a parent that has ended, so this does nothing there.
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
