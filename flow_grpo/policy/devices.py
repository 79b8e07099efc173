"""The device and the dtype that a model is computed in."""

import ctypes

import torch

from flow_grpo.text import first_line

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
KEPT_BLOCK = 2**30  # bytes: larger blocks are given back
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def usable_device(device: str | None) -> str:
    """The device, by default the accelerator if there is one, else the CPU. ValueError if torch cannot use it here."""
    device = device or default_device()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device={device} can't be used here: {first_line(error)}") from error
    return device


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


def keep_freed_memory() -> None:
    """Let the C library of Linux keep freed memory for the next step, as CUDA's allocator does; elsewhere nothing happens.

    By default it gives large blocks back, and the kernel clears each page before a step gets it again (docs/log.md: 2026-11-23).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
