"""The hardware that a run is planned for: a GPU from the makers' data sheets, or this machine."""

import re
from dataclasses import dataclass

import psutil
import torch

from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.devices import matmul_speed
from flow_grpo.text import suggest

GB, TERA = 1e9, 1e12
# memory in GB and dense bf16 TFLOP/s of the makers' data sheets
GPUS = {
    "A100": (80, 312),
    "H100": (80, 989),
    "H200": (141, 989),
    "B200": (180, 2250),
    "L4": (24, 121),
    "L40S": (48, 362),
    "RTX 3090": (24, 71),
    "RTX 4090": (24, 165),
    "RTX 5090": (32, 210),
}
OPTIONAL_WORDS = ("nvidia", "geforce", "tesla", "pcie", "sxm", "hbm", "nvl")  # prefixes of words that a name may have or not
UTILISATION = 0.45  # of such a peak, if it cannot be measured


@dataclass(frozen=True)
class Rates:
    """Floating point operations per second: in forward passes, in those with their backward pass, and how they are known."""

    forward: float
    update: float
    how: str = "as measured"

    @classmethod
    def of_peak(cls, peak: float) -> "Rates":
        """The rates of a device as a fraction of its peak, in operations a second."""
        return cls(UTILISATION * peak, UTILISATION * peak, f"{UTILISATION:.0%} of the peak of {peak / TERA:.3g} TFLOP/s")

    @classmethod
    def of_device(cls, device: torch.device, dtype: torch.dtype) -> "Rates":
        """The rates of a device of this machine, as a fraction of its speed in a large matrix product."""
        return cls.of_peak(matmul_speed(device, dtype))


@dataclass(frozen=True)
class Hardware:
    """The devices that a run is planned for.

    Attributes:
        memory: bytes of each device.
        peak_flops: the peak of each in floating point operations per second; None for this machine, where it is measured.
        count: devices.
        assumption: a sentence about what had to be assumed; "" if nothing.
    """

    name: str
    memory: float
    peak_flops: float | None
    count: int = 1
    cuda: bool = True
    assumption: str = ""

    @classmethod
    def from_name(cls, gpu: str, memory_gb: float | None = None, count: int = 1, tflops: float | None = None) -> "Hardware":
        """A GPU by its name; case, the maker's name and the memory may be left out.

        FlowGRPOError if it is not in the list and its memory is not given.
        """
        normalized, named_gb = _normalize_name(gpu)
        listed = {_normalize_name(name)[0]: name for name in GPUS}
        matches = (
            [listed[normalized]]
            if normalized in listed
            else [n for p, n in listed.items() if len(normalized) > 2 and p.endswith(normalized)]
        )
        memory_gb = memory_gb or named_gb
        if len(matches) == 1:
            memory, speed = GPUS[matches[0]]
            return cls(matches[0], (memory_gb or memory) * GB, (tflops or speed) * TERA, count)
        if memory_gb is None:
            hint = (
                f" If it is the memory in GB, write {normalized}GB."
                if normalized.isdecimal()
                else suggest(normalized, listed)
            )
            raise FlowGRPOError(
                f"there is no GPU {gpu} in the list.{hint} Give one of {', '.join(GPUS)}; for another one set "
                "--gpu-memory, and --gpu-tflops if you know it."
            )
        if tflops is not None:
            return cls(gpu, memory_gb * GB, tflops * TERA, count)
        closest = min(GPUS, key=lambda name: (abs(GPUS[name][0] - memory_gb), GPUS[name][1]))
        assumption = (
            f"{gpu} is not in the list: it is assumed to be as fast as the {closest}, {GPUS[closest][1]} TFLOP/s in bf16; set "
            "--gpu-tflops for an exact estimate."
        )
        return cls(gpu, memory_gb * GB, GPUS[closest][1] * TERA, count, assumption=assumption)

    @classmethod
    def of_this_machine(cls, device: str, memory_gb: float | None = None, count: int = 1) -> "Hardware":
        """This machine's GPU or CPU."""
        cuda = torch.device(device).type == "cuda"
        name = torch.cuda.get_device_name(device) if cuda else "this CPU"
        memory = torch.cuda.get_device_properties(device).total_memory if cuda else psutil.virtual_memory().total
        return cls(name, memory_gb * GB if memory_gb else memory, None, count, cuda)


def _normalize_name(name: str) -> tuple[str, float | None]:
    """A GPU's name without optional words, and the memory in GB if it names one."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(\d+) *gb\b", r"\1gb", name.lower()))
    sizes = [float(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)]
    required = [word for word in words if not word.startswith(OPTIONAL_WORDS) and not re.fullmatch(r"\d+gb", word)]
    return "".join(required), next(iter(sizes), None)
