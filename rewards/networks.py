"""The network of a reward: its device, and its published weights without missing or unused tensors."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.interrupt import current_gpu

AUTO = "auto"  # the GPU if there is one, else the CPU


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


def load_tensors(reward: str, file: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors, .pt or .pth file by name.

    Raises:
        FlowGRPOError: there is no such file, or it holds no tensors by name.
    """
    if not Path(file).is_file():
        raise FlowGRPOError(f"{reward}: there is no weights file {file}; give weights= an existing one.")
    try:
        if Path(file).suffix == ".safetensors":
            return load_file(file)
        tensors: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FlowGRPOError(
            f"{reward}: {file} can't be read as weights ({type(error).__name__}); download it again."
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise FlowGRPOError(f"{reward}: {file} is not a table of tensors by name; give weights= the published file.")
    return tensors


def load_exactly(reward: str, module: torch.nn.Module, state: dict[str, Tensor], file: str | Path) -> None:
    """Load a state dict into a module whose tensors it must match exactly, in names and shapes.

    Raises:
        FlowGRPOError: tensors are missing, unused or of another shape.
    """
    wanted = {name: value.shape for name, value in module.state_dict().items()}
    shapes = {name: value.shape for name, value in state.items()}
    check_keys(reward, file, missing=wanted.keys() - shapes.keys(), unknown=shapes.keys() - wanted.keys())
    check_keys(reward, file, missing={f"{name} {tuple(wanted[name])}" for name in wanted if wanted[name] != shapes[name]})
    module.load_state_dict(state)


def check_keys(reward: str, file: str | Path, missing: set[str], unknown: set[str] | None = None) -> None:
    """Raise FlowGRPOError if tensors are missing from a file or unknown."""
    for verb, names in (("lacks", missing), ("has unknown", unknown or set())):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise FlowGRPOError(
                f"{reward}: {file} {verb} {len(names)} tensors ({some}{', ...' if len(names) > 3 else ''}), so it is "
                "not this reward's weights; give weights= the published file, or one of the same format."
            )
