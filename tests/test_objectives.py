"""Objectives against their formulas, their reductions, and a policy gradient that is known in closed form."""

import pytest
import torch

from flow_grpo import objectives, sde
from flow_grpo.advantages import group_advantages


def rows(n=6):
    generator = torch.Generator().manual_seed(3)
    log_prob = torch.randn(n, generator=generator, dtype=torch.float64) * 0.01
    old = log_prob + 0.01 * torch.randn(n, generator=generator, dtype=torch.float64)
    advantage = torch.randn(n, generator=generator, dtype=torch.float64)
    return log_prob.requires_grad_(True), old, advantage


def test_grpo_is_the_clipped_surrogate():
    log_prob, old, advantage = rows()
    low, high = 0.004, 0.008
    expected = []
    for new, before, a in zip(log_prob.tolist(), old.tolist(), advantage.tolist(), strict=True):
        ratio = torch.tensor(new - before, dtype=torch.float64).exp().item()
        expected.append(-min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a))
    loss = objectives.grpo(log_prob, old, advantage, low, high)
    torch.testing.assert_close(loss.value, torch.tensor(expected, dtype=torch.float64))
    outside = ((log_prob - old).exp() - 1).detach()
    low_clipped, high_clipped = (outside < -low) & (advantage < 0), (outside > high) & (advantage > 0)
    assert low_clipped.any()
    assert high_clipped.any(), "the example must reach both sides"
    assert loss.metrics["clip_ratio/low_mean"].bool().equal(low_clipped)
    assert loss.metrics["clip_ratio/high_mean"].bool().equal(high_clipped)
    (gradient,) = torch.autograd.grad(loss.value.sum(), log_prob)
    assert (gradient[low_clipped | high_clipped] == 0).all(), "what is clipped must not push further"


def test_before_any_update_grpo_has_the_gradient_of_reinforce():
    log_prob, _, advantage = rows()
    (gradient,) = torch.autograd.grad(
        objectives.grpo(log_prob, log_prob.detach(), advantage, 1e-4, 1e-4).value.sum(), log_prob
    )
    torch.testing.assert_close(gradient, -advantage)


def test_the_policy_gradient_of_a_toy_is_the_closed_form():
    """One step x_next ~ N(theta, s^2), reward -(x_next - c)^2: the gradient of its expectation is 2 (c - theta)."""
    theta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    c, s, n = 1.0, 0.5, 400_000
    x_next = theta.detach() + s * torch.randn(n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reward = -((x_next[:, 0] - c) ** 2)
    centred = reward - reward.mean()
    log_prob = sde.log_prob(x_next, theta.expand(n, 1), torch.tensor([[s]], dtype=torch.float64))
    loss = objectives.grpo(log_prob, log_prob.detach(), centred, 0.2, 0.2).value.mean()
    (gradient,) = torch.autograd.grad(loss, theta)
    per_sample = centred * (x_next[:, 0] - theta.detach()) / s**2
    error = float(per_sample.std()) / n**0.5
    assert abs(-float(gradient) - 2 * (c - 0.3)) < 4 * error
    assert error < 0.02


def test_the_gradient_of_the_whole_chain_is_the_finite_difference():
    """v -> transition -> log_prob -> ratio -> grpo, in float64, for every stochastic transition."""
    generator = torch.Generator().manual_seed(1)
    x, base, noise = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    direction = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    advantage = group_advantages(torch.tensor([1.0, 0.0, 0.3, 0.7]), torch.tensor([0, 0, 1, 1])).double()
    for name in ("flow_sde", "dance_sde", "cps", "exact_sde"):

        def loss(shift, name=name):
            mean, std = sde.transition(name, x, base + shift * direction, 0.8, 0.7, 0.6, 0.9)
            return objectives.grpo(sde.log_prob(x_next, mean, std), old, advantage, 0.5, 0.5).value.sum()

        mean, std = sde.transition(name, x, base, 0.8, 0.7, 0.6, 0.9)
        x_next = mean + std * noise
        old = sde.log_prob(x_next, mean, std)
        shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(loss(shift), shift)
        h = 1e-6
        assert float(gradient) == pytest.approx(float(loss(h) - loss(-h)) / (2 * h), rel=1e-6)


def forward_process(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x0, eps, error, old = torch.randn(4, 5, 2, 3, generator=generator, dtype=torch.float64)
    sigma = torch.rand(5, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    column = sigma.view(-1, 1, 1)
    return x0, eps, sigma, (1 - column) * x0 + column * eps, eps - x0 + 0.3 * error, eps - x0 + 0.3 * old


def test_awm_is_the_weighted_matching_loss():
    x0, eps, sigma, _, v, _ = forward_process()
    error = (v - (eps - x0)).square().mean((1, 2))
    found = objectives.awm_log_prob(v, eps - x0, sigma)
    torch.testing.assert_close(found.double(), -error, rtol=1e-5, atol=1e-6)
    huber = -(sigma / 0.25) * ((error + 1e-10) ** 0.25 - 1e-10**0.25)
    found = objectives.awm_log_prob(v, eps - x0, sigma, "ghuber")
    torch.testing.assert_close(found.double(), huber, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="unknown weight"):
        objectives.awm_log_prob(v, eps, sigma, "hubber")


def test_nft_is_its_formula():
    x0, _, sigma, x, v, old = forward_process()
    advantage, beta, top = torch.tensor([-3.0, -1, 0, 2, 9], dtype=torch.float64), 0.4, 5.0
    column = sigma.view(-1, 1, 1)
    expected = []
    for i in range(5):
        r = 0.5 + 0.5 * max(-1.0, min(1.0, float(advantage[i]) / top))
        value = 0.0
        for share, velocity in ((r, beta * v + (1 - beta) * old), (1 - r, (1 + beta) * old - beta * v)):
            error = (x - column * velocity - x0)[i]
            value += share * float(error.square().mean() / error.abs().mean().clamp_min(1e-5))
        expected.append(top / beta * value)
    found = objectives.nft(v, old, x, x0, sigma, advantage, beta, top).value
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-5)


def test_nft_with_beta_1_trains_the_model_itself_on_good_images():
    x0, _, sigma, x, v, old = forward_process()
    loss = objectives.nft(v, old, x, x0, sigma, torch.full((5,), 9.0), 1.0, 5.0)
    error = x - sigma.view(-1, 1, 1) * v - x0
    expected = 5 * error.square().mean((1, 2)) / error.abs().mean((1, 2))
    torch.testing.assert_close(loss.value.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["awm", "nft"])
def test_forward_objectives_pull_to_good_images_and_push_from_bad_ones(name):
    x0, eps, sigma, x, v, _ = forward_process()

    def slope(advantage):
        step = torch.zeros((), dtype=torch.float64, requires_grad=True)
        moved = v.float() + step * ((eps - x0) - v)  # step 1 would draw x0 exactly
        if name == "nft":
            value = objectives.nft(moved, v, x, x0, sigma, torch.full((5,), advantage), 1.0, 5.0).value
        else:
            log_prob = objectives.awm_log_prob(moved, eps - x0, sigma)
            value = objectives.awm(log_prob, log_prob.detach(), torch.full((5,), advantage), 0.2, 0.2).value
        return float(torch.autograd.grad(value.sum(), step)[0])

    assert slope(2.0) < 0 < slope(-2.0)
