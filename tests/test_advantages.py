"""Group-relative advantages, by hand and by property."""

import pytest
import torch

from flow_grpo.advantages import METHODS, group_advantages, has_signal

REWARD = torch.tensor([1.0, 2.0, 3.0, 10.0, 10.0, 16.0])
GROUP = torch.tensor([0, 0, 0, 1, 1, 1])
STD_0, STD_1 = (2 / 3) ** 0.5, 8**0.5
STD_ALL = float(REWARD.std(correction=0))


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("grpo", [-1 / STD_0, 0, 1 / STD_0, -2 / STD_1, -2 / STD_1, 4 / STD_1]),
        ("batch_std", [-1 / STD_ALL, 0, 1 / STD_ALL, -2 / STD_ALL, -2 / STD_ALL, 4 / STD_ALL]),
        ("dr_grpo", [-1, 0, 1, -2, -2, 4]),
        ("rloo", [-1.5, 0, 1.5, -3, -3, 5]),  # the last would be 6: clamped
        ("reinforce_pp", [(r - 7) / STD_ALL for r in REWARD.tolist()]),
        ("rank", [-1, 0, 1, -0.5, -0.5, 1]),
    ],
)
def test_by_hand(method, expected):
    torch.testing.assert_close(
        group_advantages(REWARD, GROUP, method), torch.tensor(expected, dtype=torch.float32), rtol=2e-4, atol=1e-6
    )


@pytest.mark.parametrize("method", [m for m in METHODS if m != "reinforce_pp"])
def test_only_the_own_group_counts_for_the_mean(method):
    shifted = REWARD + torch.tensor([0.0, 0, 0, 7, 7, 7])
    if method != "batch_std":
        torch.testing.assert_close(group_advantages(REWARD, GROUP, method), group_advantages(shifted, GROUP, method))
    sums = group_advantages(REWARD, GROUP, method, eps=1e-4)[:3].sum()
    assert abs(float(sums)) < 1e-5


@pytest.mark.parametrize("method", list(METHODS))
def test_order_of_rows_and_labels_of_groups_do_not_matter(method):
    order = torch.tensor([4, 0, 3, 2, 5, 1])
    found = group_advantages(REWARD[order], GROUP[order] * 10 + 3, method)
    torch.testing.assert_close(found, group_advantages(REWARD, GROUP, method)[order])


def test_grpo_does_not_change_when_a_reward_is_scaled():
    torch.testing.assert_close(
        group_advantages(REWARD, GROUP, eps=0), group_advantages(100 * REWARD + 5, GROUP, eps=0), rtol=1e-4, atol=1e-5
    )


def test_rloo_is_dr_grpo_times_g_over_g_minus_1():
    torch.testing.assert_close(
        group_advantages(REWARD / 10, GROUP, "rloo"), 1.5 * group_advantages(REWARD / 10, GROUP, "dr_grpo")
    )


def test_a_better_image_has_a_larger_advantage_and_equal_rewards_have_none():
    advantage = group_advantages(REWARD, GROUP)
    assert advantage[2] > advantage[1] > advantage[0]
    same = group_advantages(torch.full((4,), 0.3), torch.tensor([0, 0, 1, 1]))
    assert float(same.abs().max()) < 1e-3


def test_groups_without_signal_are_found():
    reward = torch.tensor([1.0, 1.0, 0.0, 1.0])
    group = torch.tensor([0, 0, 1, 1])
    assert has_signal(reward, group).tolist() == [False, False, True, True]
    assert has_signal(reward, group, "reinforce_pp").tolist() == [True] * 4


@pytest.mark.parametrize(
    ("reward", "group", "method", "words"),
    [
        ([1.0, 2.0, 3.0], [0, 0, 1], "grpo", "group of one"),
        ([1.0, float("nan")], [0, 0], "grpo", "finite"),
        ([1.0, 2.0], [0, 0], "gpro", "unknown advantage"),
    ],
)
def test_what_makes_no_sense_is_refused(reward, group, method, words):
    with pytest.raises(ValueError, match=words):
        group_advantages(torch.tensor(reward), torch.tensor(group), method)
