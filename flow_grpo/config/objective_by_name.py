"""The section `objective` as it is written: the class that its name stands for, and the settings that two objectives share."""

from typing import Any

from flow_grpo.config.forward_process_objectives import CustomForwardProcess, ForwardProcess
from flow_grpo.config.objective import CUSTOM, OBJECTIVES, Objective, is_custom
from flow_grpo.config.reward_gradient_objectives import RewardGradient
from flow_grpo.config.stepwise_objectives import CustomStepwise, Stepwise
from flow_grpo.errors import FlowGRPOError
from flow_grpo.text import suggest


def section_type(name: str = "grpo", family: str = "stepwise") -> type[Objective]:
    """The class of an objective.

    Args:
        family: of a user's own function.

    Raises:
        FlowGRPOError: there is no such objective.
    """
    if is_custom(name):
        return CustomForwardProcess if family == "forward_process" else CustomStepwise
    if name not in OBJECTIVES:
        known = list(section_types())[:-2]  # without your own functions
        raise FlowGRPOError(f"there is no objective {name}.{suggest(name, known)} Choose one of {', '.join(known)}.")
    return OBJECTIVES[name]


def section_types() -> dict[str, type[Objective]]:
    """The class of each objective by its name, family by family, those of your own functions last."""
    families = (Stepwise, ForwardProcess, RewardGradient)
    by_family = {name: kind for family in families for name, kind in OBJECTIVES.items() if issubclass(kind, family)}
    return {**by_family, CUSTOM: CustomStepwise, f"{CUSTOM}, family: forward_process": CustomForwardProcess}


def readers(setting: str) -> list[str]:
    """The objectives that read a setting of this section."""
    names = [name for name, section in section_types().items() if setting in section.model_fields]
    return list(dict.fromkeys("your own function" if is_custom(name) else name for name in names))


def read_objective(values: Any) -> Any:
    """The objective that is named in a mapping. Anything else is returned unchanged; pydantic reports it.

    Raises:
        FlowGRPOError: the objective does not read one of the settings, or has no such setting, or there is no such objective.
    """
    if not isinstance(values, dict) or not isinstance(values.get("name", "grpo"), str):
        return values
    section = _section_of(values)
    unread = next((key for key in values if key not in section.model_fields and readers(key)), None)
    if unread is not None:
        names = readers(unread)
        do = f"{names[0]} does" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} do"
        raise FlowGRPOError(f"objective {values.get('name', 'grpo')} does not use {unread}; {do}: remove it.")
    return section.model_validate(values)


def _section_of(settings: dict[str, Any]) -> type[Objective]:
    return section_type(settings.get("name", "grpo"), settings.get("family", "stepwise"))


def shared_settings(previous: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    """The settings of an objective that another one reads too; unknown ones stay, to be refused.

    A user's own function that takes the place of a forward-process objective is of that family, unless it has settings of the other one.
    """
    old, family = _section_of(previous), {}
    of_steps = {"family"} | Stepwise.model_fields.keys() - Objective.model_fields.keys()
    if is_custom(chosen.get("name", "grpo")) and issubclass(old, ForwardProcess) and not chosen.keys() & of_steps:
        family = {"family": "forward_process"}
    new = _section_of({**chosen, **family})
    read = new.model_fields.keys() - (set() if new.needs.takes_advantage else {"advantage"})
    return {**{key: value for key, value in previous.items() if key in read or key not in old.model_fields}, **family}
