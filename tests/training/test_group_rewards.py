"""Rewards that see several images, in a training step: whole groups, whoever draws and scores them and in whatever parts."""

import pytest
import torch
from support import small_policy as small
from support.thread_processes import run_as_processes

from flow_grpo.config.run_config import FlowGRPOConfig
from flow_grpo.config.sections import RewardConfig
from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards import WeightedSum, score
from flow_grpo.rewards.scopes import scope_of
from flow_grpo.training.setup import load_reward
from flow_grpo.training.start_checks import Start, groups_of_evaluations

TWINS = small.PromptSet(["a cat", "a dog", "a cat", "a owl"], [{} for _ in range(4)])


def spread(images, prompts):
    """Depends on all images of the group and on their number."""
    bright = images.mean((1, 2, 3))
    return (bright - bright.mean()).abs() + len(prompts)


def brighter(first, second, prompts):
    return (first.mean((1, 2, 3)) > second.mean((1, 2, 3))).float()


spread.scope, brighter.scope = "group", "pair"
REWARDS = {"spread": spread, "brighter": brighter}


def collect(processes=None, in_background=False, **settings):
    args = small.settings(prompts_per_step=4, **settings)
    weighted = WeightedSum(REWARDS, dict.fromkeys(REWARDS, 1.0))
    rolls = small.rollouts(
        small.policy(), args, [0, 2], weighted, prompts=TWINS, **({"processes": processes} if processes else {})
    )
    rolls.image_sampler.score_in_background = in_background
    return rolls, rolls.collect(1)


@pytest.fixture(scope="module")
def whole():
    rolls, experience = collect()
    images = rolls.policy.decode(experience.trajectory.final, 6)
    return experience, images


def test_scores_are_those_of_each_group_alone_also_of_two_groups_of_one_prompt(whole):
    experience, images = whole
    assert len(set(experience.batch.prompts)) == 3
    for group in range(4):
        rows = experience.batch.group == group
        values = {name: values[rows] for name, values in experience.scores.by_name.items()}
        torch.testing.assert_close(values["spread"], spread(images[rows], ["x"] * 3))
        bright = images[rows].mean((1, 2, 3))
        torch.testing.assert_close(values["brighter"], (bright[:, None] > bright).sum(1) / 2)


@pytest.mark.parametrize(("microbatch", "in_background"), [(1, False), (4, True), (3, True)])
def test_the_micro_batch_and_scoring_in_parts_change_nothing(whole, microbatch, in_background):
    _, experience = collect(microbatch=microbatch, in_background=in_background)
    for name in REWARDS:
        torch.testing.assert_close(experience.scores.by_name[name], whole[0].scores.by_name[name])
    torch.testing.assert_close(experience.advantage, whole[0].advantage, rtol=1e-3, atol=1e-3)


def test_two_processes_score_their_own_groups_to_the_same_values(whole):
    experiences = run_as_processes(2, lambda processes: collect(processes)[1])
    for rank, experience in enumerate(experiences):
        own = whole[0].batch.group % 2 == rank
        assert experience.batch.group.tolist() == whole[0].batch.group[own].tolist()
        for name in REWARDS:
            torch.testing.assert_close(experience.scores.by_name[name], whole[0].scores.by_name[name][own])
        torch.testing.assert_close(experience.advantage, whole[0].advantage[own], rtol=1e-3, atol=1e-3)
        assert experience.metrics["reward"] == pytest.approx(whole[0].metrics["reward"])


WINS = """
def wins(first, second, prompts):
    return [float(a.mean() > b.mean()) for a, b in zip(first, second)]
wins.scope, wins.opponents, wins.symmetric = "pair", 2, True
"""


@pytest.mark.parametrize("settings", [{}, {"isolate": True}, {"frames": 1}])
def test_scope_and_opponents_are_attributes_wherever_a_reward_runs(tmp_path, settings):
    (tmp_path / "mine.py").write_text(WINS)
    reward = load_reward(f"{tmp_path}/mine.py:wins", RewardConfig(**settings))
    assert scope_of(reward) == "pair"
    pictures = torch.linspace(0, 1, 6).view(6, 1, 1, 1).expand(-1, 3, 2, 2)
    assert score("wins", reward, pictures, ["a"] * 6).tolist() == [0, 0.5, 0.5, 0.5, 0.5, 1], "all pairs have other values"


def test_a_scope_in_the_config_is_refused_by_the_rewards_name():
    with pytest.raises(
        FlowGRPOError, match=r"rewards\.judge\.scope=pair is no longer supported: leave it out, and set the attribute scope"
    ):
        FlowGRPOConfig.from_yaml("tiny_ocr", ["rewards={judge: {scope: pair, opponents: 2}}"])


def test_an_evaluation_without_groups_is_refused_for_a_reward_that_sees_them():
    args = small.settings()
    with pytest.raises(ValueError, match=r"reward spread sees .* set evaluation\.images_per_prompt to 2 or more"):
        groups_of_evaluations(Start(args, measured={"spread": spread}))
    groups_of_evaluations(Start(args, measured={"brighter": brighter}))
    groups_of_evaluations(Start(small.settings(evaluation={"images_per_prompt": 2}), measured={"spread": spread}))
