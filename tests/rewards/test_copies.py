"""A user's code that works in place changes nothing for others, and no reward of this package writes into its inputs."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from support import small_policy as small
from support.cli_process import run
from support.embedded import short_run
from support.reward_inputs import scored_unchanged

from dev.tiny import pretrain, world
from flow_grpo import rewards
from flow_grpo.rewards.calls import copied
from flow_grpo.rewards.images import to_pil
from flow_grpo.training.custom_functions import load_custom_function
from flow_grpo.types import TrainedStep

# tested where they have what they need: published weights, votes, sources, a server
ELSEWHERE = {"pickscore", "hpsv2", "hpsv3", "imagereward", "aesthetic", "preference_head", "geneval", "geneval_exact"} | {
    "shapes_edit",
    "human",
    "judge",
    "remote",
}
PROMPTS = ['red text "CAT" on a blue background', 'blue text "ANT" on a red background']
IN_PLACE = """
def normalised(images, prompts):
    images.mul_(2).sub_(1)
    return images.mean((1, 2, 3))

def same(images, prompts):
    return images.mean((1, 2, 3)) * 2 - 1

def mean_value(images, prompts):
    return images.mean((1, 2, 3))

def shuffles(images, prompts, **metadata):
    prompts.sort()
    for column in metadata.values():
        column.sort(key=str)
    return [float(image.mean()) for image in images]

def objective(step, advantage):
    loss = -advantage * step.log_prob
    advantage.zero_()
    step.old_log_prob.add_(1)
    return loss
"""
TRAINING = ["steps=1", "images_per_prompt=2", "microbatch=4", "trackers=[]", "evaluation.prompts=null"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in_place.py").write_text(IN_PLACE)
    return tmp_path


def signs() -> torch.Tensor:
    return pretrain.images_of([world.parse(prompt) for prompt in PROMPTS]) / 2 + 0.5


@pytest.mark.parametrize("scope", ["image", "group"])
def test_a_reward_in_place_changes_nothing_for_others(folder, scope):
    images, prompts, words = signs(), list(PROMPTS), [{"b": [1]}, {"a": [2]}]
    before = images.clone()
    for name in ("normalised", "shuffles"):
        reward = rewards.load(f"{folder}/in_place.py:{name}")
        reward.scope = scope
        rewards.score(name, reward, images, prompts, [0, 0], words=words)
    assert torch.equal(images, before)
    assert prompts == PROMPTS
    assert words == [{"b": [1]}, {"a": [2]}]


@pytest.fixture
def pictures(folder):
    """A folder with the two signs, and their prompts beside it."""
    (folder / "pictures").mkdir()
    for i, image in enumerate(signs()):
        Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy()).save(folder / "pictures" / f"{i}.png")
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    return folder


def by_reward(*names: str) -> list[str]:
    return [word for name in names for word in ("--reward", name)]


def test_score_has_the_same_values_beside_a_reward_in_place(pictures):
    given, others = ["pictures", "--prompts", "prompts.txt"], ["in_place.py:mean_value", "ocr_exact"]
    run("score", *given, *by_reward(*others), "--out", "alone.json", cwd=pictures)
    in_place = ["in_place.py:normalised", "in_place.py:shuffles"]
    run("score", *given, *by_reward(*in_place, *others), "--out", "beside.json", cwd=pictures)
    alone, beside = (json.loads((pictures / f"{name}.json").read_text()) for name in ("alone", "beside"))
    assert [{**row, **{name.rpartition(":")[2]: None for name in in_place}} for row in alone] == [
        {**row, "normalised": None, "shuffles": None} for row in beside
    ]
    assert [row["ocr_exact"] for row in alone] == [1, 1]


def test_eval_measures_the_same_beside_a_reward_in_place(pictures):
    measured = []
    for out, first in (("alone", []), ("beside", ["in_place.py:normalised"])):
        rewards_given = by_reward(*first, "color")
        run("eval", "pictures", "--prompts", "prompts.txt", *rewards_given, "--out", out, cwd=pictures)
        measures = json.loads((pictures / out / "eval.json").read_text())["targets"]["pictures"]["measures"]
        measured.append({name: values for name, values in measures.items() if name not in ("normalised", "reward")})
    assert measured[0] == measured[1]
    assert "color" in measured[0]


def test_a_run_trains_on_the_same_beside_a_reward_in_place(folder, no_report):
    values = {}
    for name in ("normalised", "same"):
        chosen = f"rewards={{{folder}/in_place.py:{name}: 1, {folder}/in_place.py:mean_value: 1}}"
        small.trainer(short_run(folder / name, chosen, *TRAINING)).train()
        values[name] = json.loads((folder / name / "metrics.jsonl").read_text().splitlines()[0])["rewards/mean_value/mean"]
    assert values["normalised"] == values["same"]


def test_objectives_get_copies_too(folder):
    log_prob, advantage = torch.ones(2, requires_grad=True), torch.ones(2)
    step = TrainedStep(log_prob, torch.ones(2), torch.ones(2, 1), torch.ones(2, 1), torch.ones(1, 1), torch.tensor(-0.1))
    loss = load_custom_function("objective", f"{folder}/in_place.py:objective")(step, advantage)
    loss.sum().backward()
    assert log_prob.grad.tolist() == [-1, -1]
    assert advantage.tolist() == step.old_log_prob.tolist() == [1, 1]


def test_copies_keep_gradients_and_what_occurs_twice():
    leaf, image = torch.ones(2, requires_grad=True), Image.new("RGB", (2, 2))
    first, second, pictures, array = copied((leaf, leaf, [[image], [image]], np.zeros(2)))
    assert first is second
    assert first is not leaf
    assert pictures[0][0] is pictures[1][0] is not image
    first.sum().backward()
    assert leaf.grad.tolist() == [1, 1]
    assert array.base is None


@pytest.mark.parametrize("name", sorted({*rewards.REGISTRY} - ELSEWHERE))
def test_a_reward_of_ours_leaves_its_inputs_unchanged(name):
    prompts = ["a red circle left of a blue square"] * 2 if "shapes" in name else list(PROMPTS)
    prompts = PROMPTS[:1] * 2 if name == "least_distance" else prompts  # a group
    columns = {"sources": [[picture] for picture in to_pil(signs())]} if name in ("fidelity", "unchanged") else {}
    images = torch.stack([signs()] * 2, 1) if name == "motion" else signs()
    scored_unchanged(name, rewards.load(name), images, prompts, **columns)
