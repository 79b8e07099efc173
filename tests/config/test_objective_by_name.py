"""An objective by one word: `objective: pepg` in a file, `objective=pepg` as an override, which keeps what both objectives read."""

import pytest
from jsonschema import Draft202012Validator

from flow_grpo.config.objective import OBJECTIVES
from flow_grpo.config.run_config import FlowGRPOConfig
from flow_grpo.config.template import json_schema

COMPARED = [name for name in OBJECTIVES if name not in ("ppo", "sft", "dpo")]  # a critic or given images


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("preset", ["tiny_ocr", "tiny_grpo"])
def test_one_word_chooses_any_objective_over_a_preset(preset, name):
    args = FlowGRPOConfig.from_yaml(preset, [f"objective={name}"])
    own = FlowGRPOConfig.from_yaml(preset)
    assert args.objective.name == name
    assert args.sampling == own.sampling
    shared = type(args.objective).model_fields.keys() & type(own.objective).model_fields.keys() - {"name"}
    if OBJECTIVES[name].stepwise:
        assert {"transition", "window"} <= args.objective.model_fields_set or preset == "tiny_ocr"
    given = own.objective.model_fields_set
    for key in (shared & given) - (set() if OBJECTIVES[name].needs.takes_advantage else {"advantage"}):
        assert getattr(args.objective, key) == getattr(own.objective, key)


@pytest.mark.parametrize("name", COMPARED)
def test_one_word_is_a_config(name, tmp_path):
    (tmp_path / "one.yaml").write_text(f"objective: {name}\n")
    args = FlowGRPOConfig.from_yaml(tmp_path / "one.yaml")
    assert args == FlowGRPOConfig(objective=name, output_dir="runs/one")
    Draft202012Validator(json_schema()).validate({"objective": name})
    (tmp_path / "again.yaml").write_text(args.to_yaml())
    assert FlowGRPOConfig.from_yaml(tmp_path / "again.yaml") == args


def test_an_override_by_one_word_keeps_what_the_objective_reads():
    args = FlowGRPOConfig.from_yaml("tiny_grpo", ["objective.advantage=rloo", "objective=dppo"])
    assert args.objective.advantage == "rloo"
    assert FlowGRPOConfig.from_yaml("tiny_grpo").objective.clip_low
    assert not hasattr(args.objective, "clip_low")
    with pytest.raises(ValueError, match="objective dppo does not use clip_low"):
        FlowGRPOConfig.from_yaml("tiny_grpo", ["objective.clip_low=0.5", "objective=dppo"])


def test_a_forward_process_objective_has_no_transition():
    with pytest.raises(ValueError, match=r"objective pepg does not use transition; grpo, .* do: remove it"):
        FlowGRPOConfig.from_yaml("tiny_ocr", ["objective=pepg", "objective.transition=cps"])
    kept = FlowGRPOConfig.from_yaml("tiny_grpo", ["objective=reinforce", "objective.transition=dance_sde"])
    assert kept.objective.transition == "dance_sde"
    assert kept.objective.noise_level == FlowGRPOConfig.from_yaml("tiny_grpo").objective.noise_level


def test_stages_choose_an_objective_by_one_word():
    stages = [{"steps": 2, "objective": "awm"}, {"steps": 3, "objective": "grpo"}, {"steps": 1}]
    args = FlowGRPOConfig(stages=stages, objective={"name": "grpo", "clip_low": 0.3, "transition": "cps"})
    chosen = [(part.objective.name, getattr(part.objective, "transition", None)) for _, part in args.resolved_stages()]
    assert chosen == [("awm", None), ("grpo", "cps"), ("grpo", "cps")]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"prompts": 3}, r"^prompts is 3, but it should be"),
        ({"lora": 8}, r"^lora is 8, but it should be a section of settings, \{setting: value\}, or null\.$"),
        ({"evaluation": [1]}, r"^evaluation is \[1\], but it should be a section of settings"),
        ({"objective": 5}, r"^objective is 5, but it should be"),
        ({"objective": "grpoo"}, r"there is no objective grpoo"),
    ],
)
def test_a_value_in_place_of_a_section_is_named(setting, sentence):
    with pytest.raises(ValueError, match=sentence):
        FlowGRPOConfig(**setting)
