"""The GPU that a thread uses where its code names none."""

from typing import Any

import torch


def current_gpu() -> int | None:
    """The index of this thread's GPU; None if this process has not used one yet."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def with_index(device: Any) -> Any:
    """The device, `cuda` with the index of this thread's GPU, so that other threads and processes take it for the same one."""
    gpu = current_gpu()
    return f"cuda:{gpu}" if str(device) == "cuda" and gpu is not None else device
