"""A run of a model that was distilled to few steps warns of objectives that would blur it, and so does the doctor."""

from types import SimpleNamespace

import pytest
import support.small_policy as small
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler
from support.embedded import short_run

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.doctor.dry_run import dry_run
from flow_grpo.doctor.result import OK
from flow_grpo.doctor.run import RunChecks
from flow_grpo.plan import hardware
from flow_grpo.training.start_checks import CHECKS, Start, few_step_model

FEW = [
    "stabilityai/stable-diffusion-3.5-large-turbo",
    "black-forest-labs/FLUX.1-schnell",
    "Tongyi-MAI/Z-Image-Turbo",
    "black-forest-labs/FLUX.2-klein-4B",
    "models/Qwen-Image-Lightning/",
]
MANY = [
    "stabilityai/stable-diffusion-3.5-medium",
    "black-forest-labs/FLUX.1-dev",
    "black-forest-labs/FLUX.2-klein-base-4B",
    "Tongyi-MAI/Z-Image",
    "Qwen/Qwen-Image",
    "turbo-team/plain",
]
EULER = SimpleNamespace(scheduler=FlowMatchEulerDiscreteScheduler(), config={})


def warned(model: str, objective: str, pipe=EULER) -> list[str]:
    args = FlowGRPOConfig(model=model, prompts="p.txt", objective=objective)
    return few_step_model(Start(args, policy=None if pipe is None else SimpleNamespace(pipe=pipe)))


@pytest.mark.parametrize("model", FEW)
def test_a_few_step_model_and_a_forward_process_objective_are_warned_of(model):
    [sentence] = warned(model, "awm")
    assert sentence.startswith(f"{model} is made for few steps, and awm")
    assert not warned(model, "grpo")
    assert not warned(model, "flowbp")


@pytest.mark.parametrize("model", MANY)
def test_other_models_are_not_warned_of(model):
    assert not warned(model, "nft")


@pytest.mark.parametrize(("scheduler", "config"), [
    (FlowMatchLCMScheduler(), {}),
    (FlowMatchEulerDiscreteScheduler(), {"is_distilled": True}),
])  # fmt: skip
def test_a_model_without_a_telling_name_is_known_by_its_pipeline(scheduler, config):
    assert warned("models/mine", "nft", SimpleNamespace(scheduler=scheduler, config=config))


def test_the_doctor_shows_what_a_run_warns_of(tmp_path):
    args = small.settings(output_dir=str(tmp_path), objective={"name": "grpo"}, sampling={"steps": 2, "guidance": 3.0})
    trainer = small.trainer(args, train_dataset=small.PROMPTS)
    sections = dict(zip(range(2), RunChecks(trainer).sections(), strict=False))
    title, results = sections[1]
    assert title == "start"
    assert [result.name for result in results] == [name for checks in CHECKS.values() for name in checks]
    (told,) = (result for result in results if result.status != OK)
    assert [told.message] == trainer.start_checks["off-policy steps"]
    assert told.name == "off-policy steps"


def test_a_dry_run_shows_it_too(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "SECONDS", 0.0)
    lines = dry_run(short_run(tmp_path / "run", "objective=grpo", "sampling.guidance=2", "evaluation.prompts=null"))
    assert [line for line in lines if line.startswith("warning: sampling.guidance=2 samples steps")]
