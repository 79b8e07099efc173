"""The speed of a device in matrix products, against which a run's own speed is measured."""

import functools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from flow_grpo.files import WriteError, write_atomic
from flow_grpo.policy.devices import device_name

CACHE = Path("~/.cache/flow-grpo/matmul_speed.json")


def matmul_speed(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Floating point operations per second of a large matrix product on this device; the fastest of several runs."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device).to(dtype)
    return 2 * n**3 / fastest(lambda: a @ a, device, seconds)


def fastest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The seconds that `work` takes after a warm-up: the fastest of as many runs as fit into `seconds`, at least two."""
    work()  # the first one chooses its kernels
    took: list[float] = []
    while len(took) < 2 or sum(took) < seconds:
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - started)
    return min(took)


@functools.cache
def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The highest `matmul_speed` measured on this device so far, also by earlier runs on this machine, which `CACHE` keeps.

    It is measured once in a process. Another program that used the device then would make the speed of one run too small.
    """
    threads = "" if device.type == "cuda" else f" with {torch.get_num_threads()} threads"
    key = f"{device_name(device)}{threads}, {str(dtype).removeprefix('torch.')}, torch {torch.__version__}"
    file = CACHE.expanduser()
    try:
        known = {str(name): float(speed) for name, speed in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError, TypeError):  # none yet, or damaged: it is measured anew
        known = {}
    # `randn` must not move the run's random numbers
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        speed = max(known.get(key, 0.0), matmul_speed(device, dtype, 0.2))
    if speed > known.get(key, 0.0):
        with suppress(OSError, WriteError):  # a home folder that can't be written
            write_atomic(file, json.dumps({**known, key: speed}, indent=1))
    return speed
