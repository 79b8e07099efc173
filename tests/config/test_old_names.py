"""The names of version 0.3 are those of today: in a file, in a stage, in an override, as keywords, and in a run folder that 0.3 wrote."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.old_names import RENAMED
from flow_grpo.config.resume import changes

ON_STEPS = {"objective": {"name": "grpo"}, "sampling": {"transition": "cps"}}
RUNS = Path(__file__).parent.parent / "run_folder" / "run_of_0_3"


def on_latents(name: str) -> dict[str, Any]:
    return {"objective": {"name": name}, "sampling": {"transition": "ode"}}


# Old spelling -> new spelling, a value that is not the default, and the method that reads it
TABLE = {
    "pipeline": ("pipeline_kwargs", {"max_sequence_length": 14}, {}),
    "output": ("output_dir", "runs/other", {}),
    "keep": ("keep_checkpoints", 9, {}),
    "resample": ("dynamic_sampling_rounds", 3, {}),
    "report_to": ("trackers", ["wandb"], {}),
    "resting": ("prompt_skipping", {"steps": 7}, {}),
    "resting.after": ("prompt_skipping.patience", 4, {}),
    "sampling.shared_start": ("sampling.shared_initial_noise", True, ON_STEPS),
    "sampling.window.kind": ("sampling.window.schedule", "random", ON_STEPS),
    "sampling.window.first": ("sampling.window.first_step", 2, ON_STEPS),
    "sampling.window.last": ("sampling.window.last_step", 5, ON_STEPS),
    "sampling.window.every": ("sampling.window.shift_every", 5, ON_STEPS),
    "objective.data": ("objective.dataset", "pictures", on_latents("sft")),
    "objective.draws": ("objective.num_noise_levels", 3, on_latents("awm")),
    "objective.old_decay": ("objective.old_policy_decay", {"rate": 0.1, "max": 0.5}, on_latents("nft")),
    "objective.weight": ("objective.loss_weight", "ghuber", on_latents("awm")),
    "objective.dpo_beta": ("objective.beta", 7.0, on_latents("dpo")),
    "lora.start": ("lora.init_from", "me/lora", {}),
    "optimizer.final_lr": ("optimizer.final_lr_ratio", 0.5, {}),
    "optimizer.warmup": ("optimizer.warmup_steps", 5, {}),
    "memory.embeddings": ("memory.embedding_cache_dir", "kept", {}),
    "memory.offload_encoders": ("memory.offload_text_encoders", True, {}),
    "memory.checkpointing": ("memory.gradient_checkpointing", True, {}),
    "memory.attention": ("memory.attention_backend", "flash", {}),
    "evaluation.pictures": ("evaluation.num_images", 3, {}),
    "evaluation.limit": ("evaluation.max_prompts", 5, {}),
}


def with_setting(method: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Settings with one more."""
    values: dict[str, Any] = yaml.safe_load(yaml.safe_dump(method))
    *parents, last = path.split(".")
    inner = values
    for parent in parents:
        inner = inner.setdefault(parent, {})
    inner[last] = value
    return values


def read(folder: Path, values: dict[str, Any], *overrides: str) -> FlowGRPOConfig:
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return FlowGRPOConfig.from_yaml(folder / "run.yaml", list(overrides))


def test_the_table_has_every_old_name():
    new_to_old = {"prompt_skipping": "resting"}
    old = {
        ".".join([*([new_to_old.get(section, section)] if section else []), name])
        for section in RENAMED
        for name in RENAMED[section]
    }
    assert old | {"objective.dpo_beta"} == set(TABLE)


@pytest.mark.parametrize("old", TABLE)
def test_an_old_name_sets_what_the_new_one_sets(tmp_path, old):
    new, value, method = TABLE[old]
    expected = FlowGRPOConfig(**with_setting(method, new, value))
    assert expected != FlowGRPOConfig(**method)
    given = with_setting(method, old, value)
    assert FlowGRPOConfig(**given) == expected
    assert read(tmp_path, given) == expected
    pair = f"{old}={json.dumps(value)}"
    assert read(tmp_path, method, pair) == expected
    assert read(tmp_path, with_setting(method, new, value), pair) == expected, "over the new name"
    assert read(tmp_path, given, pair.replace(old, new, 1)) == expected, "and the other way round"


def test_a_stage_may_have_old_names():
    old, new = (
        [
            {"steps": 2, "objective": {"name": "sft", data: "pictures"}, "sampling": {"transition": "ode"}},
            {"steps": 1, rounds: 2},
        ]
        for data, rounds in (("data", "resample"), ("dataset", "dynamic_sampling_rounds"))
    )
    assert FlowGRPOConfig(stages=old) == FlowGRPOConfig(stages=new)


def test_a_setting_under_both_names_is_a_clear_error():
    with pytest.raises(ValueError, match="limit is the former name of max_prompts, and both are set: remove limit"):
        FlowGRPOConfig(evaluation={"limit": 1, "max_prompts": 2})


@pytest.mark.parametrize("name", ["grpo", "nft"])
def test_the_settings_that_0_3_wrote_are_those_of_the_run(tmp_path, name):
    """All settings of all objectives stand there; today's file has those of its own, and counts as the same run."""
    args = FlowGRPOConfig.from_yaml(RUNS / name / "config.yaml")
    assert args.objective.name == name
    (tmp_path / "config.yaml").write_text(args.to_yaml())
    assert not changes(args, FlowGRPOConfig.from_yaml(tmp_path / "config.yaml"), {}, {})
    values = yaml.safe_load((RUNS / name / "config.yaml").read_text())
    values["objective"] |= {"threshold": 0.5, "critic": {"width": 9}}  # 0.3 let such settings pass
    assert read(tmp_path, values) == args
    with pytest.raises(ValueError, match=f"objective {name} does not use threshold; dppo does"):
        read(tmp_path, values, "objective.threshold=2")


def test_dpo_of_0_3_has_its_own_beta_not_that_of_nft():
    values = yaml.safe_load((RUNS / "nft" / "config.yaml").read_text())
    values["objective"] |= {"name": "dpo", "beta": 1.0, "dpo_beta": 50.0}
    assert FlowGRPOConfig(**values).objective.beta == 50


def test_a_later_override_wins_under_either_name():
    for first, second in (
        ("evaluation={limit: 2}", "evaluation.max_prompts=3"),
        ("evaluation={max_prompts: 2}", "evaluation.limit=3"),
    ):
        assert FlowGRPOConfig.from_yaml("tiny_ocr", [first, second]).evaluation.max_prompts == 3
    file_of_03 = FlowGRPOConfig.from_yaml(RUNS / "grpo" / "config.yaml", ["evaluation.max_prompts=5"])
    assert file_of_03.evaluation.max_prompts == 5
