"""The device and the dtype that a model is computed in, and how fast the device is in it."""

import functools
import json
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import nn

from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import expanded, write_atomic
from flow_grpo.text import first_line

# the memory that a container may use, of both versions of Linux's control groups
MEMORY_LIMITS = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FASTER = 1.2  # smallest factor by which bf16 is faster than fp32 on a CPU where it is chosen
CACHE = Path("~/.cache/flow-grpo/device_speed.json")
ROUNDS = 5
SLOW = 0.3  # seconds of a large matrix product on a CPU that has no units for its dtype
COMPILE_SECONDS = 120.0  # of compiling a transformer's blocks until it is measured: about that of SD3.5 Medium on an H200


def machine_memory() -> int:
    """Bytes of this machine's memory, or of what this container may use of it."""
    limits = [file.read_text().strip() for file in MEMORY_LIMITS if file.is_file()]
    return min([psutil.virtual_memory().total, *(int(limit) for limit in limits if limit.isdecimal())])  # else it is `max`


def usable_device(device: str | None) -> str:
    """The device, by default the accelerator if there is one, else the CPU. FlowGRPOError if torch cannot use it here."""
    device = device or default_device()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise FlowGRPOError(f"device={device} can't be used here: {first_line(error)}") from error
    return device


def default_device() -> str:
    """The device to use: cuda, else mps (untested: no such machine was at hand), else cpu."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def default_dtype(device: str) -> torch.dtype:
    """The dtype to use: bf16 where the device is faster in it, else fp32."""
    kind = torch.device(device).type
    if kind == "cpu":
        return torch.bfloat16 if bf16_speedup() >= FASTER else torch.float32
    native = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float32


def device_name(device: torch.device) -> str:
    """The name of a GPU, or of the CPU if the system reports it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def matmul_speed(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Floating point operations per second of a large matrix product on this device; the fastest of several runs."""
    if device.type == "cuda":
        return _product_speed(8192, device, dtype, seconds)
    small = _product_speed(256, device, dtype, 0.05)
    if 2 * 1024**3 / small > SLOW:  # in a dtype that a CPU has no units for, a large product takes seconds
        return small
    return max(small, _product_speed(1024, device, dtype, seconds))


def _product_speed(n: int, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n**3 / fastest(lambda: a @ a, device, seconds)


def fastest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The seconds that `work` takes after a warm-up: the fastest of as many runs as fit into `seconds`, at least two."""
    work()  # the first one chooses its kernels
    times: list[float] = []
    while len(times) < 2 or sum(times) < seconds:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


@functools.cache
def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The highest `matmul_speed` measured on this device so far, also by earlier runs on this machine, which `CACHE` keeps.

    It is measured once in a process. Another program that used the device then would make the speed of one run too small. Where no
    memory is left to measure it, it is that of earlier runs, or 0.
    """
    # earlier versions did not wait for GPUs other than the first: the word leaves out what they kept
    how = ", synchronized" if device.type == "cuda" else f" with {torch.get_num_threads()} threads"
    key = f"{device_name(device)}{how}, {str(dtype).removeprefix('torch.')}, torch {torch.__version__}"
    speed = known = _read_cache(CACHE).get(key, 0.0)
    # `randn` must not move the run's random numbers
    with torch.random.fork_rng([device] if device.type == "cuda" else []), suppress(torch.OutOfMemoryError):
        speed = max(known, matmul_speed(device, dtype, 0.2))
    if speed > known:
        _add_to_cache(CACHE, key, speed)
    return speed


@functools.cache
def bf16_speedup() -> float:
    """How many times as fast this CPU is in bf16 as in fp32, at a transformer's layer forwards and backwards; 0 if it has no bf16.

    It depends on the CPU: with AVX-512 bf16 one was four times as fast and another half as fast (dev/LOG.md). It is measured once on
    a machine and kept in `CACHE`, so that every run there takes the same dtype.
    """
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return 0.0  # without the instructions, a layer would take a hundred times as long
    key = f"{device_name(torch.device('cpu'))}, bfloat16 to float32, torch {torch.__version__}"
    known = _read_cache(CACHE)
    if key not in known:
        known[key] = _measure_bf16_speedup()
        _add_to_cache(CACHE, key, known[key])
    return known[key]


def compile_error(device: torch.device) -> str | None:
    """Why torch.compile does not work on this device, such as a missing C compiler; None if it works. It takes seconds."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
    except Exception as error:  # each part of the compiler has its own
        return first_line(error)
    return None


def compile_seconds(model: str, device: torch.device) -> float:
    """Seconds that compiling the blocks of a model took last on this device, or `COMPILE_SECONDS`."""
    return _read_cache(_compile_cache()).get(f"{model}, {device_name(device)}, torch {torch.__version__}", COMPILE_SECONDS)


def keep_compile_seconds(model: str, device: torch.device, seconds: float) -> None:
    """Keep what `compile_seconds` returns from now on."""
    _add_to_cache(_compile_cache(), f"{model}, {device_name(device)}, torch {torch.__version__}", max(seconds, 0.0))


def _compile_cache() -> Path:
    """The file of these seconds. It lies beside torch's kernels: where they are deleted, compiling takes longer again."""
    # imports the compiler
    from torch._inductor.codecache import cache_dir

    return Path(cache_dir()) / "flow_grpo_seconds.json"


def _measure_bf16_speedup() -> float:
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    with torch.random.fork_rng([]):
        layers = {dtype: _layer(dtype) for dtype in seconds}
    for _ in range(ROUNDS):  # in turns, since another program may come and go
        for dtype, layer in layers.items():
            seconds[dtype].append(fastest(layer, torch.device("cpu"), 0.0))
    return min(seconds[torch.float32]) / min(seconds[torch.bfloat16])


def _layer(dtype: torch.dtype) -> Callable[[], None]:
    """A forward and backward pass of a transformer's feed-forward layer with weights in that dtype."""
    layer = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to("cpu", dtype)
    x = torch.randn(1024, 256, device="cpu", dtype=dtype, requires_grad=True)

    def work() -> None:
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = layer(x).square().sum()
        loss.backward()

    return work


def _read_cache(file: Path) -> dict[str, float]:
    """Measurements of this machine's runs."""
    try:
        content = json.loads(expanded(file).read_text(encoding="utf-8"))
        return {str(name): float(number) for name, number in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):  # none yet, or damaged: it is measured again
        return {}


def _add_to_cache(file: Path, key: str, number: float) -> None:
    with suppress(OSError, FlowGRPOError):  # a home folder that can't be written, or none
        write_atomic(expanded(file), json.dumps({**_read_cache(file), key: number}, indent=1))
