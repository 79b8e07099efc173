"""The doctor's checks of rewards: each result flips at a broken reward."""

import random

import numpy as np
import pytest
import torch
from support import broken_rewards
from support.checks import statuses
from support.sample_rewards import brightness, flat, nan, rank

from flow_grpo import rewards
from flow_grpo.doctor import groups
from flow_grpo.doctor import rewards as reward_checks
from flow_grpo.doctor.result import ERROR, OK, WARNING
from flow_grpo.doctor.reward_probe import gradient, gradient_stats, measure, mismatched, results, value_range
from flow_grpo.doctor.run import RunChecks
from flow_grpo.rewards import WeightedSum, user_code
from flow_grpo.rewards.gradients import RHO


@pytest.fixture
def seeded(monkeypatch):
    """Seeds what the random numbers of a user's code come from, and forgets where earlier tests left them."""
    monkeypatch.setattr(user_code, "_streams", {})

    def seed(number: int) -> None:
        user_code._streams.clear()
        for start in (random.seed, np.random.seed, torch.manual_seed):
            start(number)

    seed(0)
    return seed


def measured(reward, inputs):
    return measure(getattr(reward, "__name__", "r"), reward, inputs, mismatched(inputs))


@pytest.mark.parametrize(
    ("reward", "check", "status"),
    [
        (flat, "values", ERROR),
        (nan, "values", ERROR),
        (broken_rewards.dark, "values", OK),
        (broken_rewards.random, "deterministic", ERROR),
        (broken_rewards.shaky, "deterministic", WARNING),
        (brightness, "deterministic", OK),
        (brightness, "reads the prompt", WARNING),
        (broken_rewards.random, "reads the prompt", WARNING),
        (rewards.load("color"), "reads the prompt", OK),
        (broken_rewards.length, "std within groups", ERROR),
        (broken_rewards.rates_prompts, "std within groups", WARNING),
        (brightness, "std within groups", OK),
        (rank, "depends on other images", WARNING),
    ],
)
def test_each_fault_of_a_reward_gets_the_status_of_its_check(signs, seeded, reward, check, status):
    assert statuses(results("r", measured(reward, signs)))[f"r: {check}"] == status


def test_noise_is_not_taken_for_reading_the_prompt(signs, seeded):
    """A random reward's values differ between two calls, sometimes much more in one pair of calls than in another."""
    for seed in range(200):
        seeded(seed)
        assert not measured(broken_rewards.random, signs).reads_prompt, seed


def test_a_fault_of_one_reward_weighs_less_beside_a_reward_without_it(signs):
    """A constant one is a warning beside one that varies; one that ignores the prompt is fine beside one that reads it."""
    color, bright, constant = (measured(one, signs) for one in (rewards.load("color"), brightness, flat))
    assert statuses(results("r", constant, [color]))["r: values"] == WARNING
    assert statuses(results("r", constant, [constant]))["r: values"] == ERROR
    assert statuses(results("r", bright, [color]))["r: reads the prompt"] == OK


def test_a_reward_of_evaluations_is_called_once_and_not_counted_in_the_rollout(signs):
    calls = {"trained": 0, "monitored": 0}

    def counting(name: str):
        def reward(images, prompts):
            calls[name] += 1
            return images.mean((1, 2, 3))

        return reward

    both = WeightedSum({name: counting(name) for name in calls}, {"trained": 1.0, "monitored": 0.0})
    checked = reward_checks.check_rewards(both, ["trained"], signs, sampling_seconds=0.0)
    assert calls == {"trained": 10, "monitored": 1}, "a prompt, three times all, a group twice, and its four images alone"
    assert torch.equal(checked.stats["monitored"].original, checked.stats["trained"].original)
    messages = {result.name: result.message for result in checked.results}
    assert messages["trained: time per image"].startswith("100% of a rollout")
    assert "rollout" not in messages["monitored: time per image"]


def test_a_person_is_not_asked(trainer):
    def human(images, prompts):
        raise AssertionError("somebody was asked")

    built = trainer()
    for total in (built.rewards, built.eval_rewards):
        total.rewards, total.weights = {"human": human}, {"human": 1.0}
    reward_checks.replace_human_reward(built.rewards)
    sampled, checks = groups.sample_groups(built.stage, 0, built.train_set), RunChecks(built)
    found = checks.check_rewards(sampled)
    (row,) = found.results
    assert (found.stats, row.name, row.value) == ({}, "human: values", "not called")
    assert found.can_score(built.rewards)
    assert list(statuses(groups.check_groups(built.stage, sampled))) == ["batch invariance"]
    checks.check_update()
    assert len(checks.step_metrics) == 1


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (value_range("r", torch.tensor([1.0] * 19 + [0.0]), False, ERROR), WARNING),
        (value_range("r", torch.tensor([0.0] * 19 + [1.0]), False, ERROR), WARNING),
        (value_range("r", torch.tensor([0.0, 0.5, 1.0]), False, ERROR), OK),
        (value_range("r", torch.tensor([0.0, 0.5, torch.nan]), True, ERROR), WARNING),
        (value_range("r", torch.tensor([torch.nan] * 3), True, ERROR), ERROR),
        (reward_checks.latency("r", 2.0, 0.8), WARNING),
        (reward_checks.latency("r", 2.0, 0.3), OK),
    ],
)
def test_each_measure_of_a_reward_gets_its_status_and_advice(result, status):
    assert result.status == status
    assert status == OK or result.message.endswith("."), "it says what to do"


def half_detached(images, prompts):
    return (images.detach() * images).mean((1, 2, 3))


def clipped(images, prompts):
    return images.mean((1, 2, 3)).clamp(max=-1)


def plain(images, prompts):
    return images.mean((1, 2, 3))


def without_graph(images, prompts):
    return images.detach().mean((1, 2, 3))


@pytest.mark.parametrize(
    ("reward", "value", "status"),
    [(plain, "1.00", OK), (half_detached, "2.00", WARNING), (clipped, "0", WARNING), (without_graph, "none", WARNING)],
)
def test_a_gradient_is_compared_with_the_values(signs, monkeypatch, reward, value, status):
    assert gradient_stats("r", reward, signs) is None
    monkeypatch.setattr(reward, "differentiable", True, raising=False)
    found = gradient("r", gradient_stats("r", reward, signs))
    assert (found[0].value, found[0].status) == (value, status)
    assert status == OK or found[0].message.endswith((".", "?"))
    if reward is plain:
        assert [(result.name, result.value) for result in found[1:]] == [
            ("r: gradient in 1% of the image", "1%"),
            ("r: sharpness S1", f"{RHO / signs.images[0].numel() ** 0.5:.2g}"),
        ]


def test_the_doctor_checks_the_gradient_of_a_trained_reward(signs):
    clip = rewards.load("clip", device="cpu")
    checked = statuses(results("clip", measured(clip, signs)))
    assert {name: checked[f"clip: {name}"] for name in ("gradient", "gradient in 1% of the image", "sharpness S1")} == {
        "gradient": OK,
        "gradient in 1% of the image": OK,
        "sharpness S1": OK,
    }
