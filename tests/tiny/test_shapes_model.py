"""The embedded model of shapes as it is shipped, under plain diffusers."""

import json

import pytest
import torch
from diffusers import Flux2KleinPipeline
from PIL import Image

from flow_grpo import rewards
from flow_grpo.config.loading import bundled_file
from flow_grpo.policy.hub import BUNDLED_MODELS
from flow_grpo.rewards.images import to_pil

FOLDER = BUNDLED_MODELS["tiny_shapes"]
LOW, HIGH = 0.40, 0.65  # of what the base model draws as asked: good enough to look at, wrong often enough to be taught


@pytest.fixture(scope="module")
def pipe():
    pipe = Flux2KleinPipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def rows(name):
    return [json.loads(line) for line in bundled_file(f"prompts/{name}.jsonl").read_text().splitlines()]


def draw(pipe, prompts, **more):
    generator = torch.Generator().manual_seed(0)
    return pipe(prompt=prompts, generator=generator, output_type="pt", **more).images.float()


def test_it_takes_at_most_twelve_megabytes_of_the_wheel():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) <= 12e6


def test_about_half_of_held_out_scenes_are_drawn_as_asked(pipe):
    prompts = [row["prompt"] for row in rows("shapes_eval")]
    settings = {"height": 64, "width": 64, "guidance_scale": 1.0, "num_inference_steps": 10, "max_sequence_length": 16}
    exact = rewards.load("shapes_exact")(draw(pipe, prompts, **settings), prompts)
    assert LOW <= exact.mean() <= HIGH


@pytest.mark.slow
def test_about_half_of_held_out_edits_are_as_asked(pipe):
    exact = []
    for row in rows("shape_edits_eval"):
        source = Image.open(bundled_file("prompts") / row["image"]).convert("RGB")
        settings = {"guidance_scale": 1.0, "num_inference_steps": 10, "max_sequence_length": 16}
        image = draw(pipe, [row["prompt"]], image=source, **settings)
        exact.append(rewards.load("shapes_exact")(image, [row["prompt"]], sources=[[source]]).item())
    assert LOW <= sum(exact) / len(exact) <= HIGH


@pytest.mark.slow
def test_the_pipelines_own_guidance_steps_and_text_length_draw_as_well(pipe):
    """All is default but the size, which the pipeline takes from its VAE's factor: 2048 pixels, whatever the model was trained for."""
    prompts = [row["prompt"] for row in rows("shapes_eval")][::50]  # 50 steps with guidance and 512 tokens take a while
    images = draw(pipe, prompts, height=64, width=64)
    assert rewards.load("shapes")(images, prompts).mean() > 0.5
    row = rows("shape_edits_eval")[1]
    source = Image.open(bundled_file("prompts") / row["image"]).convert("RGB")
    edited = draw(pipe, [row["prompt"]], image=source)
    assert edited.shape[2:] == (64, 64), "an edit takes the size of its source"
    assert to_pil(edited)[0] != source
