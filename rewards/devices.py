"""The device of a reward's network, and the GPU that a thread uses where its code names none."""

from typing import Any

import torch

from flow_grpo.errors import FlowGRPOError

AUTO = "auto"  # the GPU if there is one, else the CPU


def current_gpu() -> int | None:
    """The index of this thread's GPU; None if this process has not used one yet."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def with_index(device: Any) -> Any:
    """The device, `cuda` with the index of this thread's GPU, so that other threads and processes take it for the same one."""
    gpu = current_gpu()
    return f"cuda:{gpu}" if str(device) == "cuda" and gpu is not None else device


def usable_device(reward: str, name: str) -> torch.device:
    """The device by its name or `auto`; a GPU with the index of this thread's one, if the name has none.

    Raises:
        FlowGRPOError: torch can't use it here. The message begins with `reward`.
    """
    try:
        device = ("cuda" if torch.cuda.is_available() else "cpu") if name == AUTO else name
        torch.empty(0, device=device)
        return torch.device(with_index(device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise FlowGRPOError(
            f"{reward}: device={name} can't be used here: {reason}; set device=cpu, or leave it out."
        ) from error
