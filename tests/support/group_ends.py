"""What two ranks assert of process groups after a run: in a module of its own, so that a forked rank can import it."""

from pathlib import Path

import torch

from flow_grpo.run_folder.metrics_file import read_metrics
from support import small_policy as small
from support.embedded import short_run


def train(folder: Path, *overrides: str) -> None:
    settings = ["steps=1", "device=cpu", "evaluation.prompts=null", *overrides]
    small.trainer(short_run(folder, *settings)).train()
    assert [row["step"] for row in read_metrics(folder) if "loss" in row] == [1]


def leave_no_group(folder: Path) -> None:
    """Two runs in a process, each with a group of its own."""
    for name in ("first", "second"):
        train(folder / name)
        assert not torch.distributed.is_initialized()


def keep_a_found_group(folder: Path) -> None:
    """The same in a group that is there."""
    torch.distributed.init_process_group("gloo")
    found = torch.distributed.group.WORLD
    for name in ("first", "second"):
        train(folder / name)
        assert torch.distributed.group.WORLD is found
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        assert total.item() == 2
    torch.distributed.destroy_process_group()
