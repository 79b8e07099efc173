"""Checkpoints: written whole or not at all, read back exactly, a damaged one recognised."""

import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import torch

STATE, SEAL = "state.pt", "checkpoint.json"


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Writes `folder/step_000100` with the state and a seal that holds its checksum; then drops the oldest beyond `keep`.

    Everything goes to a folder of another name first, which is renamed when it is complete.
    """
    target, partial = folder / f"step_{step:06d}", folder / f".partial_{step:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    (partial / STATE).write_bytes(buffer.getvalue())
    seal = {"step": step, "sha256": hashlib.sha256(buffer.getvalue()).hexdigest()}
    (partial / SEAL).write_text(json.dumps(seal))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    for old in [other for other in _folders(folder) if other != target][keep - 1 :]:
        shutil.rmtree(old)
    return target


def drop_after(folder: Path, step: int) -> None:
    """Deletes the checkpoints of later steps: a run that goes on from `step` writes them anew."""
    for later in _folders(folder):
        if later.name > f"step_{step:06d}":
            shutil.rmtree(later)


def latest(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The state of the newest whole checkpoint, or None, and a warning for each damaged one that was passed over."""
    warnings: list[str] = []
    for candidate in _folders(folder):
        try:
            return _read(candidate), warnings
        except (OSError, ValueError, KeyError) as error:
            warnings.append(f"the checkpoint {candidate} is damaged ({error}) and was passed over for the one before.")
    return None, warnings


def read(folder: Path, step: int) -> dict[str, Any]:
    """The state of that step's checkpoint; ValueError if it is not there or damaged."""
    try:
        return _read(folder / f"step_{step:06d}")
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} has no whole checkpoint of step {step}.") from error


def _read(folder: Path) -> dict[str, Any]:
    content = (folder / STATE).read_bytes()
    seal = json.loads((folder / SEAL).read_text())
    if hashlib.sha256(content).hexdigest() != seal["sha256"]:
        raise ValueError("its checksum is wrong")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _folders(folder: Path) -> list[Path]:
    """Checkpoints, the newest first."""
    return sorted(folder.glob("step_*"), reverse=True)
