"""`key.sub=value` pairs, written over the settings of a config file."""

import re
from typing import Any

from flow_grpo.config.loading import parse_yaml
from flow_grpo.config.shorthand import expand_rewards
from flow_grpo.errors import FlowGRPOError

REWARD_SECTIONS = [["rewards"], ["evaluation", "rewards"]]  # settings whose keys are names of rewards


def check_form(pairs: list[str]) -> None:
    """Check that all are `key.sub=value` pairs. ValueError with the pair to write."""
    for pair, following in zip(pairs, [*pairs, ""][1:], strict=True):
        key, equals, _ = _split(pair)
        if not equals or not key:
            is_split = key and following and not _split(following)[1]  # steps 3
            example = f"write {pair}={following}" if is_split else "write it so, for example optimizer.lr=1e-4"
            raise FlowGRPOError(f"{pair!r} is not of the form key.sub=value: {example}.")


def override(values: dict[str, Any], pair: str) -> list[str]:
    """Writes one pair into `values`. Returns the keys that lead to what it set.

    Raises:
        FlowGRPOError: it is no such pair, or leads through a single value.
    """
    check_form([pair])
    key, _, text = _split(pair)
    key = "objective.name" if key == "objective" and re.fullmatch(r"[\w./:\\-]+", text) else key  # objective=grpo
    expand_rewards(values)
    path = _path(values, key)
    *parents, last = path
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise FlowGRPOError(f"{pair!r}: {parent} is a single value, it has no {last}.")
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
