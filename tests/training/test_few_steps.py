"""A run of a model that was distilled to few steps warns of objectives that would blur it."""

import pytest

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.training.setup import few_step_warnings

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


@pytest.mark.parametrize("model", FEW)
def test_a_few_step_model_and_a_forward_process_objective_are_warned_of(model):
    [sentence] = few_step_warnings(FlowGRPOConfig(model=model, prompts="p.txt", objective="awm"))
    assert sentence.startswith(f"{model} is made for few steps, and awm")
    for name in ("grpo", "flowbp"):
        assert not few_step_warnings(FlowGRPOConfig(model=model, prompts="p.txt", objective=name))


@pytest.mark.parametrize("model", MANY)
def test_other_models_are_not_warned_of(model):
    assert not few_step_warnings(FlowGRPOConfig(model=model, prompts="p.txt", objective="nft"))
