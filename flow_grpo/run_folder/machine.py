"""The machine and the versions of a run, in its machine.json."""

import json
import os
import platform
from pathlib import Path

import torch

from flow_grpo import __version__
from flow_grpo.files import write_atomic
from flow_grpo.policy.device_speed import device_name
from flow_grpo.run_folder import layout


def write_machine(folder: Path, device: torch.device, dtype: torch.dtype, processes: int) -> None:
    """Write down what a run begins on; `reader.machine_of` reads it.

    Args:
        processes: number of processes that share the run.
    """
    content = {
        "device": device_name(device),
        "cores": os.cpu_count(),
        "processes": processes,
        "dtype": str(dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flow_grpo": __version__,
    }
    write_atomic(folder / layout.MACHINE, json.dumps(content))
