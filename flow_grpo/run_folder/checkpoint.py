"""Checkpoints: written whole or not at all, read back exactly, a damaged one recognised."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import torch

from flow_grpo.files import atomic_folder, remove
from flow_grpo.run_folder.layout import MANIFEST, STATE, step_folder, step_folders


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Writes `folder/step_000100` with the state and a seal that holds its checksum; then drops the oldest beyond `keep`."""
    target = step_folder(folder, step)
    for stale in folder.glob(".step_*"):  # of a process that was killed while it wrote
        remove(stale)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with atomic_folder(target) as made:
        (made / STATE).write_bytes(buffer.getbuffer())
        seal = {"step": step, "sha256": hashlib.sha256(buffer.getbuffer()).hexdigest()}
        (made / MANIFEST).write_text(json.dumps(seal))
    for old in [other for other in steps(folder) if other != step][keep - 1 :]:
        remove(step_folder(folder, old))
    return target


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, damaged or not, the newest first."""
    return [step for step, _ in reversed(step_folders(folder))]


def delete_after(folder: Path, step: int) -> None:
    """Deletes the checkpoints of later steps: a run that goes on from `step` writes them anew."""
    for later in steps(folder):
        if later > step:
            remove(step_folder(folder, later))


def latest(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The state of the newest whole checkpoint, or None, and a warning for each damaged one that was passed over."""
    warnings: list[str] = []
    for step in steps(folder):
        try:
            return _read(folder, step), warnings
        except ValueError as error:
            warnings.append(
                f"the checkpoint {step_folder(folder, step)} is damaged ({error}) and was passed over for the one before."
            )
    return None, warnings


def read(folder: Path, step: int) -> dict[str, Any]:
    """The state of that step's checkpoint; ValueError if it is not there or damaged."""
    try:
        return _read(folder, step)
    except ValueError as error:
        raise ValueError(f"{folder} has no whole checkpoint of step {step}: {error}.") from error


def _read(folder: Path, step: int) -> dict[str, Any]:
    """ValueError, with a few words, for whatever is wrong with it."""
    files = step_folder(folder, step)
    try:
        content = (files / STATE).read_bytes()
        seal = json.loads((files / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError("a file is missing or unreadable") from error
    if not isinstance(seal, dict) or hashlib.sha256(content).hexdigest() != seal.get("sha256"):
        raise ValueError("its checksum is wrong")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch raises for a file that it has not written
        raise ValueError(f"torch can't read it, {type(error).__name__}") from error
    if not isinstance(state, dict) or state.get("step") != step:
        raise ValueError("it holds something else than the state of that step")
    return state
