"""Several processes on this machine, by torch's own launcher. Across machines, torchrun or `accelerate launch` do the same."""

import logging
import os

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

INTERRUPTED = 130


def launch(count: int, words: list[str]) -> int:
    """Runs `python -m flow_grpo *words` in `count` processes that know of each other; returns an exit code.

    One that fails ends the others; its own last words have said why.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        run(parse_args(["--standalone", f"--nproc-per-node={count}", "-m", "flow_grpo", *words]))
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    return 0
