"""`key.sub=value` pairs, written over the settings of a config file."""

import re
from typing import Any

from flow_grpo.config.loading import parse_yaml
from flow_grpo.errors import FlowGRPOError

SIZES = ("prompts_per_step", "images_per_prompt")
REWARD_SECTIONS = [["rewards"], ["evaluation", "rewards"]]  # settings whose keys are names of rewards


def expand_rewards(values: dict[str, Any]) -> dict[str, Any]:
    """Make `{ocr: {weight: 1.0}}` of `[ocr]` and of `{ocr: 1.0}`, in `evaluation` too."""
    if isinstance(evaluation := values.get("evaluation"), dict):
        values = {**values, "evaluation": expand_rewards(evaluation)}
    rewards = values.get("rewards")
    if isinstance(rewards, list) and all(isinstance(name, str) for name in rewards):
        rewards = dict.fromkeys(rewards, 1.0)
    if not isinstance(rewards, dict):
        return values
    return {**values, "rewards": {name: _expand_reward(setting) for name, setting in rewards.items()}}


def _expand_reward(setting: Any) -> Any:
    return {"weight": setting} if isinstance(setting, int | float) else {} if setting is None else setting


def expand_objective(values: dict[str, Any]) -> dict[str, Any]:
    """Make `{name: grpo}` of the objective `grpo`, in stages too."""
    if isinstance(name := values.get("objective"), str):
        values = {**values, "objective": {"name": name}}
    if isinstance(stages := values.get("stages"), list):
        values = {**values, "stages": [expand_objective(stage) if isinstance(stage, dict) else stage for stage in stages]}
    return values


def expand_trackers(values: dict[str, Any]) -> dict[str, Any]:
    """Make `{wandb: {}}` of `wandb` and of `[wandb]`."""
    trackers = values.get("trackers")
    names = [trackers] if isinstance(trackers, str) else trackers
    if not isinstance(names, list | dict):
        return values
    full = dict(names) if isinstance(names, dict) else dict.fromkeys(map(str, names))
    return {**values, "trackers": {name: {} if own is None else own for name, own in full.items()}}


def resolve_auto_microbatch(values: dict[str, Any], defaults: dict[str, int]) -> dict[str, Any]:
    """Replace `microbatch: auto` by a size; stages with other sizes get their own, unless they name one.

    Args:
        defaults: prompts_per_step and images_per_prompt where `values` has none.
    """
    if values.get("microbatch") != "auto" or (size := largest_divisor({**defaults, **values})) is None:
        return values
    if isinstance(stages := values.get("stages"), list):
        values = {**values, "stages": [_with_microbatch(stage, {**defaults, **values}, size) for stage in stages]}
    return {**values, "microbatch": size}


def largest_divisor(values: dict[str, Any]) -> int | None:
    """The largest even micro-batch up to 64 that divides a step; None if the step's sizes are no numbers."""
    sizes = [values[name] for name in SIZES]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    rows = sizes[0] * sizes[1]
    even = [n for n in range(2, 65, 2) if rows % n == 0]
    return max(even or [n for n in range(1, 65) if rows % n == 0])


def _with_microbatch(stage: Any, values: dict[str, Any], size: int) -> Any:
    if not isinstance(stage, dict) or "microbatch" in stage:
        return stage
    stage_size = largest_divisor({**values, **stage})
    return stage if stage_size in (None, size) else {**stage, "microbatch": stage_size}


def check_form(pairs: list[str]) -> None:
    """Check that all are `key.sub=value` pairs. FlowGRPOError with the pair to write."""
    if not isinstance(pairs, list | tuple) or not all(isinstance(pair, str) for pair in pairs):
        raise FlowGRPOError(f"the overrides are {pairs!r}: give a list of texts, such as ['optimizer.lr=1e-4'].")
    for pair, following in zip(pairs, [*pairs, ""][1:], strict=True):
        key, equals, text = _split(pair)
        if not equals or not key:
            is_split = key and following and not _split(following)[1]  # steps 3
            example = f"write {pair}={following}" if is_split else "write it so, for example optimizer.lr=1e-4"
            raise FlowGRPOError(f"{pair!r} is not of the form key.sub=value: {example}.")
        # of a shell's variable that is not set; it would be null, and lora=null trains all weights
        if not text.strip():
            raise FlowGRPOError(f"{pair!r} has no value: write {key}=null for none, or {key}='\"\"' for an empty text.")


def override(values: dict[str, Any], pair: str) -> list[str]:
    """Write one pair into `values`. Returns the keys that lead to what it set.

    Raises:
        FlowGRPOError: it is no such pair, or leads through a single value.
    """
    check_form([pair])
    key, _, text = _split(pair)
    key = "objective.name" if key == "objective" and re.fullmatch(r"[\w./: \\-]+", text) else key  # objective=grpo
    values |= expand_rewards(values)
    path = _path(values, key)
    *parents, last = path
    for parent in parents:
        if values.get(parent) is None:  # missing, or a section without settings, as `lora: null`
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            kind = "list: give all of it," if isinstance(values, list) else "single value,"
            raise FlowGRPOError(f"{pair!r}: {parent} is a {kind} it has no {last}.")
    value = parse_yaml(text, f"the value of {key}")
    if parents in REWARD_SECTIONS and isinstance(value, int | float) and isinstance(values.get(last), dict):
        values, last = values[last], "weight"  # the reward's options stay
    values[last] = value
    return path


def _split(pair: str) -> tuple[str, str, str]:
    """Key, equals sign and value, split at the first equals sign outside quotes."""
    match = re.match(r"""((?:"[^"]*"|'[^']*'|[^"'=])*)(=)(.*)""", pair, re.DOTALL)
    return (match[1], match[2], match[3]) if match else (pair, "", "")


def _path(values: dict[str, Any], key: str) -> list[str]:
    """The keys that `a.b.c` goes through.

    A reward's name may have dots: it is one of `values`, or quoted, or `path/my.py:function`.
    """
    section = next((section for section in REWARD_SECTIONS if key.startswith(f"{'.'.join(section)}.")), None)
    if section is None:
        return key.split(".")
    known: Any = values
    for part in section:
        known = known.get(part) if isinstance(known, dict) else None
    names = [re.escape(name) for name in sorted(map(str, known), key=len, reverse=True)] if isinstance(known, dict) else []
    name = "|".join([*names, '"[^"]+"', "'[^']+'", r".+:\w+", "[^.]+"])
    match = re.fullmatch(rf"({name})(?:\.(.*))?", key.removeprefix(f"{'.'.join(section)}."))
    if match is None:
        return key.split(".")
    return [*section, match[1].strip("\"'"), *(match[2].split(".") if match[2] else [])]
