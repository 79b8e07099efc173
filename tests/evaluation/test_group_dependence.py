"""A reward that depends on the other images of its batch is found, whatever its noise; costly rewards are not called for it."""

import pytest
import torch
from support import broken_rewards as sick
from support import sample_rewards as sample

from flow_grpo.data.prompts import PromptSet
from flow_grpo.evaluation.group_dependence import depends_on_group, group_dependence_warnings
from flow_grpo.rewards.calls import RewardInputs


@pytest.mark.parametrize(
    ("reward", "depends"),
    [
        (sample.rank, True),
        (sample.z_score, True),
        (sick.dark, True),
        (sample.brightness, False),
        (sample.flat, False),
        (sample.in_bf16, False),
        (sick.random, False),
        (sick.shaky, False),
        (sick.length, False),
        (sick.inverts, False),
    ],
)
def test_a_reward_that_depends_on_the_other_images_is_found(reward, depends):
    for seed in range(10):
        torch.manual_seed(seed)  # chance must not look like it
        images = torch.rand(8, 3, 1, 1).expand(8, 3, 8, 8) * torch.rand(8, 3, 8, 8)
        inputs = RewardInputs(images, list("aabbccdd"), {})
        assert depends_on_group("r", reward, inputs) == depends


def test_a_reward_that_fails_when_it_is_called_again_says_so():
    def alone(images, prompts):
        if len(prompts) == 1:
            raise KeyError("weights")
        return images.mean((1, 2, 3))

    prompts, images = PromptSet(list("aabb"), [{}] * 4), dict(enumerate(torch.rand(4, 3, 8, 8)))
    (sentence,) = group_dependence_warnings({"alone": alone, "brightness": sample.brightness}, prompts, images)
    assert sentence.startswith("reward alone raised KeyError on 1 images, the first for the prompt 'a'")


def test_nobody_is_asked_and_nothing_is_paid_to_find_that_out():
    def asked(images, prompts):
        raise AssertionError("somebody was asked")

    for name in ("human", "judge"):
        assert not depends_on_group(name, asked, RewardInputs(torch.rand(4, 3, 8, 8), list("aabb"), {}))
