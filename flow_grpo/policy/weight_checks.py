"""Checks of loaded weights: complete, finite, and of the shapes that are expected."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from flow_grpo.errors import FlowGRPOError


def check_weights(weights: Mapping[str, Tensor], source: str) -> None:
    """Raise ValueError, which begins with the source, if there are no weights, or some are missing, NaN or infinite."""
    if not any(value.numel() for value in weights.values()):
        raise FlowGRPOError(f"{source} holds no weights for the transformer of this model.")
    missing = [name for name, value in weights.items() if value.is_meta]
    if missing:
        raise FlowGRPOError(f"{source} lacks {len(missing)} of {len(weights)} tensors, of which {missing[0]} is the first.")
    broken = [name for name, value in weights.items() if value.is_floating_point() and not bool(value.isfinite().all())]
    if broken:
        raise FlowGRPOError(
            f"{source} holds values that are not finite, in {len(broken)} of {len(weights)} tensors, of which {broken[0]} is the "
            "first: take an earlier checkpoint of the run."
        )


def damaged_file(folder: Path, name: str | None = None) -> Path | None:
    """The first .safetensors file of a folder, or the one with this name, that is damaged or holds something else."""
    for file in [folder / name] if name else sorted(folder.glob("*.safetensors")):
        if file.suffix != ".safetensors":
            continue
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError):
            return file
    return None


def check_shapes(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise FlowGRPOError if a checkpoint's tensors have other names or shapes than the expected ones."""
    if {name: value.shape for name, value in state.items()} != {name: value.shape for name, value in expected.items()}:
        raise FlowGRPOError("the checkpoint's adapter has other modules or another rank than the config asks for.")
