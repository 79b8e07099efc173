"""Digests of what a run depends on besides its settings: weights, prompts, and the user's code.

A run folder keeps them, and a resumed run compares them: a file may move, but not change. Not seen are modules that a reward's file
imports, and what a server runs.
"""

import hashlib
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import PromptSet
from flow_grpo.policy.hub import INDEX, looks_like_hub_id, resolve_lora
from flow_grpo.rewards import REGISTRY

WHOLE_FILE = 16 << 20  # bytes up to which a file is read as a whole
BLOCKS, BLOCK = 64, 1 << 16  # of a larger one, so many blocks of so many bytes, evenly spaced
WEIGHTS = (".safetensors", ".bin", ".json")  # of a folder, the files that count


def digests_of_inputs(
    args: FlowGRPOConfig,
    train_set: PromptSet,
    eval_set: PromptSet | None,
    reward_funcs: Iterable[Any] = (),
) -> dict[str, str]:
    """The digest of each input except the model, if the input is there, by the dotted name of its setting.

    A reward that is given as a function has the name of that.

    Args:
        reward_funcs: functions and classes that the trainer was given.
    """
    found: dict[str, str | None] = {
        "prompts": train_set.fingerprint(),
        "evaluation.prompts": None if eval_set is None else eval_set.fingerprint(),
        "lora.init_from": _lora(args.lora.init_from) if args.lora and args.lora.init_from else None,
    }
    for name, reward in args.rewards.items():
        found[f"rewards.{name.rpartition(':')[2]}"] = _code(name)
        for option, value in reward.options.items():
            found[f"rewards.{name.rpartition(':')[2]}.options.{option}"] = _path(value)
    for function in (one for one in reward_funcs if not isinstance(one, str)):
        name = f"rewards.{getattr(function, '__name__', type(function).__name__)}"
        found[name] = found.get(name) or _source(function)
    for number, (_, stage) in enumerate(args.resolved_stages()):
        prefix = f"stages.{number}." if args.stages else ""
        found[f"{prefix}objective.name"] = _code(stage.objective.name)
        found[f"{prefix}objective.advantage"] = _code(stage.objective.advantage)
        found[f"{prefix}objective.dataset"] = _path(stage.dataset)
        for place, anchor in enumerate(stage.objective.anchors):
            found[f"{prefix}objective.anchors.{place}.lora"] = _lora(anchor.lora) if anchor.lora else None
    return {name: digest for name, digest in found.items() if digest is not None}


def digests_of_model(model: str | None, dtype: torch.dtype) -> dict[str, str]:
    """The digest of the folder or hub id that the policy was loaded from, if its files are there, and the policy's dtype."""
    digest = _model(model)
    return {"dtype": str(dtype).removeprefix("torch."), **({} if digest is None else {"model": digest})}


def file_digest(file: Path) -> str:
    """The digest of a file's size and content; of a large one, of parts of it, so that a model of 20 GB takes no minute."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        if size <= WHOLE_FILE:
            digest.update(stream.read())
        for block in range(BLOCKS if size > WHOLE_FILE else 0):
            stream.seek(block * (size - BLOCK) // (BLOCKS - 1))
            digest.update(stream.read(BLOCK))
    return digest.hexdigest()


def _joined(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()


def _folder(folder: Path, pattern: str) -> str | None:
    files = sorted(file for file in folder.glob(pattern) if file.suffix in WEIGHTS and file.is_file())
    return _joined(f"{file.relative_to(folder)} {file_digest(file)}" for file in files) if files else None


def _model(source: str | None) -> str | None:
    """Of the parts of a model, whose files are in folders of their own; None if it was built in memory."""
    if not source or Path(source).is_dir():
        return _folder(Path(source), "*/*") if source else None
    cached = try_to_load_from_cache(source, INDEX) if looks_like_hub_id(source) else None
    return _folder(Path(cached).parent, "*/*") if isinstance(cached, str) else None


def _lora(init_from: str) -> str | None:
    source, file = resolve_lora(init_from)
    return file_digest(Path(source) / file) if file else _folder(Path(source), "*")


def _path(value: Any) -> str | None:
    """Of a file, or of the weights in a folder; None if the value is neither's path."""
    path = Path(value) if isinstance(value, str) and len(value) < 1000 else None
    try:
        if path is not None and path.is_file():
            return file_digest(path)
        return _folder(path, "*") if path is not None and path.is_dir() else None
    except (OSError, ValueError):  # ValueError: a text with a zero byte
        return None


def _code(name: str) -> str | None:
    """Of the file that a function of the user's is in, `file.py:function` or `module:function`; None for one of ours."""
    path, _, function = name.rpartition(":")
    if not path or name in REGISTRY:
        return None
    file = path if path.endswith(".py") else getattr(sys.modules.get(path), "__file__", None)
    digest = None if file is None else _path(file)
    return None if digest is None else _joined((function, digest))


def _source(function: Any) -> str | None:
    """Of the source of a function or a class."""
    try:
        has_source = inspect.isroutine(function) or inspect.isclass(function)
        return _joined([inspect.getsource(function if has_source else type(function))])
    except (OSError, TypeError):
        return None
