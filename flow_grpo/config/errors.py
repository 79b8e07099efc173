"""Turns pydantic's validation errors into one sentence."""

from collections.abc import Iterator
from typing import get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from flow_grpo.config.objective import ObjectiveConfig, section_types
from flow_grpo.config.sections import ConfigSection, RewardConfig
from flow_grpo.text import suggest

UNION_MEMBERS = ("str", "int", "float", "bool", "dict", "list")  # which pydantic adds to the place of an error


def error_sentence(error: ValidationError, config: type[ConfigSection]) -> str:
    """The first error in a config of this type, and for an unknown setting the one that was probably meant."""
    first = error.errors()[0]
    parts = [str(part) for part in first["loc"]]
    where = ".".join(part for part in parts if (part.isidentifier() and part not in UNION_MEMBERS) or ":" in part)
    if first["type"] == "extra_forbidden":
        return f"there is no setting {where}.{_did_you_mean([str(part) for part in first['loc']], config)}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "model_type":
        return f"{where} is {first['input']!r}, but it should be a section of settings, {{setting: value}}."
    message = first["msg"].replace("Input should", "it should")
    return f"{where} is {first['input']!r}, but {message}."


def _did_you_mean(place: list[str], config: type[ConfigSection]) -> str:
    """Suggest the intended setting: the same name in another section, else the closest name, this section's first."""
    *parents, word = place
    paths = sorted(set(_paths(config)), key=lambda path: (-len(path), path))
    named = [".".join(path) for path in reversed(paths) if path[-1] == word]
    if named:
        return f" Did you mean {' or '.join(named)}?"
    here = [config]
    for part in parents:
        here = [inner for section in here for inner in _sections(section.model_fields.get(part))] or here
    elsewhere = {path[-1]: ".".join(path) for path in paths}
    return suggest(word, [name for section in here for name in section.model_fields]) or suggest(word, elsewhere)


def _paths(section: type[ConfigSection], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of keys to all settings; without those of a reward, whose path contains its own name."""
    for name, field in section.model_fields.items():
        yield (*above, name)
        for inner in _sections(field):
            if inner is not RewardConfig:
                yield from _paths(inner, (*above, name))


def _sections(field: FieldInfo | None) -> list[type[ConfigSection]]:
    """Section types in a setting's annotation; all objectives' sections for `objective`."""
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    classes = [
        kind for kind in kinds if isinstance(kind, type) and get_origin(kind) is None
    ]  # Python 3.10: list[str] is a type
    sections = [kind for kind in classes if issubclass(kind, ConfigSection)]
    return list(section_types().values()) if ObjectiveConfig in sections else sections
