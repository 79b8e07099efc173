"""Create a run folder, or check that it can be resumed."""

import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from flow_grpo import __version__
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import WriteError, remove, write_atomic
from flow_grpo.policy.device_speed import device_name
from flow_grpo.run_folder import checkpoint, layout
from flow_grpo.run_folder.lock import locked
from flow_grpo.run_folder.metrics_file import has_metrics, logged_best_step, read_metrics, rewind
from flow_grpo.run_folder.samples import delete_images_after


def is_begun(folder: Path) -> bool:
    """Whether the folder holds a run: metrics, readable or not, or a checkpoint after the start."""
    return has_metrics(folder) or any(checkpoint.steps(folder / layout.CHECKPOINTS))


def check_begun(folder: Path, resume: bool) -> None:
    """Check that the folder holds a run exactly if one is to be resumed. FlowGRPOError if not."""
    begun = is_begun(folder)
    if not resume and begun:
        raise FlowGRPOError(
            f"{folder} already holds a run: go on with it by --resume, or set another folder by output_dir=..."
        )
    if resume and not checkpoint.steps(folder / layout.CHECKPOINTS):
        again = "set another folder by output_dir=..." if begun else "start the run without --resume"
        raise FlowGRPOError(f"{folder} has no checkpoint to resume from: {again}, or see whether output_dir=... is right.")


def open_run_folder(args: FlowGRPOConfig, resume: bool, lock: ExitStack, info: Callable[[str], None]) -> None:
    """Create the run folder, or check that it can be resumed, and hold its lock until `lock` closes.

    Raises:
        FlowGRPOError: the folder holds a run that is not to be resumed, holds none that could be, or another process trains in it.
    """
    folder = Path(args.output_dir)
    if resume:  # before anything is created
        check_begun(folder, resume)
    lock.enter_context(locked(folder, info))
    if resume:
        return
    check_begun(folder, resume)  # another process may have begun it a moment ago
    delete_images_after(folder, -1)  # of a run that was lost before its first checkpoint
    write_atomic(folder / layout.CONFIG, args.to_yaml())


def write_machine(folder: Path, device: torch.device, dtype: torch.dtype, processes: int) -> None:
    """Write down what a run begins on; `reader.machine_of` reads it.

    Args:
        processes: number of processes that share the run.
    """
    content = {
        "device": device_name(device),
        "cores": os.cpu_count(),
        "processes": processes,
        "dtype": str(dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flow_grpo": __version__,
    }
    write_atomic(folder / layout.MACHINE, json.dumps(content))


def newest_checkpoint(args: FlowGRPOConfig, info: Callable[[str], None]) -> dict[str, Any]:
    """Read the newest readable checkpoint of the run folder.

    Raises:
        FlowGRPOError: all are damaged, the settings have changed since, or flow-grpo 0.2 wrote it.
    """
    folder = Path(args.output_dir)
    state, warnings = checkpoint.latest(folder / layout.CHECKPOINTS)
    for warning in warnings:
        info(f"warning: {warning}")
    if state is None:
        raise FlowGRPOError(f"all checkpoints of {folder} are damaged: start another run by output_dir=...")
    check_settings_unchanged(args)
    if "microbatch" not in state.get("memory", {}):
        raise FlowGRPOError(
            f"{folder} was written by flow-grpo 0.2 or before, which this version can't go on with: start a new run."
        )
    return state


def rewind_run(folder: Path, step: int) -> str | None:
    """Delete what a run has written after a step: checkpoints, the weights of a later best evaluation, images and rows of metrics.

    Returns a sentence on lines that are no rows of metrics, which are moved, or None if there are none.
    """
    checkpoint.delete_after(folder / layout.CHECKPOINTS, step)
    if (logged_best_step(read_metrics(folder)) or 0) > step:  # before its row is deleted
        remove(folder / layout.BEST)
    delete_images_after(folder, step)
    return rewind(folder, step)


def check_settings_unchanged(args: FlowGRPOConfig) -> None:
    """FlowGRPOError if a setting that changes the numbers is not what the run folder's config says."""
    file = Path(args.output_dir) / layout.CONFIG
    former = FlowGRPOConfig.from_yaml(file) if file.exists() else args
    for name, (then, now) in former.differences(args).items():
        raise FlowGRPOError(
            f"{args.output_dir} was begun with {name}={then!r}, not {now!r}: resume it with the same settings, or start another "
            "run by output_dir=..."
        )


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Raise FlowGRPOError that says what is left of the run when something could not be written."""
    try:
        yield
    except (WriteError, OSError) as error:
        what = str(error) if isinstance(error, WriteError) else f"the system refused to read or write: {error}."
        saved = checkpoint.steps(folder / layout.CHECKPOINTS)
        lost = f"What came after the checkpoint of step {saved[0]} is lost" if saved else "Nothing is saved yet"
        again = "go on with --resume" if saved else "start the run again"
        raise FlowGRPOError(f"{what} {lost}: when it can be written, {again}.") from error
