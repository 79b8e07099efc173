"""What launchers say in their environment: which process this is, whether they restart it, and their own command."""

import os
import re
import shlex
import sys
import zlib
from pathlib import Path

import psutil

from flow_grpo.distributed.parent import LAUNCHER
from flow_grpo.errors import FlowGRPOError

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
    """The first host of a SLURM step or job, whose list is like `node[07-09,12],big1`."""
    hosts = os.environ.get("SLURM_STEP_NODELIST" if is_step else "SLURM_JOB_NODELIST", "")
    first = re.match(r"([^,\[]+)(?:\[(\w+)[^]]*\]([^,]*))?", hosts)
    return None if first is None else "".join(part or "" for part in first.groups())


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
