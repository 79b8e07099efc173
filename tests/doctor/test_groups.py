"""The doctor's checks of groups: each result flips at a fault planted into the real parts."""

import pytest
import torch
from support.checks import statuses
from support.embedded import tiny_policy
from support.paths import SAMPLE_REWARDS
from support.sample_rewards import flat

from flow_grpo.doctor import groups
from flow_grpo.doctor.result import ERROR, OK, WARNING, Status
from flow_grpo.policy.policy import Policy
from flow_grpo.trainer import FlowGRPOTrainer


@pytest.fixture(scope="module")
def policy() -> Policy:
    """One that draws signs, which a reward can read."""
    return tiny_policy()


SOLVED = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.2, 1.0]])


def checked(trainer: FlowGRPOTrainer) -> dict[str, Status]:
    sampled = groups.sample_groups(trainer.stage, trainer.step, trainer.train_set)
    return statuses(groups.check_groups(trainer.stage, sampled))


def test_noise_that_changes_nothing_or_destroys_the_images(trainer):
    name, damage = "reward variance from trained-step noise", "mean reward, SDE vs ODE sampling"
    little = checked(trainer("objective.noise_level=0.01"))
    assert little[name] == ERROR
    assert little[damage] == OK
    settings = ["rewards={ocr: 1}", "sampling.steps=6", "prompts_per_step=4", "microbatch=16"]
    much = checked(trainer(*settings, "sampling={transition: dance_sde, noise_level: 3.0}"))
    assert much[damage] == ERROR
    right = checked(trainer(*settings, "sampling={transition: cps, noise_level: 0.5, window: {schedule: fixed, size: 3}}"))
    assert right[name] == right[damage] == OK


def brighter(first, second, prompts):
    return (first.mean((1, 2, 3)) > second.mean((1, 2, 3))).float()


brighter.scope = "pair"


def test_win_rates_do_not_say_whether_noise_destroys_the_images(trainer):
    """The mean win rate of a group is 1/2 whatever its images show, so the doctor has no line on it."""
    found = checked(trainer("sampling={transition: dance_sde, noise_level: 3.0}", reward=brighter))
    assert "reward variance from trained-step noise" in found
    assert "mean reward, SDE vs ODE sampling" not in found


def test_a_group_of_two_and_groups_without_signal(trainer):
    assert checked(trainer("images_per_prompt=2", "microbatch=4"))["images per prompt"] == WARNING
    assert checked(trainer(reward=flat))["groups with zero reward std"] == ERROR


@pytest.mark.parametrize(
    ("reward", "status"), [("brightness: 100.0, sharpness: 0.01", WARNING), ("flat: 1, sharpness: 1", OK)]
)
def test_a_reward_without_effect_beside_another(trainer, reward, status):
    """One that is constant in these groups has a warning of its own."""
    name, _, others = reward.partition(":")
    assert checked(trainer(f"rewards={{'{SAMPLE_REWARDS}:{name}': {others}}}"))["shares of the advantage"] == status


def test_groups_with_zero_std_are_distinguished():
    has_signal = torch.tensor([False, False, True])
    assert "highest" in groups.zero_std_groups(has_signal, SOLVED, True).message
    assert "lowest" in groups.zero_std_groups(has_signal, 1.2 - SOLVED, True).message
    rounded = torch.full((3, 16), 0.9)
    rounded[2, 0] = 0.1
    assert rounded[0].mean() != rounded.max(), "a mean of equal numbers is off by rounding"
    assert "highest" in groups.zero_std_groups(has_signal, rounded, True).message
    middle = torch.tensor([0.5, 0.6, 0.4])[:, None].repeat(1, 16)
    middle[2, 0], middle[2, 1] = 0.9, 0.1
    assert "noise_level" in groups.zero_std_groups(has_signal, middle, stepwise=True).message
    assert "noise_level" not in groups.zero_std_groups(has_signal, middle, stepwise=False).message, (
        "there is no noise to raise"
    )
    none = torch.zeros(3, dtype=torch.bool)
    assert (
        "within groups" in groups.zero_std_groups(none, torch.tensor([0.5, 0.6, 0.4])[:, None].repeat(1, 16), True).message
    )
    assert "see its values" in groups.zero_std_groups(none, torch.full((3, 16), 0.5), True).message


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (groups.zero_std_groups(torch.tensor([False, False, True]), SOLVED, True), WARNING),
        (groups.zero_std_groups(torch.tensor([False, True, True]), SOLVED, True), OK),
        (groups.batch_invariance(0.2, 1e-3), WARNING),
        (groups.batch_invariance(1e-5, 1e-3), OK),
    ],
)
def test_each_measure_of_groups_gets_its_status_and_advice(result, status):
    assert result.status == status
    assert status == OK or result.message.endswith("."), "it says what to do"
