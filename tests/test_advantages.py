"""Group-relative advantages, by hand and by property."""

import pytest
import torch

from flow_grpo import advantages
from flow_grpo.advantages import (
    ADVANTAGES,
    compared_rewards,
    group_advantages,
    has_signal,
    shares,
)

OF_THE_SUM = [name for name in ADVANTAGES if not ADVANTAGES[name].each_reward]
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
def test_each_advantage_is_its_formula_computed_by_hand(method, expected):
    torch.testing.assert_close(
        group_advantages(REWARD, GROUP, method), torch.tensor(expected, dtype=torch.float32), rtol=2e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    ("method", "expected"),
    [("grpo", 1 / 1.1), ("batch_std", 1 / 1.1), ("reinforce_pp", 1 / 1.1), ("gdpo", 1 / (1 + 1.1e-4))],
)
def test_eps_is_added_to_the_std_not_to_the_variance(monkeypatch, method, expected):
    """Rewards 0 and 0.002 have a std of 0.001, ten times eps. gdpo divides twice, the second time by 1 / 1.1."""
    reward = torch.tensor([0.0, 0.002]).repeat(2)
    advantage = group_advantages(reward, torch.tensor([0, 0, 1, 1]), method)
    torch.testing.assert_close(advantage, expected * torch.tensor([-1.0, 1, -1, 1]), rtol=1e-6, atol=0)
    monkeypatch.setattr(advantages, "EPS", 0.0)
    free = group_advantages(reward, torch.tensor([0, 0, 1, 1]), method)
    torch.testing.assert_close(free, torch.tensor([-1.0, 1, -1, 1]), rtol=1e-5, atol=0)


def test_advantages_are_clamped_on_both_sides():
    reward = torch.tensor([-9.0, 9, -5, 5, -4, 4])
    advantage = group_advantages(reward, torch.tensor([0, 0, 1, 1, 2, 2]), "dr_grpo")
    assert advantage.tolist() == [-5, 5, -5, 5, -4, 4]
    assert group_advantages(reward, GROUP, lambda r, g: r).tolist() == [-5, 5, -5, 5, -4, 4]


@pytest.mark.parametrize("method", [m for m in OF_THE_SUM if m != "reinforce_pp"])
def test_only_the_own_group_counts_for_the_mean(method):
    shifted = REWARD + torch.tensor([0.0, 0, 0, 7, 7, 7])
    if method != "batch_std":
        torch.testing.assert_close(group_advantages(REWARD, GROUP, method), group_advantages(shifted, GROUP, method))
    sums = group_advantages(REWARD, GROUP, method)[:3].sum()
    assert abs(float(sums)) < 1e-5


@pytest.mark.parametrize("method", OF_THE_SUM)
def test_order_of_rows_and_labels_of_groups_do_not_matter(method):
    order = torch.tensor([4, 0, 3, 2, 5, 1])
    advantage = group_advantages(REWARD[order], GROUP[order] * 10 + 3, method)
    torch.testing.assert_close(advantage, group_advantages(REWARD, GROUP, method)[order])


def test_grpo_does_not_change_when_a_reward_is_scaled(monkeypatch):
    monkeypatch.setattr(advantages, "EPS", 0.0)
    scaled = group_advantages(100 * REWARD + 5, GROUP)
    torch.testing.assert_close(group_advantages(REWARD, GROUP), scaled, rtol=1e-4, atol=1e-5)


def test_rloo_is_dr_grpo_times_g_over_g_minus_1():
    torch.testing.assert_close(
        group_advantages(REWARD / 10, GROUP, "rloo"), 1.5 * group_advantages(REWARD / 10, GROUP, "dr_grpo")
    )


def test_dr_grpo_over_the_std_of_the_group_is_grpo(monkeypatch):
    monkeypatch.setattr(advantages, "EPS", 0.0)
    small = REWARD / 100  # far from the clamp
    std = torch.tensor([STD_0] * 3 + [STD_1] * 3) / 100
    torch.testing.assert_close(group_advantages(small, GROUP, "dr_grpo") / std, group_advantages(small, GROUP))


def test_gdpo_of_one_reward_is_grpo_normalised_over_the_batch():
    grpo = group_advantages(REWARD, GROUP)
    expected = (grpo - grpo.mean()) / (grpo.std(correction=0) + 1e-4)
    torch.testing.assert_close(group_advantages(REWARD, GROUP, "gdpo"), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(group_advantages(REWARD[:, None], GROUP, "gdpo"), expected, rtol=1e-4, atol=1e-5)


def two_rewards():
    other = torch.tensor([0.3, 0.1, 0.2, 0.9, 0.7, 0.1])
    return torch.stack([REWARD, other], 1), torch.tensor([1.0, 2.0])


def test_gdpo_by_hand_and_free_of_the_rewards_units():
    both, weights = two_rewards()
    parts = [group_advantages(column, GROUP) for column in both.T]
    total = parts[0] + 2 * parts[1]
    expected = (total - total.mean()) / (total.std(correction=0) + 1e-4)
    advantage = group_advantages(both, GROUP, "gdpo", weights=weights)
    torch.testing.assert_close(advantage, expected, rtol=1e-4, atol=1e-5)
    other_units = both * torch.tensor([1.0, 1000.0])
    torch.testing.assert_close(
        group_advantages(other_units, GROUP, "gdpo", weights=weights), advantage, rtol=1e-2, atol=1e-2
    )
    summed = group_advantages(other_units, GROUP, weights=weights)
    assert not torch.allclose(summed, group_advantages(both, GROUP, weights=weights), atol=0.1), "a sum is not"


@pytest.mark.parametrize("method", OF_THE_SUM)
def test_several_rewards_are_their_weighted_sum(method):
    both, weights = two_rewards()
    advantage = group_advantages(both, GROUP, method, weights=weights)
    torch.testing.assert_close(advantage, group_advantages(both[:, 0] + 2 * both[:, 1], GROUP, method))


def test_shares_sum_to_1_and_find_the_reward_that_drowns_the_others():
    both, weights = two_rewards()
    share, correlation = shares(both, weights, GROUP)
    assert float(share.sum()) == pytest.approx(1)
    assert float(share[0]) > 0.9, "its spread is ten times the other's"
    even, _ = shares(both, weights, GROUP, "gdpo")
    assert float(even[0]) < 0.5, "gdpo leaves it its weight alone"
    _, correlation = shares(both, weights, GROUP, "dr_grpo")
    torch.testing.assert_close(correlation.diagonal(), torch.ones(2))
    centred = [group_advantages(column / 10, GROUP, "dr_grpo") for column in both.T]
    expected = torch.corrcoef(torch.stack(centred))[0, 1]
    torch.testing.assert_close(correlation[0, 1], expected)


@pytest.mark.parametrize("unit", [1.0, 1e-6])
def test_a_share_is_the_part_of_the_variance_within_groups_that_comes_with_the_reward(unit):
    """Cov(w_r r, sum) / Var(sum), in any unit; two rewards that oppose each other share below 0 and above 1."""
    first = torch.tensor([1.0, -1, 2, -2])
    both, group = torch.stack([100 * unit + unit * first, -0.5 * unit * first], 1).double(), torch.tensor([0, 0, 1, 1])
    share, correlation = shares(both.float(), torch.tensor([1.0, 1.0]), group)
    torch.testing.assert_close(share, torch.tensor([2.0, -1.0]), rtol=1e-3, atol=0)
    assert float(share.sum()) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(correlation, torch.tensor([[1.0, -1], [-1, 1]]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("method", ["grpo", "rank", "dr_grpo", "batch_std", "rloo"])
def test_each_group_counts_in_the_shares_as_much_as_in_the_advantage(method):
    """One reward has a large spread in one of 16 groups, the other one a small spread in the 15 others."""
    group = torch.arange(16).repeat_interleave(4)
    spread = torch.tensor([-1.0, 1.0, -0.3, 0.3]).repeat(16)
    both = torch.stack([0.4 * spread.where(group == 0, 0), 0.05 * spread.where(group > 0, 0)], 1)
    advantage = group_advantages(both, group, method)
    expected = torch.stack([advantage[group == 0].square().sum(), advantage[group > 0].square().sum()])
    share, _ = shares(both, torch.ones(2), group, method)
    torch.testing.assert_close(share, expected / expected.sum(), rtol=1e-2 if method == "rank" else 1e-5, atol=1e-6)


def test_shares_of_rewards_that_cancel_each_other_are_those_of_the_other_groups():
    group = torch.arange(2).repeat_interleave(3)
    opposed = torch.tensor([[1.1, -1.1], [2.3, -2.3], [0.7, -0.7]])
    share, _ = shares(torch.cat([opposed, torch.tensor([[0.0, 0], [1, 0], [2, 0]])]), torch.ones(2), group)
    torch.testing.assert_close(share, torch.tensor([1.0, 0.0]))


def test_shares_for_gdpo_are_those_of_rewards_over_their_std_in_the_group():
    reward = torch.tensor([[0.0, 0.0], [0.002, 0.0], [0.0, 1.0], [0.002, 1.0]])  # a std of 0.001, ten times eps, and of 0.5
    share, _ = shares(reward, torch.tensor([1.0, 2.0]), torch.tensor([7, 7, 7, 7]), "gdpo")
    first, second = (1 / 1.1) ** 2, (2 * 0.5 / 0.5001) ** 2  # they are uncorrelated
    torch.testing.assert_close(share, torch.tensor([first, second]) / (first + second))


def test_a_reward_without_spread_has_no_share():
    share, correlation = shares(torch.stack([REWARD, torch.ones(6)], 1), torch.ones(2), GROUP)
    torch.testing.assert_close(share, torch.tensor([1.0, 0.0]))
    assert float(correlation[0, 1]) == 0
    share, correlation = shares(torch.ones(6, 2), torch.ones(2), GROUP)
    assert share.tolist() == [0, 0]
    assert correlation.tolist() == [[0, 0], [0, 0]]


def test_a_function_of_ones_own_is_clamped_and_checked():
    assert group_advantages(REWARD, GROUP, lambda reward, group: reward).tolist() == [1, 2, 3, 5, 5, 5]
    for wrong in (
        lambda r, g: None,
        lambda r, g: "none",
        lambda r, g: [[1], [2, 3]],
        lambda r, g: r[:2],
        lambda r, g: r * float("nan"),
        lambda r, g: r.where(r > 1, torch.inf),
    ):
        with pytest.raises(ValueError, match="must return 6 finite numbers"):
            group_advantages(REWARD, GROUP, wrong)


def test_a_better_image_has_a_larger_advantage_and_equal_rewards_have_none():
    advantage = group_advantages(REWARD, GROUP)
    assert advantage[2] > advantage[1] > advantage[0]
    same = group_advantages(torch.full((4,), 0.3), torch.tensor([0, 0, 1, 1]))
    assert float(same.abs().max()) < 1e-3


def test_a_large_reward_that_is_the_same_for_all_says_nothing_beside_another():
    """In float32 the mean of 24 equal numbers is another number, and its distance, over an eps, an advantage."""
    group, other = torch.arange(2).repeat_interleave(24), torch.arange(48.0).remainder(7)
    constant = torch.full((48,), -180.432)
    both = group_advantages(torch.stack([constant, other], 1), group, "gdpo")
    torch.testing.assert_close(both, group_advantages(other[:, None], group, "gdpo"), rtol=0, atol=0)


@pytest.mark.parametrize("sign", [1, -1])
def test_groups_without_signal_are_found(sign):
    reward = sign * torch.tensor([3.0, 3.0, 0.0, 1.0])
    group = torch.tensor([2, 2, 8, 8])
    for numbers in (reward, reward.int(), reward.half()):
        assert has_signal(numbers, group).tolist() == [False, False, True, True]
    for whole in ("reinforce_pp", lambda reward, group: reward):
        assert has_signal(reward, group, whole).tolist() == [True] * 4
        assert has_signal(torch.ones(4), group, whole).tolist() == [False] * 4


def test_a_group_has_signal_if_one_of_several_rewards_differs():
    reward = torch.tensor([[1.0, 5], [1, 5], [1, 5], [2, 5], [1, 5], [2, 6]])
    group = torch.tensor([0, 0, 1, 1, 2, 2])
    assert has_signal(reward, group, "gdpo").tolist() == [False, False, True, True, True, True]
    assert has_signal(reward[:2], group[:2], "reinforce_pp").tolist() == [False, False]
    assert has_signal(reward[:4], group[:4], "reinforce_pp").tolist() == [True] * 4


def test_advantages_are_float32_whatever_the_rewards_are():
    for method in ADVANTAGES:
        assert group_advantages(REWARD.double(), GROUP, method).dtype == torch.float32
        both = torch.stack([REWARD, REWARD], 1).double()
        for weights in (None, torch.ones(2)):
            assert group_advantages(both, GROUP, method, weights=weights).dtype == torch.float32
        whole = torch.tensor([1, 2, 3, 10, 10, 16])
        assert group_advantages(whole, GROUP, method).equal(group_advantages(REWARD, GROUP, method))
    assert group_advantages(REWARD, GROUP, lambda reward, group: [1, 2, 3, 4, 5, 0]).tolist() == [1, 2, 3, 4, 5, 0]
    assert group_advantages(REWARD, GROUP, lambda reward, group: reward.double()).dtype == torch.float32
    both, weights = two_rewards()
    for one, other in zip(
        shares((10 * both).long(), weights, GROUP), shares((10 * both).long().float(), weights, GROUP), strict=True
    ):
        assert one.equal(other)


def test_advantages_are_computed_where_the_rewards_are():
    """On `meta`, a device without numbers: a tensor made elsewhere can't be mixed with one of it."""
    reward, group, size = (t.to("meta") for t in (REWARD, GROUP, torch.tensor([3, 3])))
    for method in OF_THE_SUM:
        assert ADVANTAGES[method].function(reward, group, size).device.type == "meta"


@pytest.mark.parametrize(
    ("reward", "group", "method", "words"),
    [
        ([1.0, 2.0, 3.0], [0, 0, 1], "grpo", "group of one"),
        ([1.0, float("nan")], [0, 0], "grpo", "finite"),
        ([1.0, 2.0], [0, 0], "gpro", "unknown advantage"),
    ],
)
def test_unknown_methods_groups_of_one_and_values_that_are_not_finite_are_refused(reward, group, method, words):
    with pytest.raises(ValueError, match=words):
        group_advantages(torch.tensor(reward), torch.tensor(group), method)


# -- against reward hacking -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*ADVANTAGES, "users"])
@pytest.mark.parametrize("by_row", [False, True])
def test_compared_rewards_have_the_advantages_of_the_rewards_that_they_are_made_of(method, by_row):
    """Whatever is compared, one by one or the sum, gives the same advantages; a cap is of what is compared."""
    method = (lambda reward, group: reward - reward.mean()) if method == "users" else method
    reward, group = torch.randn(12, 2, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3
    weights = torch.tensor([[1.0, 3.0], [2.0, 0.5], [1.0, 1.0]])[group] if by_row else torch.tensor([1.0, 3.0])
    rewards, of_rewards = compared_rewards(reward, weights, method)
    assert rewards.shape[1] == (2 if method == "gdpo" else 1)
    expected = group_advantages(reward, group, method, weights=weights)
    assert torch.equal(group_advantages(rewards, group, method, weights=of_rewards), expected)
