"""The config that `flow-grpo init` writes, and the JSON schema of `flow-grpo schema`."""

import json
from pathlib import Path

import pytest
import yaml
from support.cli_process import run

from flow_grpo.config.loading import bundled_file
from flow_grpo.config.objective_by_name import section_types
from flow_grpo.config.run_config import FlowGRPOConfig
from flow_grpo.config.sections import EvaluationConfig, LoraConfig, MemoryConfig, OptimizerConfig, SamplingConfig
from flow_grpo.config.template import _setting, json_schema, template

CONFIGS = [file for folder in ("", "compare") for file in sorted(bundled_file(folder).glob("*.yaml"))]
MODELS = ["tiny", "stabilityai/stable-diffusion-3.5-medium", "black-forest-labs/FLUX.1-dev", "./my-own-folder"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rewards", [["ocr"], ["jpeg_size", "my_reward.py:redness"]])
def test_a_new_config_is_read_as_the_preset_with_its_model_and_rewards(tmp_path, model, rewards):
    file = tmp_path / "new.yaml"
    file.write_text(template(model, {name: {} for name in rewards}))
    args = FlowGRPOConfig.from_yaml(file)
    assert args.model == model
    assert list(args.rewards) == rewards
    name = {"tiny": "tiny_ocr", "black-forest-labs/FLUX.1-dev": "flux_dev_ocr"}.get(model, "sd35_medium_ocr")
    preset = FlowGRPOConfig.from_yaml(name)
    assert (args.sampling, args.objective) == (preset.sampling, preset.objective)
    assert args.prompts_per_step == preset.prompts_per_step
    assert args.evaluation.every == preset.evaluation.every
    if model != "tiny" and rewards != ["ocr"]:
        assert "ocr" not in args.prompts, "objects, which need no letters"


def test_each_setting_of_a_new_config_has_a_comment():
    lines = template("tiny", {"ocr": {}}).splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
        if line.strip() and not line.strip().startswith("#") and not line.endswith(":"):
            assert before.strip().startswith("# ") or "window" in line, line


def test_a_comment_is_a_whole_sentence_that_needs_no_code_file():
    """Of every setting that a new config can show, in every method's section."""
    sections = [LoraConfig, OptimizerConfig, MemoryConfig, EvaluationConfig, SamplingConfig, *section_types().values()]
    fields = [field for section in [FlowGRPOConfig, *sections] for field in section.model_fields.items()]
    for name, field in fields:
        *comment, _ = _setting(name, 1, field.description)
        said = " ".join(line.removeprefix("# ") for line in comment)
        described = " ".join((field.description or "").split())
        assert described.startswith(said), name
        assert described[len(said) : len(said) + 2] in (". ", ".", ""), f"{name}: cut at {said!r}"
        assert "flow_grpo/" not in said, name
        assert all(len(line) <= 120 for line in comment), name
        assert said.split(" ")[0] not in ("They", "Their"), name


def test_init_refuses_to_overwrite_and_names_a_reward_that_is_not_there(tmp_path):
    assert "config: a.yaml" in run("init", "a.yaml", cwd=tmp_path)
    assert "a.yaml exists" in run("init", "a.yaml", cwd=tmp_path, code=2)
    assert "there is no reward ocrr. Did you mean ocr?" in run("init", "b.yaml", "--reward", "ocrr", cwd=tmp_path, code=2)
    assert not (tmp_path / "b.yaml").exists()
    run("init", "a.yaml", "--force", cwd=tmp_path)


@pytest.mark.parametrize("model", ["nope", "./u/nope", "a/b/c", "."])
def test_init_names_a_model_that_is_neither_a_folder_nor_a_hub_id(tmp_path, model):
    output = run("init", "a.yaml", "--model", model, cwd=tmp_path, code=2)
    assert f"there is no model folder {model};" in output or f"the folder {model} has no model_index.json" in output
    assert not (tmp_path / "a.yaml").exists()
    run("init", "a.yaml", "--model", "owner/model", cwd=tmp_path)


def test_init_writes_the_options_of_rewards_and_names_those_that_are_missing(tmp_path):
    options = {"url": "http://127.0.0.1:9/v1", "model": "a/b"}
    words = ["--reward", f"judge={{url: '{options['url']}', model: a/b}}", "--reward", "jpeg_size"]
    run("init", "a.yaml", *words, cwd=tmp_path)
    rewards = FlowGRPOConfig.from_yaml(tmp_path / "a.yaml").rewards
    assert {name: reward.options for name, reward in rewards.items()} == {"judge": options, "jpeg_size": {}}
    assert [reward.weight for reward in rewards.values()] == [1, 1]
    output = run("init", "b.yaml", "--reward", "judge", cwd=tmp_path, code=2)
    assert "missing a required argument: 'url'; its options are url, model" in " ".join(output.split())
    output = run("init", "b.yaml", "--reward", "ocr", "--reward", "ocr={substring: false}", cwd=tmp_path, code=2)
    assert "the reward ocr is given twice: give each once." in output
    assert not (tmp_path / "b.yaml").exists()


def test_the_schema_accepts_every_shipped_config_and_names_every_setting(tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(run("schema", cwd=tmp_path))
    assert schema == json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    for file in CONFIGS:
        errors = [error.message for error in validator.iter_errors(yaml.safe_load(Path(file).read_text()))]
        assert not errors, f"{file.name}: {errors[0]}"
    assert set(schema["properties"]) == set(FlowGRPOConfig.model_fields)
    for short in (
        {"prompts": ["a.txt", {"file": "b.txt"}]},
        {"rewards": ["ocr"]},
        {"trackers": "wandb"},
        {"objective": "nft"},
    ):
        assert not list(validator.iter_errors(short)), short
    for wrong in ({"lr": 1e-3}, {"steps": 0}, {"objective": {"transition": "sde"}}, {"rewards": {"ocr": "much"}}):
        assert list(validator.iter_errors(wrong)), wrong
