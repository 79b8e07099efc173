"""The device and the dtype that a model is computed in."""

import torch

from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.device_speed import bf16_speedup
from flow_grpo.text import first_line

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FASTER = 1.2  # smallest factor by which bf16 is faster than fp32 on a CPU where it is chosen


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
