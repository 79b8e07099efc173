"""The hardware that a run is planned for, a GPU from the makers' data sheets or this machine, and its speed at a model's own blocks."""

import copy
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flow_grpo.errors import FlowGRPOError
from flow_grpo.plan.meta_pipeline import BlockCall
from flow_grpo.policy.devices import fastest, machine_memory, matmul_speed
from flow_grpo.policy.memory import FLOAT8, cast_layers
from flow_grpo.policy.step_meter import ModelFlopCounter
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
SECONDS = 0.2  # of each measurement, at least


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
        endings = [listed[key] for key in listed if len(normalized) > 2 and key.endswith(normalized)]
        matches = [listed[normalized]] if normalized in listed else endings
        memory_gb = memory_gb or named_gb
        if len(matches) == 1:
            memory, speed = GPUS[matches[0]]
            return cls(matches[0], (memory_gb or memory) * GB, (tflops or speed) * TERA, count)
        if memory_gb is None:
            in_gb = f" If it is the memory in GB, write {normalized}GB."
            hint = in_gb if normalized.isdecimal() else suggest(normalized, listed)
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
        memory = torch.cuda.get_device_properties(device).total_memory if cuda else machine_memory()
        return cls(name, memory_gb * GB if memory_gb else memory, None, count, cuda)


def _normalize_name(name: str) -> tuple[str, float | None]:
    """A GPU's name without optional words, and the memory in GB if it names one."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(\d+) *gb\b", r"\1gb", name.lower()))
    sizes = [float(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)]
    required = [word for word in words if not word.startswith(OPTIONAL_WORDS) and not re.fullmatch(r"\d+gb", word)]
    return "".join(required), next(iter(sizes), None)


def measure_rates(calls: list[BlockCall], device: torch.device, dtype: torch.dtype, meta: AbstractContextManager) -> Rates:
    """The rates of all blocks together, in forward passes and in those with a backward pass.

    Args:
        dtype: of autocast, and of all tensors that are not float32.
        meta: a context in which the blocks run on the meta device, where their operations are counted.
    """
    operations, seconds = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}
    for call in calls:
        with ModelFlopCounter() as counter, meta:
            _run(call, False)
        forward = counter.get_total_flops()
        with counter, meta:
            _run(call, True)
        real_call = _real(call, device, dtype)
        for training, count in ((False, forward), (True, counter.get_total_flops())):
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                elapsed = fastest(lambda: _run(real_call, training), device, SECONDS)  # noqa: B023
            operations[training] += call.count * count
            seconds[training] += call.count * elapsed
    rates = {training: operations[training] / seconds[training] for training in operations}
    how = f"{rates[True] / TERA:.3g} TFLOP/s, measured on blocks of the model"
    threads = f" with {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return Rates(rates[False], rates[True], how + threads)


def _run(call: BlockCall, training: bool) -> None:
    """Run a forward pass, and a backward pass if something requires gradients."""
    with torch.set_grad_enabled(training):
        result = call.block(*call.args, **call.kwargs)
    outputs = [leaf for leaf in _tensors(result) if leaf.requires_grad]
    if training and outputs:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    for leaf in (*call.block.parameters(), *_tensors((call.args, call.kwargs))):
        leaf.grad = None


def _real(call: BlockCall, device: torch.device, dtype: torch.dtype) -> BlockCall:
    """The call with random numbers on a device."""

    def numbers(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return torch.ones(leaf.shape, dtype=leaf.dtype, device=device)
        target_dtype = leaf.dtype if leaf.dtype == torch.float32 or leaf.is_complex() else dtype
        return torch.randn(leaf.shape, dtype=target_dtype, device=device).requires_grad_(leaf.requires_grad)

    block = copy.deepcopy(call.block).to_empty(device=device)
    for value in (*block.parameters(), *block.buffers()):
        if value.is_floating_point():
            target_dtype = value.dtype if value.dtype in (torch.float32, FLOAT8) else dtype
            value.data = torch.empty(value.shape, device=device).normal_(std=0.02).to(target_dtype)
    for layer in cast_layers(block):
        layer.compute_dtype = dtype
    args, kwargs = tree_map(numbers, (call.args, call.kwargs))
    return BlockCall(block, args, kwargs, call.count)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
