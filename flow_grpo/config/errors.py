"""Turns pydantic's validation errors into one sentence."""

from collections.abc import Iterator
from typing import get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from flow_grpo.config.objective import Objective, section_types
from flow_grpo.config.sections import ConfigSection, RewardConfig
from flow_grpo.text import suggest

OTHER_NAMES = {"learning_rate": "lr"}  # of trl and accelerate
NUMBERS = {"int_parsing": "a whole number", "int_type": "a whole number", "int_from_float": "a whole number"}
NUMBERS |= {"float_parsing": "a number", "float_type": "a number"}
UNION_MEMBERS = ("str", "int", "float", "bool", "dict", "list")  # which pydantic adds to the location of an error


def error_sentence(error: ValidationError, config: type[ConfigSection]) -> str:
    """The first error in a config of this type, and for an unknown setting the one that was probably meant."""
    first = error.errors()[0]
    parts = [str(part) for part in first["loc"]]
    setting = ".".join(part for part in parts if (part.isidentifier() and part not in UNION_MEMBERS) or ":" in part)
    if first["type"] == "extra_forbidden":
        unknown = setting if parts[-1].isidentifier() else ".".join(filter(None, [setting, parts[-1]]))
        return f"there is no setting {unknown}.{_did_you_mean(parts, config)}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    return f"{setting} is {first['input']!r}, but {_expected(first, parts)}."


def _expected(error: ErrorDetails, location: list[str]) -> str:
    """What a setting should be, as the end of a sentence."""
    if error["type"] in NUMBERS:
        return f"it should be {NUMBERS[error['type']]}"
    if error["type"] == "model_type" and location[-2:-1] == ["rewards"]:
        return "it should be a weight such as 0.5, or {weight: 0.5, options: {...}}"
    if error["type"] == "model_type":
        return "it should be a section of settings, {setting: value}"
    if error["type"] == "dict_type" and location[-1] == "rewards":
        name = error["input"] if isinstance(error["input"], str) else "ocr"
        return f"it should have weights: write {{{name}: 1.0}}"
    return error["msg"].replace("Input should", "it should")


def _did_you_mean(location: list[str], config: type[ConfigSection]) -> str:
    """Suggest the intended setting: the same name in another section, else the closest name, this section's first."""
    *parents, word = location
    if named := setting_paths(config, word):
        return f" Did you mean {' or '.join(named)}?"
    sections = [config]
    for part in parents:
        sections = [inner for section in sections for inner in _sections(section.model_fields.get(part))] or sections
    paths = sorted(set(_paths(config)), key=lambda path: (-len(path), path))
    dotted_by_name = {path[-1]: ".".join(path) for path in paths}
    names = [name for section in sections for name in section.model_fields]
    known = (
        f" {'.'.join(parents)} has {', '.join(dict.fromkeys(names))}." if len(sections) == 1 and sections != [config] else ""
    )
    return suggest(word, names) or suggest(word, dotted_by_name) or known


def setting_paths(config: type[ConfigSection], word: str) -> list[str]:
    """The dotted paths of the settings with this name, the shortest first."""
    word = OTHER_NAMES.get(word, word)
    return [".".join(path) for path in sorted(set(_paths(config)), key=lambda path: (len(path), path)) if path[-1] == word]


def _paths(section: type[ConfigSection], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of keys to all settings; without those of a reward, whose path contains its own name."""
    for name, field in section.model_fields.items():
        yield (*parents, name)
        for inner in _sections(field):
            if inner is not RewardConfig:
                yield from _paths(inner, (*parents, name))


def _sections(field: FieldInfo | None) -> list[type[ConfigSection]]:
    """Section types in a setting's annotation; all objectives' sections for `objective`."""
    annotations = (field.annotation, *get_args(field.annotation)) if field else ()
    # Python 3.10: list[str] is a type
    classes = [annotation for annotation in annotations if isinstance(annotation, type) and get_origin(annotation) is None]
    sections = [annotation for annotation in classes if issubclass(annotation, ConfigSection)]
    return list(section_types().values()) if Objective in sections else sections
