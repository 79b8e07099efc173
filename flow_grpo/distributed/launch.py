"""Several processes on this machine, by torch's own launcher. Across machines, torchrun or `accelerate launch` do the same."""

import logging
import os
import signal

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from flow_grpo.distributed.parent import LAUNCHER
from flow_grpo.distributed.processes import PEER_LOST

INTERRUPTED = 130
TOLD = 2  # exit status of a rank that has said in a sentence what is wrong


def launch(count: int, words: list[str]) -> int:
    """Runs `python -m flow_grpo *words` in `count` processes that know of each other; returns an exit code.

    One that fails ends the others.

    Raises:
        RankDied: one has ended without a sentence about why.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    os.environ[LAUNCHER] = str(os.getpid())
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        run(parse_args(["--standalone", f"--nproc-per-node={count}", "-m", "flow_grpo", *words]))
    except ChildFailedError as error:
        rank, status = first_dead(error.failures, count)
        if status == TOLD:
            return TOLD
        raise RankDied(f"rank {rank} of {count} {_end(status)}, which ended the run.") from None
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    return 0


class RankDied(Exception):
    """A rank has ended without saying why; the message says which one and how."""


def first_dead(failures: dict[int, ProcessFailure], count: int) -> tuple[int, int]:
    """The rank that ended the others, and its exit status, which is negative for a signal.

    Ranks that lost it, and those that the launcher then ended by SIGTERM, have failed only because of it. If all failures are such
    ones, it is a rank that is not among them: one that ended as if all were well.
    """
    statuses = {rank: failure.exitcode for rank, failure in sorted(failures.items(), key=lambda item: item[1].timestamp)}
    own = [rank for rank, status in statuses.items() if status not in (PEER_LOST, -signal.SIGTERM)]
    early = [rank for rank in range(count) if rank not in statuses]
    rank = [*own, *early, *statuses][0]
    return rank, statuses.get(rank, 0)


def _end(status: int) -> str:
    if status >= 0:
        return f"ended {'early ' if status == 0 else ''}with exit status {status}"
    hint = " (as the system does when memory runs out)" if status == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{hint}"
