"""benchmarks/reproduce.py: each result on a small random SD3.5 with the hub's layout, from a hub on this machine."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.hub_server import local_hub, settings

from dev.tiny import pretrain
from flow_grpo import FlowGRPOConfig

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "reproduce.py"
WEIGHTS = {
    "text_encoder/model.safetensors",
    "text_encoder_2/model.safetensors",
    "text_encoder_3/model-00001-of-00002.safetensors",
    "text_encoder_3/model-00002-of-00002.safetensors",
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
}
OTHER_FILES = ["sd3.5_medium.safetensors", "text_encoders/clip_g.safetensors", "README.md", "LICENSE.md", "demo.jpg"]
REWARDS = """
def geneval(images, prompts, **metadata):
    return images.mean((1, 2, 3))

def geneval_exact(images, prompts, **metadata):
    return (images.mean((1, 2, 3)) > 0.5).float()

def hpsv2(images, prompts, **metadata):
    return images.mean((1, 2, 3))

hpsv2.differentiable = True
"""
SHORT = [
    "model=stabilityai/small-sd3.5", "height=32", "width=80", "pipeline_kwargs={max_sequence_length: 14}", "steps=1", "prompts_per_step=2",
    "images_per_prompt=2", "microbatch=2", "updates=1", "sampling.steps=4", "evaluation.steps=2", "evaluation.max_prompts=8",
    "evaluation.every=1", "dtype=fp32", "trackers=[]",
]  # fmt: skip
OCR = ["prompts=prompts/ocr_train.txt", "evaluation.prompts=prompts/ocr_test.txt", "evaluation.rewards={}"]
GENEVAL = [
    "prompts=prompts/geneval_train.jsonl", "rewards={rewards.py:geneval: 1}", "evaluation.rewards=[rewards.py:geneval_exact]",
]  # fmt: skip
OF_RESULT = {
    "ocr": [*OCR, "guidance=1"],
    "awm": [*OCR, "sampling.steps=14", "objective.num_noise_levels=2"],
    "geneval": GENEVAL,
    "pepg": [*GENEVAL, "objective.num_noise_levels=2"],
    "nft": [*GENEVAL, "objective.num_noise_levels=2"],
    "flowbp": [
        "prompts=prompts/ocr_train.txt", "evaluation.prompts=prompts/ocr_test.txt", "rewards={rewards.py:hpsv2: 1}", "evaluation.rewards={}"
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def published_layout(tmp_path_factory) -> Path:
    """A random pipeline with the files that stabilityai/stable-diffusion-3.5-medium has."""
    folder = tmp_path_factory.mktemp("sd35")
    torch.manual_seed(0)
    pipe = pretrain.pipeline()
    pipe.save_pretrained(folder)
    encoder = pipe.text_encoder_3
    (folder / "text_encoder_3" / "model.safetensors").unlink()
    size = sum(p.numel() * p.element_size() for p in encoder.parameters())
    encoder.save_pretrained(folder / "text_encoder_3", max_shard_size=int(0.7 * size))
    for name in OTHER_FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not for diffusers")
    return folder


def reproduce(name, tmp_path, hub):
    (tmp_path / "rewards.py").write_text(REWARDS)
    environment = {**os.environ, **settings(hub), "HF_HOME": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), name, *SHORT, *OF_RESULT[name], "--gpu", "RTX 4090"]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", [n if n == "ocr" else pytest.param(n, marks=pytest.mark.slow) for n in OF_RESULT])
def test_one_command_downloads_trains_and_compares(name, published_layout, tmp_path):
    with local_hub(published_layout) as hub:
        done = reproduce(name, tmp_path, hub)
        assert done.returncode == 0, done.stderr[-2000:]
        again = reproduce(name, tmp_path, hub) if name == "awm" else None
    assert {file for file in hub.asked if file.endswith((".safetensors", ".jpg"))} == WEIGHTS
    assert len(hub.asked) == len(set(hub.asked)), "each file is downloaded once"
    assert done.stdout.index("the run, without rewards") < done.stdout.index("downloaded to")
    assert again is None or "resumed at step 1 of 1" in again.stdout
    folder = tmp_path / "runs" / "reproduce" / name
    content = json.loads((folder / "reproduction.json").read_text())
    assert (content["steps"], content["model_commit"], content["changed"][0]) == (1, "0" * 40, SHORT[0])
    assert all(point["step"] in (0, 1) for points in content["curves"].values() for point in points)
    page = (folder / "reproduction.md").read_text()
    assert "this is no reproduction" in page
    assert (folder / "reproduction.png").is_file()
    assert ("| ocr | step 0 | 0.59 |" in page) == (name == "ocr")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("reproduce")


def test_each_result_has_a_shipped_config_that_measures_what_was_published(script):
    for name, result in script.RESULTS.items():
        args = FlowGRPOConfig.from_yaml(result.config, result.settings)
        assert args.model == "stabilityai/stable-diffusion-3.5-medium"
        measured = {*args.rewards, *args.evaluation.rewards}
        assert {published.metric for published in result.published} <= measured, name
        assert all(point.step is None or point.step in args.evaluated_steps for point in result.published), name


def test_the_page_on_benchmarks_lists_each_result_and_how_far_it_is_verified(script):
    page = (SCRIPT.parent.parent / "docs" / "benchmarks.md").read_text()
    for name, result in script.RESULTS.items():
        assert f"| `{name}` | `{result.config}` |" in page
        assert page.count(f"\n| `{name}` |") == 2


@pytest.mark.parametrize(
    ("published", "finished", "step"),
    [
        ({"step": 0}, False, 0),
        ({"step": 15}, False, 10),
        ({"step": 30}, False, None),
        ({"step": 30}, True, 20),
        ({"gpu_hours": 1.5}, False, 10),
        ({"gpu_hours": 9.0}, False, None),
        ({"gpu_hours": 9.0}, True, 20),
        ({}, False, None),
        ({}, True, 20),
    ],
)
def test_a_published_number_is_compared_with_the_last_evaluation_before_it(script, published, finished, step):
    points = [script.Measured(10 * i, float(i), script.estimate([0.1 * i] * 9)) for i in range(3)]
    found = script.measured_at(points, script.Published("ocr", 0.5, **published), finished)
    assert (found and found.step) == step


def test_the_verdict_follows_the_interval_of_the_mean(script):
    point = script.Measured(5, 1.0, script.estimate([0.0, 1.0] * 50))
    verdicts = [script.verdict(point, script.Published("ocr", value)) for value in (0.2, 0.5, 0.8)]
    assert verdicts == ["above", "within the interval", "below"]
    few = script.Measured(5, 1.0, script.estimate([0.0, 1.0]))
    assert script.verdict(few, script.Published("ocr", 0.5)) == "too few prompts"
    assert script.verdict(None, script.Published("ocr", 0.5)) == "not reached"


def test_tasks_weigh_the_same_whatever_their_number_of_prompts(script):
    values, tasks = [1.0] * 30 + [0.0] * 10, ["counting"] * 30 + ["colors"] * 10
    assert script.mean(values, tasks).mean == 0.5
    assert script.mean(values, None).mean == 0.75
