"""Start several processes on this machine by torch's launcher. Across machines, use torchrun or `accelerate launch`."""

import logging
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from flow_grpo.distributed.parent import LAUNCHER
from flow_grpo.errors import PEER_LOST

INTERRUPTED = 130
# As `python -m flow_grpo`, but a folder flow_grpo/ in the working folder does not hide the package.
COMMAND = "import sys; sys.path[:1] == [''] and sys.path.append(sys.path.pop(0)); from flow_grpo.cli.app import run; run()"
TOLD = (2, 75)  # exit statuses of a rank that has printed what is wrong, see cli/console.py


def launch(num_processes: int, words: list[str]) -> int:
    """Run `flow-grpo *words` in `num_processes` connected processes; returns an exit code.

    If one fails, the others are ended.

    Raises:
        RankDied: one ended without an error message.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    os.environ[LAUNCHER] = str(os.getpid())
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        run(
            parse_args(
                ["--standalone", f"--nproc-per-node={num_processes}", "--no-python", sys.executable, "-c", COMMAND, *words]
            )
        )
    except ChildFailedError as error:
        rank, status = first_dead(error.failures, num_processes)
        if status in TOLD:
            return status
        raise RankDied(f"rank {rank} of {num_processes} {_end(status)}, which ended the run.", status) from None
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    return 0


class RankDied(Exception):
    """A rank ended without an error message; ours names the rank and how it ended. `status` is negative for a signal."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def first_dead(failures: dict[int, ProcessFailure], num_processes: int) -> tuple[int, int]:
    """The rank whose end caused that of the others, and its exit status, which is negative for a signal.

    Ranks that lost their connection to it, and those that the launcher then ended by SIGTERM, failed only because of it. If there
    are no other failures, it is a rank that ended with status 0.
    """
    statuses = {rank: failure.exitcode for rank, failure in sorted(failures.items(), key=lambda item: item[1].timestamp)}
    own = [rank for rank, status in statuses.items() if status not in (PEER_LOST, -signal.SIGTERM)]
    early = [rank for rank in range(num_processes) if rank not in statuses]
    rank = [*own, *early, *statuses][0]
    return rank, statuses.get(rank, 0)


def _end(status: int) -> str:
    if status >= 0:
        return f"ended {'early ' if status == 0 else ''}with exit status {status}"
    hint = " (as the system does when memory runs out)" if status == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{hint}"
