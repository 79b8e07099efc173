"""A type of the section `objective` for each objective, made of the groups of settings that its row in methods.py names."""

import functools
from typing import Any

from pydantic import create_model

from flow_grpo import methods
from flow_grpo.config.objective import SETTINGS, ObjectiveConfig
from flow_grpo.config.old_names import DPO_BETA
from flow_grpo.errors import FlowGRPOError
from flow_grpo.text import suggest

SUFFIX, CUSTOM = "_objective", "custom"  # of the types' names, and the one of your own function


def section_type(name: str) -> type[ObjectiveConfig]:
    """The section of an objective: what all objectives read, and the settings that its row names.

    Raises:
        FlowGRPOError: there is no such objective.
    """
    if methods.is_custom(name):
        return _joined(CUSTOM, methods.CUSTOM_SETTINGS)
    if name not in methods.OBJECTIVES:
        known = list(methods.OBJECTIVES)
        raise FlowGRPOError(f"there is no objective {name}.{suggest(name, known)} Choose one of {', '.join(known)}.")
    return _joined(name, methods.OBJECTIVES[name].settings)


@functools.cache
def _joined(name: str, settings: tuple[str, ...]) -> type[ObjectiveConfig]:
    groups = tuple(SETTINGS[group] for group in settings) or (ObjectiveConfig,)
    return create_model(f"{name}{SUFFIX}", __base__=groups, __module__=__name__)


def __getattr__(name: str) -> Any:
    """`grpo_objective` and others, by which pickle finds the type of a section."""
    objective = name.removesuffix(SUFFIX)
    if objective == name or objective not in (*methods.OBJECTIVES, CUSTOM):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return section_type(f":{CUSTOM}" if objective == CUSTOM else objective)


def section_types() -> dict[str, type[ObjectiveConfig]]:
    """The section of each objective by its name, that of your own function last, as `file.py:function`."""
    return {name: section_type(name) for name in (*methods.OBJECTIVES, "file.py:function")}


def readers(setting: str) -> list[str]:
    """The objectives that read a setting of this section."""
    if setting == DPO_BETA:
        return ["dpo"]
    names = [name for name, section in section_types().items() if setting in section.model_fields]
    return ["your own function" if methods.is_custom(name) else name for name in names]


def read_objective(values: Any) -> Any:
    """The section of the objective that is named in a mapping. What is no mapping is returned as it is, for pydantic to judge.

    Raises:
        FlowGRPOError: the objective does not read one of the settings, or has no such setting, or there is no such objective.
    """
    if not isinstance(values, dict) or not isinstance(name := values.get("name", "grpo"), str):
        return values
    section = section_type(name)
    unread = next((key for key in values if key not in section.model_fields and readers(key)), None)
    if unread is not None:
        raise FlowGRPOError(f"objective {name} does not use {unread}; {_do(readers(unread))}: remove it.")
    return section.model_validate(values)


def _do(names: list[str]) -> str:
    """`dpo does`, `sft and dpo do`."""
    return f"{names[0]} does" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} do"
