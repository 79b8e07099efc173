"""PPO's critic by itself: its advantages against sums by hand, and how it learns against AdamW on a copy."""

import copy

import pytest
import torch
from torch.nn import functional

from flow_grpo.training import critic as critic_module
from flow_grpo.training.critic import Critic, CriticAdvantages, gae
from flow_grpo.types import Schedule, StochasticSteps, Trajectory

SIGMAS = torch.tensor([1.0, 0.8, 0.5, 0.0])


@pytest.fixture(autouse=True)
def _small_and_fast(monkeypatch):
    monkeypatch.setattr(critic_module, "WIDTH", 8)
    monkeypatch.setattr(critic_module, "LR", 0.01)
    monkeypatch.setattr(critic_module, "GAE_LAMBDA", 0.7)


def trajectory(rows=5, shape=(2, 2, 3), steps=(0, 2)):
    x = torch.randn(rows, len(steps), *shape, generator=torch.Generator().manual_seed(0))
    return Trajectory(
        Schedule(1000 * SIGMAS[:-1], SIGMAS),
        StochasticSteps(list(steps), "cps", 0.5),
        x,
        x,
        x,
        x.flatten(2).mean(2),
        x[:, 0],
    )


def made(shape=(2, 2, 3), seed=0):
    return Critic(torch.Size(shape), 3, seed)


def given(rows=5):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(rows, generator=generator), torch.randn(rows, 3, generator=generator)


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_gae_is_the_sum_of_discounted_surprises(share):
    values, reward = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.arange(4.0)
    following = torch.cat([values, reward[:, None]], 1)
    surprise = following[:, 1:] - following[:, :-1]
    expected = [sum(share**j * surprise[:, k + j] for j in range(3 - k)) for k in range(3)]
    torch.testing.assert_close(gae(values, reward, share), torch.stack(expected, 1))


@pytest.mark.parametrize("shape", [(2, 2, 3), (6, 2), (2, 2, 2, 3)])
def test_a_value_is_of_a_state_its_noise_level_and_the_prompt(shape):
    """Latents as pictures, packed and as videos; every part of what is given matters, and a row depends on itself alone."""
    critic, t, (_, text) = made(shape), trajectory(shape=shape), given()
    values = critic.values(t, text)
    assert values.shape == (5, 2)
    assert not values.requires_grad
    for k, step in enumerate(t.steps):
        torch.testing.assert_close(values[:, k], critic(t.x[:, k], SIGMAS[step].expand(5), text).detach())
    x, sigma = t.x[:, 0], torch.full((5,), 0.5)
    base = critic(x, sigma, text)
    torch.testing.assert_close(critic(x[2:3], sigma[:1], text[2:3]), base[2:3])
    for other in (
        critic(x.roll(1, -1), sigma, text),
        critic(2 * x, sigma, text),
        critic(x, 0.9 * sigma, text),
        critic(x, sigma, 2 * text),
    ):
        assert ((other - base).abs() > 1e-5).all()


@pytest.mark.parametrize("shape", [(2, 2, 3), (6, 2), (2, 2, 2, 3)])
def test_the_network_is_this_one(shape):
    """So that a critic in a checkpoint means the same to a later version."""
    critic, t, (_, text) = made(shape), trajectory(shape=shape), given()
    w = dict(critic.named_parameters())

    def layer(name, x):
        return functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def two_layers(name, x):
        normed = functional.layer_norm(x, x.shape[-1:], w[f"{name}.0.weight"], w[f"{name}.0.bias"])
        return layer(f"{name}.3", functional.gelu(layer(f"{name}.1", normed)))

    x, sigma = t.x[:, 0], torch.linspace(0.1, 0.9, 5)
    tokens = x if len(shape) == 2 else x.reshape(5, 2, -1).transpose(1, 2)
    picture = two_layers("read", layer("embed", tokens) + w["place"]).mean(1)
    prompt = layer("condition", torch.cat([text, torch.stack([sigma, 1 - sigma], 1)], 1))
    torch.testing.assert_close(critic(x, sigma, text), two_layers("value", torch.cat([picture, prompt], 1))[:, 0])


def test_the_advantages_are_of_the_critic_as_it_was_normalised_over_rows_and_steps():
    critic, t, (reward, text) = made(), trajectory(), given()
    values = critic.values(t, text)
    raw = gae(values, reward, 0.7)
    expected = (raw - raw.mean()) / (raw.std(correction=0) + 1e-4)
    advantage, _ = critic.advantages(t, reward, text)
    torch.testing.assert_close(advantage, expected)
    assert not advantage.requires_grad
    rare, _ = made().advantages(trajectory(400), (torch.arange(400) == 7).float(), torch.zeros(400, 3))
    assert rare.max() == 5
    lost, _ = made().advantages(trajectory(400), -1000 * (torch.arange(400) == 7).float(), torch.zeros(400, 3))
    assert lost.min() == -5


def test_the_critic_takes_four_gradient_steps_towards_the_rewards():
    critic, t, (reward, text) = made(), trajectory(), given()
    copied = copy.deepcopy(critic)
    adamw = torch.optim.AdamW(copied.parameters(), lr=0.01)
    values = copied.values(t, text)
    target, losses = values + gae(values, reward, 0.7), []
    for _ in range(4):
        errors = []
        for k, step in enumerate(t.steps):
            error = (copied(t.x[:, k], SIGMAS[step].expand(5), text) - target[:, k]).square().mean()
            adamw.zero_grad()
            error.backward()
            adamw.step()
            errors.append(float(error))
        losses.append(sum(errors) / 2)
    _, metrics = critic.advantages(t, reward, text)
    assert all(torch.equal(p, q) for p, q in zip(critic.parameters(), copied.parameters(), strict=True))
    unexplained = (target - values).var() / target.var()
    assert metrics == pytest.approx(
        {"critic/loss": losses[0], "critic/explained_variance": float(1 - unexplained)}, rel=1e-5
    )


def test_a_critic_that_says_the_same_reward_of_all_explains_nothing_and_divides_by_nothing():
    critic, t = made(), trajectory(shape=(2, 2, 3))
    with torch.no_grad():
        for p in critic.value[-1].parameters():
            p.zero_()
    advantage, metrics = critic.advantages(t, torch.zeros(5), given()[1])
    assert not advantage.any()
    assert metrics["critic/explained_variance"] == 1


def test_a_variance_of_nothing_is_not_divided_by(monkeypatch):
    """At lambda 1 the target is the reward, here the same for all."""
    monkeypatch.setattr(critic_module, "GAE_LAMBDA", 1.0)
    critic = made()
    values = critic.values(trajectory(), given()[1])
    _, metrics = critic.advantages(trajectory(), torch.ones(5), given()[1])
    assert metrics["critic/explained_variance"] == pytest.approx(1 - float(values.var()) / 1e-12, rel=1e-3)


def test_a_critic_is_its_seeds_and_leaves_the_global_stream_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    one, same, other = made(), made(), made(seed=1)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.embed.weight, other.embed.weight)
    assert one.place.shape == (6, 8)
    assert 0.01 < float(one.place.std()) < 0.03, "it begins small"


def test_a_critic_goes_on_from_a_state_that_later_steps_leave_alone():
    one, other, t, (reward, text) = made(), made(seed=1), trajectory(), given()
    one.advantages(t, reward, text)
    state = CriticAdvantages(None, one, None).state_dict()
    CriticAdvantages(None, other, None).load_state_dict(state)
    former = copy.deepcopy(state)
    for critic in (one, other):
        critic.advantages(t, 2 * reward, text)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    moments = zip(former["optimizer"]["state"].values(), state["optimizer"]["state"].values(), strict=True)
    assert all(torch.equal(a[name], b[name]) for a, b in moments for name in a)
