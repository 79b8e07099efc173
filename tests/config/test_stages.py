"""The stages of a run in its config: how many steps it has, and settings that no stage reads."""

import pytest

from flow_grpo.config.run_config import FlowGRPOConfig

STAGES = [{"steps": 3}, {"steps": 4}]
GIVEN = {"steps": 3, "objective": {"name": "sft", "dataset": "images"}}


def test_steps_beside_stages_are_refused_unless_they_are_the_total(tmp_path):
    file = tmp_path / "staged.yaml"
    file.write_text("stages: [{steps: 3}, {steps: 4}]\n")
    assert FlowGRPOConfig.from_yaml(file).steps == 7
    for steps in (5, FlowGRPOConfig().steps):
        with pytest.raises(
            ValueError, match=f"steps={steps}, but the stages have 7 steps in all: leave steps out, and change"
        ):
            FlowGRPOConfig(steps=steps, stages=STAGES)
        with pytest.raises(ValueError, match=f"^on the command line: steps={steps}, but the stages have 7"):
            FlowGRPOConfig.from_yaml(file, [f"steps={steps}"])


def test_the_config_of_a_run_with_stages_loads_again_with_other_stages_too(tmp_path):
    file, args = tmp_path / "config.yaml", FlowGRPOConfig(stages=STAGES)
    file.write_text(args.to_yaml())
    assert FlowGRPOConfig.from_yaml(file) == args
    assert FlowGRPOConfig.from_yaml(file, ["steps=7"]) == args
    longer = FlowGRPOConfig.from_yaml(file, ["stages=[{steps: 3}, {steps: 9}]"])
    assert (longer.steps, [start for start, _ in longer.resolved_stages()]) == (12, [0, 3])
    assert FlowGRPOConfig.from_yaml(file, ["stages=[]"]).steps == 7
    assert FlowGRPOConfig.from_yaml(file, ["steps=2", "stages=[{steps: 5}]"]).steps == 5, "the later one counts"
    with pytest.raises(ValueError, match="steps=2, but the stages have 5 steps"):
        FlowGRPOConfig.from_yaml(file, ["stages=[{steps: 5}]", "steps=2"])
