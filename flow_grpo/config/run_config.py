"""The run config: one typed tree, read from one YAML file and `key.sub=value` pairs, with every check across its fields."""

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from flow_grpo.config import checks
from flow_grpo.config.anchor_config import AnchorConfig
from flow_grpo.config.loading import TRAINING_PROMPTS, dump_yaml, find_config, read_yaml
from flow_grpo.config.objective import Objective
from flow_grpo.config.objective_by_name import section_types, shared_settings
from flow_grpo.config.overrides import (
    SIZES,
    check_form,
    expand_objective,
    expand_rewards,
    expand_trackers,
    override,
    resolve_auto_microbatch,
)
from flow_grpo.config.retired import FSDP_ADVICE, drop_retired, merged, move_to_objective, replace_sampling
from flow_grpo.config.sections import ConfigSection, EvaluationConfig, PromptSetConfig, RewardConfig
from flow_grpo.config.settings import RunSettings
from flow_grpo.errors import FlowGRPOError
from flow_grpo.text import suggest

STAGE_FIELDS = (
    "steps",
    "objective",
    "sampling",
    "optimizer",
    "prompts_per_step",
    "images_per_prompt",
    "microbatch",
    "updates",
    "epochs",
)


class FlowGRPOConfig(RunSettings):
    """A run. Build it from a YAML file with `FlowGRPOConfig.from_yaml(path, overrides)`."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings as keywords. FlowGRPOError: one sentence on what is wrong."""
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise FlowGRPOError(error_sentence(error, type(self))) from None

    @model_validator(mode="before")
    @classmethod
    def _expand_short_forms(cls, values: Any) -> Any:
        """Expand short forms, and drop settings of 0.4 that are gone."""
        if not isinstance(values, dict):
            return values
        values = expand_rewards(expand_trackers(_with_current_settings(values)))
        return resolve_auto_microbatch(values, {name: cls.model_fields[name].default for name in SIZES})

    @model_validator(mode="after")
    def _consistent(self) -> "FlowGRPOConfig":
        if not self.rewards:
            raise FlowGRPOError("rewards is empty: name at least one, for example `rewards: {ocr: 1.0}`.")
        if not any(reward.weight for reward in self.rewards.values()):
            raise FlowGRPOError("every reward has weight 0, so there is nothing to train on: give one a weight.")
        checks.check_trackers(self.trackers)
        checks.check_prompt_sets(self)
        parts = [stage for _, stage in self.resolved_stages()]  # each stage is checked as it is built
        if self.stages:
            total = sum(stage.steps for stage in parts)
            checks.check_total_steps(self, total)
            self.__dict__["steps"] = total  # as set, it would be checked again
        else:
            checks.check_run(self)
        return self

    def with_model(self, model: str) -> "FlowGRPOConfig":
        """The settings for another model. Prompts that nobody has set are those of the model."""
        own = {} if "prompts" in self.model_fields_set else {"prompts": TRAINING_PROMPTS.get(model)}
        return self.model_copy(update={"model": model, **own})

    def resolved_stages(self) -> list[tuple[int, "FlowGRPOConfig"]]:
        """The training step at which each stage begins, and its settings. Without `stages`, the run itself."""
        if not self.stages:
            return [(0, self._with_fitting_microbatch())]
        base, stages, start = self.model_dump(exclude={"stages"}), [], 0
        base["objective"] = self.objective.given()
        for number, settings in enumerate(self.stages, 1):
            unknown = next((key for key in settings if key not in STAGE_FIELDS), None)
            if unknown is not None or "steps" not in settings:
                problem = f"can't set {unknown}" if unknown else "has no steps"
                raise FlowGRPOError(
                    f"stage {number} {problem}: give steps, and what may change, {', '.join(STAGE_FIELDS[1:])}."
                )
            stage = self._validated(merged(_with_objective_of(base, settings), settings), f"stage {number}: ")
            stages.append((start, stage._with_fitting_microbatch()))
            start += stage.steps
        return stages

    def _with_fitting_microbatch(self) -> "FlowGRPOConfig":
        """With a micro-batch no larger than a step."""
        return self.model_copy(update={"microbatch": min(self.microbatch, self.prompts_per_step * self.images_per_prompt)})

    @classmethod
    def _validated(cls, values: dict[str, Any], source: str = "") -> "FlowGRPOConfig":
        if odd := [key for key in values if not isinstance(key, str)]:
            raise FlowGRPOError(f"{source}there is no setting {odd[0]!r}.")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise FlowGRPOError(f"{source}{error_sentence(error, cls)}") from error

    @classmethod
    def from_yaml(cls, path: str | Path | None = None, overrides: list[str] | None = None) -> "FlowGRPOConfig":
        """The config of a YAML file, or of a bundled one by name, with `key.sub=value` pairs over it.

        An override may choose another objective: the file's settings that only its own objective reads are then left out.

        Raises:
            FlowGRPOError: one sentence on what is wrong, and where.
        """
        file = find_config(path or "tiny_ocr")
        values = read_yaml(file)
        if values is None:
            raise FlowGRPOError(f"{file} is empty: write settings into it, such as `steps: 100`, or take a bundled config.")
        if not isinstance(values, dict):
            raise FlowGRPOError(f"{file} must hold `key: value` lines.")
        file_values = _with_current_settings(values)
        values = _overridden(file_values, overrides or [])
        values.setdefault("output_dir", "runs/{name}")
        if isinstance(values["output_dir"], str | int):
            values["output_dir"] = str(values["output_dir"]).replace("{name}", file.stem)
        try:
            return cls._validated(values)
        except ValueError as error:
            source = "on the command line" if overrides and cls._is_valid(file_values) else file.name
            raise FlowGRPOError(f"{source}: {error}") from error

    @classmethod
    def _is_valid(cls, values: dict[str, Any]) -> bool:
        try:
            cls._validated(copy.deepcopy(values))
        except ValueError:
            return False
        return True

    @classmethod
    def for_model(cls, model: str, overrides: list[str] | None = None) -> "FlowGRPOConfig":
        """The defaults for a model, with `key.sub=value` pairs over them. FlowGRPOError as for `from_yaml`."""
        return cls._validated(_overridden({"model": model}, overrides or []))

    def with_overrides(self, overrides: list[str]) -> "FlowGRPOConfig":
        """The config with `key.sub=value` pairs over it. FlowGRPOError as for `from_yaml`."""
        return self._validated(_overridden(self.given(), overrides))

    def with_launcher_settings(self) -> "FlowGRPOConfig":
        """Return the config with memory.shard set from accelerate's launch flag `--use_fsdp`.

        FlowGRPOError if other settings conflict with it, or if accelerate was launched with DeepSpeed.
        """
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            raise FlowGRPOError(f"accelerate was launched with DeepSpeed, which is no longer supported: {FSDP_ADVICE}.")
        if os.environ.get("ACCELERATE_USE_FSDP") != "true" or self.memory.shard is not None:
            return self
        return self._validated(merged(self.model_dump(), {"memory": {"shard": "fsdp2"}}))

    @property
    def held_out(self) -> EvaluationConfig:
        """The settings of evaluation, with the rollout's guidance if they have none."""
        if self.evaluation.guidance is not None or self.sampling.guidance is None:
            return self.evaluation
        return self.evaluation.model_copy(update={"guidance": self.sampling.guidance})

    def pipeline_call_kwargs(self) -> dict[str, Any]:
        """The arguments of every pipeline call."""
        size = {"height": self.height, "width": self.width}
        return {"guidance": self.guidance, **{k: v for k, v in size.items() if v is not None}, **self.pipeline_kwargs}

    def evaluation_call_kwargs(self) -> dict[str, Any]:
        """The arguments of every pipeline call in evaluation."""
        guidance = self.held_out.guidance
        return {**self.pipeline_call_kwargs(), **({} if guidance is None else {"guidance": guidance})}

    def without_auto_compile(self) -> "FlowGRPOConfig":
        """The same settings with `memory.compile: false` in place of `auto`."""
        compiles = self.memory.compile is True
        return self.model_copy(update={"memory": self.memory.model_copy(update={"compile": compiles})})

    def to_yaml(self) -> str:
        """As YAML, every field with its value."""
        return dump_yaml(self.model_dump(mode="json"))


def _with_current_settings(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a file, without the retired ones of 0.4; moved ones are in their new places."""
    return move_to_objective(drop_retired(expand_objective(values)))


def _overridden(file: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """The settings of a file with overrides over them. One that chooses another objective keeps the settings that both read."""
    check_form(overrides)
    chosen = drop_retired(expand_objective(_with_pairs(file, overrides)))
    return _with_pairs(_with_objective_of(file, chosen), overrides)


def _with_pairs(file: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    values = copy.deepcopy(file)
    for pair in overrides:
        path = override(values, pair)
        if path == ["stages"] and values["stages"]:
            values.pop("steps", None)  # those given before, as in the file, are of other stages or of none
        if path == ["sampling"]:
            values = replace_sampling(values)
    return values


def _with_objective_of(previous: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    """The `previous` settings, without those of their objective that the objective of `chosen` does not read."""
    old, new = previous.get("objective") or {}, chosen.get("objective") or {}
    new = {"name": new} if isinstance(new, str) else new
    if not isinstance(old, dict) or not isinstance(new, dict):
        return previous
    if not isinstance(name := new.get("name", old.get("name", "grpo")), str):
        return previous
    return {**previous, "objective": shared_settings(old, {**new, "name": name})}


OTHER_NAMES = {"learning_rate": "lr"}  # of trl and accelerate
KINDS = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "a mapping, {name: value}",
}
UNION_MEMBERS = ("str", "int", "float", "bool", "dict", "list")  # pydantic adds these to the location of an error


def error_sentence(error: ValidationError, config: type[ConfigSection]) -> str:
    """The first error in a config of this type, and for an unknown setting the one that was probably meant."""
    location = error.errors()[0]["loc"]
    number = next((part for part in location if isinstance(part, int)), None)
    of_set = f"prompt set {number + 1}: " if number is not None and "prompts" in location else ""
    return of_set + _sentence(error, config)


def _sentence(error: ValidationError, config: type[ConfigSection]) -> str:
    first = error.errors()[0]
    parts = [str(part) for part in first["loc"]]
    setting = _setting(first)
    if first["type"] == "invalid_key" or parts[-1:] == ["[key]"]:
        return f"{setting} has the key {first['input']!r}: a key should be a name, or a text in quotes."
    if first["type"] == "missing" and parts[-1].isidentifier():
        return f"{setting} is missing."
    if first["type"] == "extra_forbidden":
        unknown = setting if parts[-1].isidentifier() else ".".join(filter(None, [setting, parts[-1]]))
        return f"there is no setting {unknown}.{_did_you_mean(parts, config)}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    # a setting of several types has an error of each
    expected = [_expected(one, parts, config) for one in error.errors() if _setting(one) == setting]
    others = [one.removeprefix("it should be ") for one in dict.fromkeys(expected)][1:]
    return f"{setting} is {first['input']!r}, but {' or '.join([expected[0], *others])}."


def _setting(error: ErrorDetails) -> str:
    """The dotted name of the setting that an error is about, without the types and numbers in its location."""
    parts = map(str, error["loc"])
    return ".".join(part for part in parts if (part.isidentifier() and part not in UNION_MEMBERS) or ":" in part)


def _expected(error: ErrorDetails, location: list[str], config: type[ConfigSection]) -> str:
    """The values that a setting may have, as the end of a sentence."""
    if error["type"] == "missing":
        return "it should have more values"
    if error["type"] == "model_type" and "prompts" in location:
        return "it should be a file or {file: ..., weight: ..., rewards: ...}"
    if error["type"] == "model_type" and location[-2:-1] == ["rewards"]:
        return "it should be a weight such as 0.5, or {weight: 0.5, options: {...}}"
    if error["type"] == "model_type":
        return "it should be a section of settings, {setting: value}" + (
            ", or null" if _may_be_null(location, config) else ""
        )
    if error["type"] == "dict_type" and location[-1] == "rewards":
        name = error["input"] if isinstance(error["input"], str) else "ocr"
        return f"it should have weights: write {{{name}: 1.0}}"
    if error["type"] in KINDS:
        return f"it should be {KINDS[error['type']]}"
    return error["msg"].replace("Input should", "it should")


def _may_be_null(location: list[str], config: type[ConfigSection]) -> bool:
    """Whether the setting of the config itself may be null, as `lora`."""
    field = config.model_fields.get(location[0])
    return len(location) == 1 and field is not None and type(None) in get_args(field.annotation)


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
    own = {name: ".".join([*parents, name]) if len(parents) == 1 else name for name in names}
    return suggest(word, own) or suggest(word, dotted_by_name) or known


def setting_paths(config: type[ConfigSection], word: str) -> list[str]:
    """The dotted paths of the settings with this name, the shortest first."""
    word = OTHER_NAMES.get(word, word)
    return [".".join(path) for path in sorted(set(_paths(config)), key=lambda path: (len(path), path)) if path[-1] == word]


def _paths(section: type[ConfigSection], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of keys to all settings; without those of an entry of a list, or of a reward, whose path contains its own name."""
    for name, field in section.model_fields.items():
        yield (*parents, name)
        for inner in _sections(field):
            if inner not in (RewardConfig, PromptSetConfig, AnchorConfig):
                yield from _paths(inner, (*parents, name))


def _sections(field: FieldInfo | None) -> list[type[ConfigSection]]:
    """Section types in a setting's annotation; all objectives' sections for `objective`."""
    sections = _types_in(field.annotation) if field else []
    return list(section_types().values()) if Objective in sections else sections


def _types_in(annotation: Any) -> list[type[ConfigSection]]:
    """The section types in an annotation, such as that of a list of them."""
    if get_origin(annotation) is not None:
        return [found for inner in get_args(annotation) for found in _types_in(inner)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, ConfigSection) else []
