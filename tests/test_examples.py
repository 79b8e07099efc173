"""Each example does what its docstring says, run by the commands in it."""

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.cli_process import run
from support.paths import ROOT

from flow_grpo import FlowGRPOConfig, FlowGRPOTrainer, rewards
from flow_grpo.run_folder.metrics_file import read_metrics
from flow_grpo.sde import TRANSITIONS


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the examples, as the root of the repository has them."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


def commands(example: str) -> list[list[str]]:
    """The commands in an example's docstring: its indented lines."""
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / example).read_text()), clean=False) or ""
    return [shlex.split(line) for line in re.findall(r"^    (.*)$", docstring.replace("\\\n", ""), re.MULTILINE)]


@pytest.mark.slow
def test_a_custom_reward_is_trained_and_measured(folder):
    train, measure = commands("custom_reward.py")
    assert train[0] == measure[0] == "flow-grpo"
    run(*train[1:], cwd=folder)
    last = read_metrics(folder / "runs/redness")[-1]
    assert last["step"] == 2
    assert "eval/redness" in last
    run(*measure[1:], cwd=folder)


def test_the_custom_reward_scores_red_images_highest():
    red, green, white = torch.tensor([1.0, 0, 0]), torch.tensor([0, 1.0, 0]), torch.ones(3)
    images = torch.stack([red, green, white])[..., None, None].expand(-1, -1, 4, 4)
    reward = rewards.load(f"{ROOT / 'examples/custom_reward.py'}:redness")
    assert rewards.score("redness", reward, images, ["a"] * 3).tolist() == [1.0, -0.5, 0.0]


def test_rewards_of_groups_and_pairs_score_what_their_docstrings_say():
    (train,) = commands("group_reward.py")
    args = FlowGRPOConfig.from_yaml(train[2], train[3:])
    assert args.evaluation.images_per_prompt == 2
    level = torch.tensor([0.0, 0.1, 0.6, 1.0])
    # stripes, stronger and stronger
    images = level.view(4, 1, 1, 1).expand(-1, 3, 4, 4) * torch.tensor([1.0, 0.0, 1.0, 0.0])
    reward = {name.rpartition(":")[2]: rewards.load(str(ROOT / name)) for name in args.rewards if ":" in name}
    distances = rewards.score("variety", reward["variety"], images, ["a"] * 4)
    torch.testing.assert_close(distances, torch.tensor([0.1, 0.1, 0.4, 0.4]) / 2**0.5)
    torch.testing.assert_close(rewards.score("sharper", reward["sharper"], images, ["a"] * 4), torch.arange(4) / 3)


@pytest.mark.slow
def test_a_custom_objective_and_advantage_are_trained(folder):
    (train,) = commands("custom_objective.py")
    run(*train[1:], cwd=folder)
    rows = [row for row in read_metrics(folder / "runs/soft_ratio") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["grad_norm"] > 0


def test_the_custom_advantage_is_the_sign_within_the_group():
    better = rewards.locate("advantage", f"{ROOT / 'examples/custom_objective.py'}:better_than_average")
    reward, group = torch.tensor([1.0, 9.0, 5.0, 5.0, 0.0, 3.0]), torch.tensor([0, 1, 0, 1, 0, 1])
    assert better(reward, group).tolist() == [-1, 1, 1, -1, -1, -1]


@pytest.fixture
def own_transition(monkeypatch):
    """The example, whose row is removed from the table again."""
    monkeypatch.setitem(TRANSITIONS, "sigma_sde", None)
    monkeypatch.syspath_prepend(ROOT / "examples")
    sys.modules.pop("own_transition", None)
    return importlib.import_module("own_transition")


def test_the_own_transition_keeps_the_noise_of_the_path(own_transition):
    """For an image of zeros, whose velocity is known, up to the square of the step."""
    sigma, sigma_next = torch.tensor(0.6), torch.tensor(0.599)
    x = torch.tensor([[sigma]])
    mean, std = own_transition.sigma_sde(x, x / sigma, sigma, sigma_next, 1.0, None)
    assert (mean**2 + std**2).item() == pytest.approx(sigma_next.item() ** 2, rel=1e-5)
    assert std > 0.01


def test_the_own_transition_trains(own_transition, tmp_path):
    window = "{schedule: all, first_step: 0, last_step: 3}"  # with the step to sigma = 0
    sizes = ["sampling.steps=4", "prompts_per_step=2", "images_per_prompt=2", "microbatch=4", "lora={rank: 4, alpha: 8}"]
    settings = [*sizes, f"objective.window={window}", "rewards=[jpeg_size]", "dtype=fp32", f"output_dir={tmp_path}"]
    metrics = own_transition.trainer(*settings).training_step()
    assert metrics["ratio/first_update_max_deviation"] == 0
    assert metrics["grad_norm"] > 0


@pytest.mark.slow
def test_a_pipeline_of_the_users_own_is_trained(folder):
    (command,) = commands("own_pipeline.py")
    assert command[0] == "python"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "truncated" not in done.stdout + done.stderr, "how prompts are encoded is found out quietly"
    run_folder = folder / "runs/own_pipeline"
    assert (run_folder / "cat.png").is_file()
    assert (run_folder / "lora/pytorch_lora_weights.safetensors").is_file()
    assert read_metrics(run_folder)[-1]["step"] == 2


def test_the_first_step_of_the_minimal_example_is_the_trainers_to_the_last_bit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import minimal_grpo

    minimal = minimal_grpo.train(steps=1, prompts_per_step=4, images_per_prompt=4, microbatch=8)
    window = "window: {schedule: fixed, size: 4, first_step: 0}"
    settings = [
        "rewards=[ocr]",
        "prompts_per_step=4",
        "images_per_prompt=4",
        "microbatch=8",
        f"sampling={{steps: 10, transition: cps, noise_level: 0.5, {window}}}",
        "objective={name: grpo, clip_low: 1.0e-3, clip_high: 1.0e-3, step_weight: std}",
        "optimizer={lr: 5.0e-4}",
        "ema_decay=0",
        "evaluation.prompts=null",
        "dtype=fp32",
        "device=cpu",
        f"output_dir={tmp_path}",
    ]
    trainer = FlowGRPOTrainer(args=FlowGRPOConfig.from_yaml("tiny_grpo", settings))
    before = {name: weight.clone() for name, weight in trainer.policy.trainable_parameters().items()}
    assert trainer.training_step()["frac_reward_zero_std"] == 0, "else the trainer leaves rows out"
    trained, others = trainer.policy.trainable_parameters(), minimal.trainable_parameters()
    assert trained.keys() == others.keys()
    assert all(torch.equal(trained[name], others[name]) for name in trained)
    assert not all(torch.equal(trained[name], before[name]) for name in trained)
