"""Checkpoints: written atomically, read back exactly, checked by a checksum."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import torch

from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import MAX_JSON, atomic_folder, regular_bytes, remove
from flow_grpo.run_folder.layout import MANIFEST, STATE, step_folder, step_folders


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write `folder/step_000100` with the state and a manifest of its checksum; then delete the oldest beyond `keep`."""
    target = step_folder(folder, step)
    for stale in folder.glob(".step_*"):  # from a process that was killed while writing
        remove(stale)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with atomic_folder(target) as new_folder:
        (new_folder / STATE).write_bytes(buffer.getbuffer())
        manifest = {"step": step, "sha256": hashlib.sha256(buffer.getbuffer()).hexdigest()}
        (new_folder / MANIFEST).write_text(json.dumps(manifest))
    for old in [saved for saved in steps(folder) if saved != step][keep - 1 :]:
        remove(step_folder(folder, old))
    return target


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, damaged or not, newest first."""
    return [step for step, _ in reversed(step_folders(folder))]


def delete_after(folder: Path, step: int) -> None:
    """Delete the checkpoints of later steps, which a run resumed at `step` writes again."""
    for later in steps(folder):
        if later > step:
            remove(step_folder(folder, later))


def latest(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The state of the newest undamaged checkpoint, or None, and a warning for each damaged one that was skipped."""
    warnings: list[str] = []
    for step in steps(folder):
        try:
            return _read(folder, step), warnings
        except ValueError as error:
            warnings.append(
                f"the checkpoint {step_folder(folder, step)} is damaged ({error}); using the previous checkpoint."
            )
    return None, warnings


def read(folder: Path, step: int) -> dict[str, Any]:
    """The state of a step's checkpoint. FlowGRPOError if it is missing or damaged."""
    try:
        return _read(folder, step)
    except ValueError as error:
        raise FlowGRPOError(f"{folder} has no whole checkpoint of step {step}: {error}.") from error


def _read(folder: Path, step: int) -> dict[str, Any]:
    """The state. Raises FlowGRPOError with a short reason if the checkpoint can't be used."""
    checkpoint_folder = step_folder(folder, step)
    try:
        content = regular_bytes(checkpoint_folder / STATE)
        manifest = json.loads(regular_bytes(checkpoint_folder / MANIFEST, MAX_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise FlowGRPOError("a file is missing or unreadable") from error
    if not isinstance(manifest, dict) or hashlib.sha256(content).hexdigest() != manifest.get("sha256"):
        raise FlowGRPOError("its checksum is wrong")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for files that it has not written
        raise FlowGRPOError(f"torch can't read it, {type(error).__name__}") from error
    if not isinstance(state, dict) or state.get("step") != step:
        raise FlowGRPOError("it holds something else than the state of that step")
    return state
