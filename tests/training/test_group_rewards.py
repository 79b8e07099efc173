"""Rewards that see several images, in a training step: whole groups, whoever draws and scores them and in whatever parts."""

import pytest
import torch
from support import small_policy as small
from support.thread_processes import run_as_processes

from flow_grpo.config.sections import RewardConfig
from flow_grpo.rewards import WeightedSum
from flow_grpo.rewards.scopes import scope_of
from flow_grpo.training.early_checks import check_scope
from flow_grpo.training.setup import load_reward

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


def test_the_scope_of_a_reward_is_its_own_or_the_configs(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def wins(first, second, prompts):\n    return [0.5] * len(prompts)\nwins.scope = 'pair'\n"
    )
    name = f"{tmp_path}/mine.py:wins"
    assert scope_of(load_reward(name, RewardConfig())) == "pair"
    assert scope_of(load_reward(name, RewardConfig(scope="group"))) == "group"
    assert load_reward(name, RewardConfig(opponents=4)).opponents == 4
    assert scope_of(load_reward("color", RewardConfig())) == "image"


@pytest.mark.parametrize(
    ("opponents", "more"), [(2, {"scope": "group"}), (2, {"scope": "pair", "remote": "http://10.0.0.1:1"})]
)
def test_opponents_without_pairs_here_are_refused(opponents, more):
    with pytest.raises(
        ValueError, match=f"opponents={opponents} is for a reward of scope pair, where it runs: (set scope|give it to)"
    ):
        RewardConfig(opponents=opponents, **more)


def test_an_evaluation_without_groups_is_refused_for_a_reward_that_sees_them():
    args = small.settings()
    with pytest.raises(ValueError, match=r"reward spread sees .* set evaluation\.images_per_prompt to 2 or more"):
        check_scope("spread", spread, args)
    check_scope("brighter", brighter, args)
    check_scope("spread", spread, small.settings(evaluation={"images_per_prompt": 2}))
