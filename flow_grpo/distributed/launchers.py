"""Launchers of the processes of a run: our own on one machine, and what others say in their environment.

That is which process this is, whether they restart it, and their command. A rank ends with its launcher, also after kill -9.
"""

import ctypes
import functools
import logging
import os
import re
import shlex
import signal
import sys
import threading
import time
import zlib
from contextlib import suppress
from os import _exit
from typing import TYPE_CHECKING, Any

from flow_grpo.errors import INTERRUPTED, PEER_LOST, TEMPORARY, USER_ERROR, FlowGRPOError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

LAUNCHER = "FLOW_GRPO_LAUNCHER"  # process id of our own launcher, in the environment of its ranks
PR_SET_PDEATHSIG = 1


def number_in_environment(name: str, default: str, lowest: float, highest: float, kind: type = int) -> Any:
    """A number from the environment. FlowGRPOError if it is none, or out of range."""
    given = os.environ.get(name, default)
    with suppress(ValueError):
        if lowest <= (number := kind(given)) <= highest:
            return number
    raise FlowGRPOError(
        f"{name}={given} in the environment should be a number from {lowest} to {highest}: set it, or unset it."
    )


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


AUTO = "auto"  # of `resume`: go on if there is a checkpoint, else start
TORCHRUN = "torchrun --nnodes N --node-rank I --nproc-per-node GPUS --master-addr HOST -m flow_grpo train ..."
# Rank, number of processes, rank within the machine, processes of the machine: Open MPI; MPICH and Intel MPI; srun. mpirun within a
# SLURM job comes first, since it starts its own daemons by srun. An interactive shell of SLURM is a step of one task.
VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
)


def adopt() -> None:
    """Set torchrun's variables (RANK, MASTER_ADDR, ...) in one of several processes that srun or mpirun has started.

    Raises:
        FlowGRPOError: the machine of rank 0 is not known, or `accelerate launch` means several machines and says nothing of their ranks.
    """
    found = os.environ
    if "RANK" in found:
        return
    if "ACCELERATE_MIXED_PRECISION" in found and "MASTER_ADDR" in found:  # it starts one process if it sees no GPU
        raise FlowGRPOError(f"`accelerate launch` starts no ranks on machines without a GPU: use {TORCHRUN}")
    for rank, size, local_rank, local_size in VARIABLES:
        if rank in found and int(found.get(size) or 1) > 1:
            host = found.get("MASTER_ADDR") or _first_host(is_step=rank == "SLURM_PROCID")
            if host is None and found.get(local_size) == found[size]:
                host = "localhost"
            if host is None:
                raise FlowGRPOError(
                    f"mpirun does not say where rank 0 is: set MASTER_ADDR to its machine (mpirun -x MASTER_ADDR=HOST), or use {TORCHRUN}"
                )
            found |= {"RANK": found[rank], "WORLD_SIZE": found[size], "LOCAL_RANK": found.get(local_rank, "0")}
            found |= {"MASTER_ADDR": host, "MASTER_PORT": found.get("MASTER_PORT") or str(_port_of_job())}
            return


def _first_host(is_step: bool) -> str | None:
    """The first host of a SLURM step or job, whose list is like `rack[1-2]node[07-09,12],big1`."""
    hosts = os.environ.get("SLURM_STEP_NODELIST" if is_step else "SLURM_JOB_NODELIST", "")
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", hosts)
    return None if first is None else re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0])


def _port_of_job() -> int:
    """A port of this job's own, below those that systems give away, so that two jobs on one machine do not meet."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PMI_JOBID")
    job = "/".join(os.environ.get(name, "") for name in names).strip("/") or str(os.getppid())
    return 20000 + zlib.crc32(job.encode()) % 10000


def restarts() -> bool:
    """Whether the launcher starts processes again that have failed: torchrun --max-restarts, or SLURM's requeue.

    torchrun sets its largest number in each of its processes. Its count differs between nodes, as only the node that failed counts.
    """
    return any(int(os.environ.get(name) or 0) > 0 for name in ("TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT"))


def go_on(resume: str = "--resume auto") -> str:
    """The command that goes on with this run; in a process of a launcher, what to add to the launcher's."""
    if "flow_grpo.cli.app" not in sys.modules:
        return f'train(resume="{AUTO}")'
    if "RANK" in os.environ:
        return f"the same command and {resume}"
    words = ["flow-grpo", *sys.argv[1:]]
    resumes = any(word.startswith("--resume") for word in words)
    return shlex.join(words if resumes else [*words, *resume.split()])


# As `python -m flow_grpo`, but a folder flow_grpo/ in the working folder does not hide the package.
COMMAND = "import sys; sys.path[:1] == [''] and sys.path.append(sys.path.pop(0)); from flow_grpo.cli.app import run; run()"
TOLD = (USER_ERROR, TEMPORARY)  # exit statuses of a rank that has printed what is wrong


def launch(num_processes: int, words: list[str]) -> int:
    """Run `flow-grpo *words` in connected processes on this machine, by torch's launcher; returns an exit code. Across machines, use
    torchrun or `accelerate launch`.

    If one fails, the others are ended.

    Raises:
        RankDied: one ended without an error message.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

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


def first_dead(failures: "dict[int, ProcessFailure]", num_processes: int) -> tuple[int, int]:
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
