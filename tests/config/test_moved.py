"""Settings of 0.4 that moved from `sampling` to the objective: files, overrides and run folders of 0.4 mean what they meant."""

import json

import pytest

from flow_grpo.config.run_config import FlowGRPOConfig
from flow_grpo.run_folder.opening import changes

STEPS_04 = {
    "steps": 6,
    "transition": "cps",
    "noise_level": 0.5,
    "window": {"schedule": "fixed", "size": 2},
    "keep_graphs": True,
}
STEPS_05 = {key: value for key, value in STEPS_04.items() if key != "steps"}
# what a run folder of 0.4 has beside a forward-process objective
DEFAULTS_04 = {
    "steps": 6,
    "transition": "ode",
    "noise_level": 0.7,
    "window": {"schedule": "all", "size": 3, "first_step": 0, "last_step": None},
    "shared_initial_noise": False,
    "keep_graphs": False,
}


def test_a_stepwise_objective_has_the_settings_of_sampling():
    assert FlowGRPOConfig(sampling=STEPS_04) == FlowGRPOConfig(sampling={"steps": 6}, objective={"name": "grpo", **STEPS_05})


def test_memory_and_evaluation_of_0_4_load():
    assert FlowGRPOConfig(memory={"vae_slicing": True, "vae_tiling": True}).memory.vae_slicing == "tiles"
    assert FlowGRPOConfig(memory={"vae_slicing": True, "vae_tiling": False}).memory.vae_slicing is True
    assert FlowGRPOConfig(evaluation={"num_images": 2}) == FlowGRPOConfig()


def test_a_forward_process_objective_had_the_transition_ode():
    new = FlowGRPOConfig(sampling={"steps": 6}, objective="awm")
    for old in ({"steps": 6, "transition": "ode"}, DEFAULTS_04):
        assert FlowGRPOConfig(sampling=old, objective="awm") == new
    with pytest.raises(ValueError, match="objective awm does not use transition"):
        FlowGRPOConfig(sampling={"transition": "flow_sde"}, objective="awm")
    with pytest.raises(ValueError, match="objective awm does not use noise_level"):
        FlowGRPOConfig(sampling={"noise_level": 0.1}, objective="awm")


def test_an_own_function_with_the_ode_was_of_final_latents():
    assert FlowGRPOConfig(sampling={"transition": "ode"}, objective="a.py:f").objective.family == "forward_process"
    assert FlowGRPOConfig(sampling={"transition": "cps"}, objective="a.py:f").objective.transition == "cps"


@pytest.mark.parametrize("value", ["transition=flow_sde", "transition=dance_sde", "noise_level=0.7", "window.size=3"])
def test_an_override_by_the_former_name_counts_also_if_it_is_the_default(tmp_path, value):
    file = tmp_path / "other.yaml"
    objective = {"name": "grpo", "transition": "cps", "noise_level": 0.5, "window": {"schedule": "random", "size": 4}}
    file.write_text(json.dumps({"prompts": "signs", "objective": objective}))
    overridden = [FlowGRPOConfig.from_yaml(file, [f"{section}.{value}"]) for section in ("sampling", "objective")]
    assert overridden[0] == overridden[1]
    assert overridden[0] != FlowGRPOConfig.from_yaml(file)


def test_a_part_of_a_window_is_merged_into_the_rest():
    whole = {"schedule": "fixed", "size": 2}
    run = FlowGRPOConfig(
        sampling={"steps": 6, "window": whole}, stages=[{"steps": 1, "sampling": {"window": {"first_step": 1}}}]
    )
    [(_, stage)] = run.resolved_stages()
    assert stage.objective.window.model_dump() == {**whole, "first_step": 1, "last_step": None}


def test_a_whole_section_of_0_4_replaces_what_has_moved():
    args = FlowGRPOConfig.from_yaml("tiny_grpo", ["sampling={steps: 6, transition: cps}"])
    assert (args.objective.transition, args.objective.noise_level, args.objective.keep_graphs) == ("cps", 0.7, False)
    assert args.objective.window.schedule == "all"


def test_stages_inherit_what_their_objective_reads():
    stages = [
        {"steps": 1, "objective": "sft"},
        {"steps": 1, "sampling": {"noise_level": 0.3}},
        {"steps": 1, "objective": "a.py:f"},
    ]
    for base in ("grpo", "nft"):
        own = [{"steps": 1, "objective": "grpo", **stage} for stage in stages]
        parts = [part for _, part in FlowGRPOConfig(sampling=STEPS_04, objective=base, stages=own).resolved_stages()]
        assert [part.objective.name for part in parts] == ["sft", "grpo", "a.py:f"]
        assert [getattr(part.objective, "noise_level", None) for part in parts] == [None, 0.3, 0.5]
        assert {part.sampling.steps for part in parts} == {6}
        assert parts[1].objective.window.size == 2


@pytest.mark.parametrize("base", ["sft", "nft"])
def test_a_stage_on_steps_does_not_inherit_the_ode(base):
    stages = [{"steps": 1, "objective": base}, {"steps": 2, "objective": "grpo"}]
    for sampling in ({"steps": 6, "transition": "ode"}, DEFAULTS_04):
        args = FlowGRPOConfig(sampling=sampling, objective=base, stages=stages)
        assert [getattr(part.objective, "transition", None) for _, part in args.resolved_stages()] == [None, "flow_sde"]


def test_a_run_folders_config_is_that_of_the_file_it_came_from():
    """Else a run of 0.4 could not be resumed."""
    stages = [{"steps": 1, "objective": "sft", "sampling": {"transition": "ode"}}, {"steps": 2, "objective": "grpo"}]
    for window in ({}, {"schedule": "fixed", "size": 2}):
        given = FlowGRPOConfig(sampling={"steps": 6, "window": window}, stages=stages)
        folder = {**DEFAULTS_04, "transition": "flow_sde", "window": {**DEFAULTS_04["window"], **window}}
        assert changes(FlowGRPOConfig(sampling=folder, stages=stages), given, {}, {}) == []


@pytest.mark.parametrize("pairs", [["objective=my.py:f"], ["objective.name=my.py:f"]])
def test_an_own_function_in_place_of_a_forward_process_objective_is_of_its_family(pairs):
    assert not FlowGRPOConfig.from_yaml("tiny_ocr", pairs).objective.stepwise
    assert FlowGRPOConfig.from_yaml("tiny_grpo", pairs).objective.stepwise
    assert FlowGRPOConfig.from_yaml("tiny_ocr", [*pairs, "objective.family=stepwise"]).objective.stepwise


def test_the_interpreter_of_a_reward_is_how_it_is_isolated():
    old = FlowGRPOConfig(rewards={"ocr": {"isolate": True, "python": "/env/bin/python"}})
    assert old == FlowGRPOConfig(rewards={"ocr": {"isolate": "/env/bin/python"}})
    assert FlowGRPOConfig(rewards={"ocr": {"isolate": True, "python": None}}).rewards["ocr"].isolate is True
    words = ["rewards={ocr: {isolate: true, python: /env/bin/python}}"]
    assert FlowGRPOConfig.from_yaml("tiny_ocr", words).rewards["ocr"].isolate == "/env/bin/python"
    with pytest.raises(ValueError, match="python=/env/bin/python is for a reward in a process of its own: set isolate="):
        FlowGRPOConfig(rewards={"ocr": {"python": "/env/bin/python"}})
