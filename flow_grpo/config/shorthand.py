"""The short forms that a config file may use, written out: `rewards: [ocr]`, `objective: grpo`, `trackers: wandb`, `microbatch: auto`."""

from typing import Any

SIZES = ("prompts_per_step", "images_per_prompt")


def expand_rewards(values: dict[str, Any]) -> None:
    """Makes `{ocr: {weight: 1.0}}` of `[ocr]` and of `{ocr: 1.0}`, in place."""
    for section in (values, values.get("evaluation")):
        if not isinstance(section, dict):
            continue
        rewards = section.get("rewards")
        if isinstance(rewards, list) and all(isinstance(name, str) for name in rewards):
            rewards = dict.fromkeys(rewards, 1.0)
        if isinstance(rewards, dict):
            number = (int, float)
            section["rewards"] = {k: {"weight": v} if isinstance(v, number) else v or {} for k, v in rewards.items()}


def expand_objective(values: dict[str, Any]) -> dict[str, Any]:
    """Makes `{name: grpo}` of the objective `grpo`, in stages too."""
    if isinstance(name := values.get("objective"), str):
        values = {**values, "objective": {"name": name}}
    if isinstance(stages := values.get("stages"), list):
        values = {**values, "stages": [expand_objective(stage) if isinstance(stage, dict) else stage for stage in stages]}
    return values


def expand_trackers(values: dict[str, Any]) -> dict[str, Any]:
    """Makes `{wandb: {}}` of `wandb` and of `[wandb]`."""
    trackers = values.get("trackers")
    names = [trackers] if isinstance(trackers, str) else trackers
    if not isinstance(names, list | dict):
        return values
    full = {name: names[name] or {} for name in names} if isinstance(names, dict) else {str(n): {} for n in names}
    return {**values, "trackers": full}


def resolve_auto_microbatch(values: dict[str, Any], defaults: dict[str, int]) -> dict[str, Any]:
    """Replaces `microbatch: auto` by a size; stages with other sizes get their own, unless they name one.

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
    if (
        not isinstance(stage, dict)
        or "microbatch" in stage
        or (stage_size := largest_divisor({**values, **stage})) in (None, size)
    ):
        return stage
    return {**stage, "microbatch": stage_size}
