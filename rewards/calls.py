"""What a reward takes, and one sentence on what is wrong with a user's reward."""

import inspect
from typing import Any

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.groups import signature

ROWS = "metadata"  # a parameter that gets the metadata as one dict for each image
TEXTS = ("prompt", "prompts", "completion", "completions")
FORMS = {2: "(images, prompts, **metadata)", 3: "(first, second, prompts, **metadata)"}  # by the number of inputs


def accepted_metadata(reward: Any, metadata: dict[str, Any], inputs: int = 2) -> dict[str, Any]:
    """The metadata that the reward's signature names after its first `inputs` parameters; all of it if the signature has **kwargs."""
    parameters = signature(reward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return metadata
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:inputs]
    named = {p.name for p in parameters} - set(positional)
    return {key: value for key, value in metadata.items() if key in named}


def named_columns(reward: Any) -> list[str] | None:
    """The metadata that a reward may be given, by its parameters; None for any."""
    parameters = signature(reward).parameters.values()
    takes_any = takes_rows(reward) or any(p.kind is p.VAR_KEYWORD for p in parameters)
    return None if takes_any else [p.name for p in parameters]


def takes_rows(reward: Any) -> bool:
    """Whether a reward has a parameter `metadata` (not **metadata), as those of flow_grpo and ddpo-pytorch."""
    parameter = signature(reward).parameters.get(ROWS)
    return parameter is not None and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def check_inputs(name: str, reward: Any, inputs: int = 2) -> None:
    """Check that a reward can be called with images and prompts. FlowGRPOError with the parameters that it has."""
    takes = signature(reward)
    must = f"reward {name} takes {takes}, but it must take {FORMS[inputs]}"
    try:
        takes.bind_partial(*range(inputs))
    except TypeError:
        makes = inspect.isfunction(reward) and {*takes.parameters} <= {"device"}
        hint = f"; if it makes a reward, add `reward = {name.rpartition(':')[2]}()` to the file and name `reward`"
        raise FlowGRPOError(f"{must}{hint if makes else ''}.") from None
    if next(iter(takes.parameters)) in TEXTS:
        raise FlowGRPOError(f"{must}: images come first, then prompts.")


def check_metadata(name: str, reward: Any, metadata: dict[str, Any], inputs: int = 2) -> None:
    """Check that the prompts have all columns that the reward needs. FlowGRPOError with the first one that is missing."""
    positional = signature(reward).bind_partial(*range(inputs)).arguments
    parameters = signature(reward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = next((p.name for p in needed if p.name not in positional and p.name not in metadata), None)
    if missing is not None:
        raise FlowGRPOError(
            f"reward {name} needs {missing}, but the prompts have no column {missing}: give a file of prompts with this column, "
            "or a value among the reward's options."
        )
