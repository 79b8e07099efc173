"""Plans of published models by the config files in the package."""

import pytest
import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.loading import bundled_file
from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.plan.meta_pipeline import FOLDER, FOLDERS, load_for_plan

TRANSFORMERS = {  # parameters in 1e9 as their makers state them, and the share by which ours may differ
    "stabilityai/stable-diffusion-3.5-medium": (2.5, 0.02),
    "stabilityai/stable-diffusion-3.5-large": (8.1, 0.01),
    "black-forest-labs/FLUX.1-dev": (12, 0.02),
    "black-forest-labs/FLUX.2-klein-base-4B": (4, 0.05),
    "Qwen/Qwen-Image": (20, 0.03),
    "Tongyi-MAI/Z-Image": (6, 0.03),
    "Efficient-Large-Model/Sana_1600M_512px_diffusers": (1.6, 0.02),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (1.3, 0.1),
}


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_published_model_has_its_size_and_can_be_prompted(name, no_hub):
    pipe, note = load_for_plan(name, torch.bfloat16, cuda=True)
    stated, tolerance = TRANSFORMERS[name]
    count = sum(p.numel() for p in pipe.transformer.parameters()) + sum(p.numel() for p in pipe.transformer.buffers())
    assert count / 1e9 == pytest.approx(stated, rel=tolerance)
    assert note.startswith("The config files are those in the package: ")
    assert all(getattr(pipe, part)("a red cat").input_ids for part in pipe.components if part.startswith("tokenizer"))


def test_a_prompt_of_sd35_medium_has_77_tokens_of_clip_and_128_of_t5(no_hub):
    args = FlowGRPOConfig.from_yaml("sd35_medium_ocr")
    pipe, _ = load_for_plan(args.model, torch.bfloat16, cuda=True)
    embeddings = pipe.encode_prompt("a red cat", None, None, **args.pipeline_kwargs)[0]
    assert embeddings.shape[1] == 205


def test_the_models_of_shipped_configs_are_known_but_those_for_edits():
    models = {FlowGRPOConfig.from_yaml(file.stem).model for file in bundled_file("").glob("*.yaml")}
    assert {name for name in models if "/" in name} - set(FOLDERS) == {
        "Qwen/Qwen-Image-Edit-2509",
        "black-forest-labs/FLUX.1-Kontext-dev",
    }
    assert {folder.name for folder in FOLDER.iterdir() if folder.is_dir()} == set(FOLDERS.values())


@pytest.mark.slow  # the README's command plans another model, and what is loaded for it is loaded above
def test_a_plan_needs_no_hub(no_hub):
    plan = StepEstimator(FlowGRPOConfig.from_yaml("sana_ocr", ["evaluation.prompts=null"]), cuda=True)
    assert plan.estimate(1).peak > 2 * 1.6e9, "the weights in 16 bit"


def test_a_model_that_is_not_known_is_planned_from_the_cache(no_hub):
    with pytest.raises(ValueError, match="the model nobody/nothing: not in the cache"):
        load_for_plan("nobody/nothing", torch.bfloat16, cuda=True)
