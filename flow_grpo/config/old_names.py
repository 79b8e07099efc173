"""Settings under the names of version 0.3, which are accepted for one release, and its way to write them into a run folder."""

from typing import Any

from flow_grpo.errors import FlowGRPOError

# Old name -> new name, by the section that holds them under its new name. `report_to` is what transformers calls the trackers.
RENAMED: dict[str, dict[str, str]] = {
    "": {
        "pipeline": "pipeline_kwargs",
        "output": "output_dir",
        "keep": "keep_checkpoints",
        "resample": "dynamic_sampling_rounds",
        "resting": "prompt_skipping",
        "report_to": "trackers",
    },
    "prompt_skipping": {"after": "patience"},
    "sampling": {"shared_start": "shared_initial_noise"},
    "sampling.window": {"kind": "schedule", "first": "first_step", "last": "last_step", "every": "shift_every"},
    "objective": {
        "data": "dataset",
        "draws": "num_noise_levels",
        "old_decay": "old_policy_decay",
        "weight": "loss_weight",
    },
    "lora": {"start": "init_from"},
    "optimizer": {"final_lr": "final_lr_ratio", "warmup": "warmup_steps"},
    "memory": {
        "embeddings": "embedding_cache_dir",
        "offload_encoders": "offload_text_encoders",
        "checkpointing": "gradient_checkpointing",
        "attention": "attention_backend",
    },
    "evaluation": {"pictures": "num_images", "limit": "max_prompts"},
}
DPO_BETA = "dpo_beta"  # became dpo's `beta`; in 0.3 `beta` was nft's, and written out for dpo as well
# No objective reads all three: only a config.yaml of 0.3 has them together, which wrote out the settings of all objectives.
WRITTEN_BY_03 = {"threshold", "beta", DPO_BETA}


def is_written_by_03(values: dict[str, Any]) -> bool:
    """Whether these are the settings that 0.3 wrote into a run folder, with those that the objective does not read."""
    objective = values.get("objective")
    return isinstance(objective, dict) and objective.keys() >= WRITTEN_BY_03


def renamed(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a file, or of a stage, under today's names.

    Raises:
        FlowGRPOError: a setting is given under both names.
    """
    for section, names in RENAMED.items():
        values = _rename_in_section(values, section.split(".") if section else [], names)
    objective = values.get("objective")
    if isinstance(objective, dict) and objective.get("name") == "dpo" and DPO_BETA in objective:
        other_settings = {key: value for key, value in objective.items() if key != DPO_BETA}
        values = {**values, "objective": {**other_settings, "beta": objective[DPO_BETA]}}
    if isinstance(stages := values.get("stages"), list):
        values = {**values, "stages": [renamed(stage) if isinstance(stage, dict) else stage for stage in stages]}
    return values


def renamed_path(path: list[str]) -> list[str]:
    """The keys that lead to a setting, under today's names."""
    new_path: list[str] = []
    for key in path:
        new_path.append(RENAMED.get(".".join(new_path), {}).get(key, key))
    return new_path


def _rename_in_section(values: dict[str, Any], path: list[str], names: dict[str, str]) -> dict[str, Any]:
    """`values` with the keys of the section at `path` renamed."""
    if path:
        inner = values.get(path[0])
        return {**values, path[0]: _rename_in_section(inner, path[1:], names)} if isinstance(inner, dict) else values
    for old, new in names.items():
        if old in values and new in values:
            raise FlowGRPOError(f"{old} is the former name of {new}, and both are set: remove {old}.")
    return {names.get(key, key): value for key, value in values.items()}
