"""What a reward takes and what it must return, and one sentence on what is wrong with a user's reward."""

from typing import Any

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.groups import signature

FORMS = {2: "(images, prompts, **metadata)", 3: "(first, second, prompts, **metadata)"}  # by the number of inputs


def accepted_metadata(reward: Any, metadata: dict[str, Any], inputs: int = 2) -> dict[str, Any]:
    """The metadata that the reward's signature names after its first `inputs` parameters; all of it if the signature has **kwargs."""
    parameters = signature(reward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return metadata
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:inputs]
    named = {p.name for p in parameters} - set(positional)
    return {key: value for key, value in metadata.items() if key in named}


def check_inputs(name: str, reward: Any, inputs: int = 2) -> None:
    """Check that a reward can be called with images and prompts. ValueError with the parameters that it has."""
    takes = signature(reward)
    try:
        takes.bind_partial(*range(inputs))
    except TypeError:
        raise FlowGRPOError(f"reward {name} takes {takes}, but it must take {FORMS[inputs]}.") from None


def check_metadata(name: str, reward: Any, metadata: dict[str, Any], inputs: int = 2) -> None:
    """Check that the prompts have all columns that the reward needs. ValueError with the first one that is missing."""
    positional = signature(reward).bind_partial(*range(inputs)).arguments
    parameters = signature(reward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = next((p.name for p in needed if p.name not in positional and p.name not in metadata), None)
    if missing is not None:
        raise FlowGRPOError(
            f"reward {name} needs {missing}, but the prompts have no column {missing}: give a file of prompts with this column, "
            "or a value among the reward's options."
        )


def is_no_number(returned: Any) -> bool:
    """Whether a reward returned None or text, or a list with either."""
    items = returned if isinstance(returned, list | tuple) else [returned]
    return any(item is None or isinstance(item, str | bytes) for item in items)


def wrong_values(name: str, returned: Any, shape: tuple[int, ...], count: int, kind: str) -> str:
    """One sentence on what a reward returned instead of one number for each of `count` images.

    Args:
        shape: of the returned tensor, where it is one.
        kind: "images" or "pairs of images".
    """
    must = f"for {count} {kind}; it must return one number each"
    if returned is None:
        return f"reward {name} returned None {must}: is a `return` missing?"
    if isinstance(returned, str | bytes):
        return f"reward {name} returned text {must}."
    if is_no_number(returned):
        return f"reward {name} returned a list with {'None' if None in returned else 'text'} in it {must}."
    over_all = shape == () and kind == "images"
    hint = ": average over the pixels, as images.mean((1, 2, 3)) does, and not over the batch" if over_all else ""
    return f"reward {name} returned shape {shape} {must}{hint}."
