"""The device and the dtype that a model is computed in."""

import platform
from pathlib import Path

import torch

from flow_grpo.text import first_line

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def usable_device(device: str | None) -> str:
    """The device, by default the accelerator if there is one, else the CPU. ValueError if torch cannot use it here."""
    device = device or default_device()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device={device} can't be used here: {first_line(error)}") from error
    return device


def device_name(device: torch.device) -> str:
    """The name of a GPU, or of the CPU if the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def default_device() -> str:
    """The device to use: cuda, else mps (untested: no such machine was at hand), else cpu."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def default_dtype(device: str) -> torch.dtype:
    """The dtype to use: bf16 where the device is faster in it, else fp32.

    A CPU is faster in bf16 with matrix units (AMX). With AVX-512 bf16 alone it is slower than in fp32 (docs/log.md), and without
    either a hundred times slower.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        native = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    else:
        native = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float32
