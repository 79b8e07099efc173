"""What a run has left, as the tests compare it."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from flow_grpo.run_folder.metrics_file import read_metrics

# prefixes of metrics that depend on the machine, so that no run repeats them
MEASURED = ("time/", "speed/", "memory/")


def numbers(folder: Path) -> list[dict]:
    """The metrics without the seconds, which no run repeats."""
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in read_metrics(folder)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "lora" / "pytorch_lora_weights.safetensors")


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
