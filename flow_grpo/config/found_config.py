"""Limits on a config.yaml that was found next to weights and not named by the user: anybody may have written it.

Every run folder and every export holds a config.yaml, so a downloaded LoRA contains its author's. Reading it is harmless. What it names
is not: a reward's file is code, and so is the interpreter of an isolated one; a server receives the images; a folder is written to;
weights of others are read by many libraries. So it may only name rewards of this package, with the weights that they name themselves or
that open_clip names, unless the user trusts it. Overrides are the user's own settings.

Only training reads `objective`, `trackers`, `output_dir` and the training prompts; its config is always named by the user.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import RewardConfig, leaves
from flow_grpo.errors import FlowGRPOError

REACHING_OUT = ("human", "judge", "remote")  # packaged rewards that ask a person or send images away


def check(args: FlowGRPOConfig, file: Path, rewards: bool, prompts: bool) -> None:
    """Refuse code, addresses and folders that the config `file` itself names.

    Args:
        args: the config with the user's overrides.
        rewards: whether its rewards are going to be built.
        prompts: whether its held-out prompts are going to be loaded.

    Raises:
        FlowGRPOError: it names code, an address or a folder to write to.
    """
    try:
        named_by_file = set(_named(FlowGRPOConfig.from_yaml(file), rewards, prompts))
    except ValueError:  # valid only with the overrides, so the user's own values can't be told apart
        named_by_file = set(_named(args, rewards, prompts))
    refused = [description for description in _named(args, rewards, prompts) if description in named_by_file]
    if refused:
        others = [flag for flag, used in (("--reward", rewards), ("--prompts", prompts)) if used]
        instead = f", or give others by {' and '.join(others)}" if others else ""
        raise FlowGRPOError(
            f"{file} is next to the weights, so that anybody may have written it, and names {', '.join(refused)}: add --trust if you "
            f"wrote it{instead}."
        )


def _named(args: FlowGRPOConfig, rewards: bool, prompts: bool) -> Iterator[str]:
    """Describe each setting that runs code, contacts a server or a person, or writes files."""
    if args.memory.embedding_cache_dir is not None:
        yield f"the folder {args.memory.embedding_cache_dir} to keep embeddings in"
    held_out = args.evaluation.prompts or []
    for source in [held_out] if isinstance(held_out, str) else [prompt_set.file for prompt_set in held_out]:
        if prompts and "://" in source:
            yield f"the prompts {source}"
    for name, setting in {**args.evaluation.rewards, **args.rewards}.items() if rewards else ():
        yield from _of_reward(name, setting)


def _of_reward(name: str, setting: RewardConfig) -> Iterator[str]:
    if ":" in name or name in REACHING_OUT:
        yield f"the reward {name}"
    if isinstance(setting.isolate, str):
        yield f"the program {setting.isolate} for the reward {name}"
    if setting.remote is not None:
        yield f"the server {setting.remote} for the reward {name}"
    for option, text in _texts(setting.options):
        if option != "device" and (not re.fullmatch(r"[\w-]*", text) or Path(text).exists()):
            yield f"{text!r} in the options of the reward {name}"


def _texts(options: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each text in the options of a reward, however deep, with the option that it belongs to."""
    for (option, *keys), value in leaves(options):
        yield from ((option, text) for text in (*keys, value) if isinstance(text, str))
