"""A commented config for a model and rewards, and the JSON schema by which an editor checks one: `flow-grpo init` and `schema`."""

import re
import textwrap
from typing import Any

import yaml

from flow_grpo.config.loading import TRAINING_PROMPTS, bundled_file, dump_yaml
from flow_grpo.config.objective import is_custom
from flow_grpo.config.objective_by_name import section_types
from flow_grpo.config.run_config import FlowGRPOConfig

BASE = "sd35_medium_ocr"  # the settings for a model that no bundled config trains
OBJECT_PROMPTS = ("prompts/geneval_train.jsonl", "prompts/geneval_eval.jsonl")  # for rewards that read no text
COMMENT_WIDTH = 120
METHOD_SECTIONS = ("sampling", "objective")
# the settings that a new config shows, in this order; a list names those of a section. Of the method's sections, those that it reads,
# and what else the preset sets
SHOWN_FIELDS: dict[str, list[str]] = {
    "model": [],
    "dtype": [],
    "height": [],
    "width": [],
    "guidance": [],
    "pipeline_kwargs": [],
    "prompts": [],
    "rewards": [],
    "steps": [],
    "prompts_per_step": [],
    "images_per_prompt": [],
    "microbatch": [],
    "updates": [],
    "sampling": ["steps"],
    "objective": ["name", "transition", "noise_level", "window", "advantage", "clip_low", "clip_high", "kl_weight"],
    "lora": ["rank", "alpha", "targets"],
    "optimizer": ["lr"],
    "ema_decay": [],
    "memory": ["offload_text_encoders", "quantize", "gradient_checkpointing"],
    "evaluation": ["prompts", "max_prompts", "every", "steps", "rewards"],
    "save_every": [],
}


def template(model: str, rewards: dict[str, dict[str, Any]]) -> str:
    """The YAML text of a config that trains `model` on `rewards`, each setting with a comment that explains it.

    The values are those of a bundled config for that model, if there is one, else those for SD3.5-M.

    Args:
        rewards: the options of each by its name.
    """
    preset = _preset(model)
    args = FlowGRPOConfig.from_yaml(preset)
    values = _values(args, model, rewards)
    lines = [
        f"# Trains {model}: flow-grpo train THIS_FILE. The values are those of the bundled config {preset}.",
        "# All settings: flow-grpo schema. Check them without training: flow-grpo train THIS_FILE --dry-run.",
    ]
    for key, inner in SHOWN_FIELDS.items():
        field = FlowGRPOConfig.model_fields[key]
        if not inner:
            lines += _setting(key, values[key], field.description)
        elif values[key] is not None:
            lines += _section(args, values, key)
    return "\n".join(lines) + "\n"


def _values(args: FlowGRPOConfig, model: str, rewards: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The values of the preset `args` for another model and other rewards, with prompts that suit both."""
    values = args.model_dump(mode="json")
    trained = {name: {"weight": 1.0, "options": options} if options else 1.0 for name, options in rewards.items()}
    values |= {"model": model, "rewards": trained}
    if model not in TRAINING_PROMPTS and not any(reward.startswith("ocr") for reward in rewards):
        values["prompts"], values["evaluation"]["prompts"] = OBJECT_PROMPTS
    measured = {k: v for k, v in values["evaluation"]["rewards"].items() if not k.startswith("ocr")}
    shown = ("options", "frames")
    values["evaluation"]["rewards"] = {k: {name: v[name] for name in shown if v[name]} for k, v in measured.items()}
    return values


def _section(args: FlowGRPOConfig, values: dict[str, Any], key: str) -> list[str]:
    """The lines of a section: its name, and its settings indented below it."""
    fields, lines = type(getattr(args, key)).model_fields, ["", f"{key}:"]
    for name in _shown_fields(args, values, key):
        lines += _setting(name, values[key][name], fields[name].description, indent="  ")
    return lines


def _shown_fields(args: FlowGRPOConfig, values: dict[str, Any], key: str) -> list[str]:
    """The settings of a section that a new config shows."""
    if key not in METHOD_SECTIONS:
        return SHOWN_FIELDS[key]
    section = getattr(args, key)
    preset = [name for name in type(section).model_fields if name in section.model_fields_set]
    return [name for name in dict.fromkeys([*SHOWN_FIELDS[key], *preset]) if name in type(section).model_fields]


def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a config file, the short forms of rewards and trackers included."""
    schema = FlowGRPOConfig.model_json_schema()
    reward = {"anyOf": [{"type": "number"}, {"type": "null"}, {"$ref": "#/$defs/RewardConfig"}]}
    short = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "object", "additionalProperties": reward}]}
    for section in (schema, schema["$defs"]["EvaluationConfig"]):
        section["properties"]["rewards"] |= short
        section["properties"]["rewards"].pop("additionalProperties", None)
        section["properties"]["rewards"].pop("type", None)
    named = {"type": "object", "additionalProperties": {"type": ["object", "null"]}}
    trackers = schema["properties"]["trackers"]
    for key in ("type", "additionalProperties"):
        trackers.pop(key, None)
    trackers["anyOf"] = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, named]
    microbatch = schema["properties"]["microbatch"]
    microbatch["anyOf"] = [{"type": "integer", "exclusiveMinimum": 0}, {"const": "auto"}]
    microbatch.pop("type"), microbatch.pop("exclusiveMinimum")
    shard = schema["$defs"]["MemoryConfig"]["properties"]["shard"]
    shard["anyOf"] = [*shard["anyOf"], {"type": "boolean"}]
    schema["properties"]["objective"] = {"anyOf": [*_objective_schemas(schema["$defs"]), {"type": "string"}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _objective_schemas(definitions: dict[str, Any]) -> list[dict[str, str]]:
    """One schema per objective, chosen by `name`; they are added to the schema's definitions."""
    del definitions["Objective"]
    for name, section in section_types().items():
        schema = section.model_json_schema(ref_template="#/$defs/{model}")
        definitions |= schema.pop("$defs", {})
        schema["properties"]["name"] |= {"pattern": ":"} if is_custom(name) else {"const": name}
        schema["required"] = [] if name == FlowGRPOConfig().objective.name else ["name"]
        definitions[schema["title"]] = schema
    return [{"$ref": f"#/$defs/{section.__name__}"} for section in section_types().values()]


def _preset(model: str) -> str:
    """The name of the bundled config to begin with."""
    trained = [(file.stem, yaml.safe_load(file.read_text())["model"]) for file in sorted(bundled_file("").glob("*.yaml"))]
    names = [name for name, trained_model in trained if trained_model == model]
    plain = [name for name in names if name.endswith("_ocr")]
    return model if model in names else next(iter([*plain, *names]), BASE)


def _setting(key: str, value: Any, description: str | None, indent: str = "") -> list[str]:
    """A comment of the description's first sentence, in lines of readable length, and the setting in one line below it."""
    sentence = re.split(r"(?<=\.)\s", " ".join((description or "").split()))[0].rstrip(".")
    text = dump_yaml({key: value}, default_flow_style=True, width=10**6, allow_unicode=True)
    prefix = f"{indent}# "
    comment = textwrap.wrap(sentence, COMMENT_WIDTH, initial_indent=prefix, subsequent_indent=prefix, break_on_hyphens=False)
    return [*comment, f"{indent}{text.strip()[1:-1]}"]
