"""The transitions against closed forms: Euler, a point mass, Gaussian data with its known velocity, torch.distributions."""

import math

import pytest
import torch
from support.method_names import STOCHASTIC
from torch.distributions import Normal, kl_divergence

from flow_grpo import sde

KEEP_MARGINALS = ["cps", "exact_sde"]


def shifted(steps: int, shift: float = 3.0) -> torch.Tensor:
    """FlowMatchEulerDiscreteScheduler's sigmas for SD3.5."""
    first = torch.linspace(1000, 1000 * shift / (999 + shift), steps, dtype=torch.float64) / 1000
    return torch.cat([shift * first / (1 + (shift - 1) * first), torch.zeros(1, dtype=torch.float64)])


def velocity_of_gaussian(x, sigma, mean, var):
    """E[eps - x0 | x] for x0 ~ N(mean, var)."""
    total = (1 - sigma) ** 2 * var + sigma**2
    surprise = (x - (1 - sigma) * mean) / total
    return sigma * surprise - (mean + (1 - sigma) * var * surprise)


def moments_after(name, sigmas, noise_level, mean, var):
    """Mean and variance of the last state, exact: each step is affine in x, so two points give its slope and offset."""
    m, s2 = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    for sigma, sigma_next in zip(sigmas[:-1], sigmas[1:], strict=True):
        x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        v = velocity_of_gaussian(x, sigma, mean, var)
        step, std = sde.transition(name, x, v, sigma, sigma_next, noise_level, sigmas[1])
        slope, offset = step[1] - step[0], step[0]
        m, s2 = slope * m + offset, slope**2 * s2 + std.flatten()[0] ** 2
    return float(m), float(s2)


@pytest.mark.parametrize("name", list(sde.TRANSITIONS))
def test_without_noise_every_transition_is_the_euler_step(name):
    x, v = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    for sigma, sigma_next in [(1.0, 0.9), (0.7, 0.3), (0.1, 0.0)]:
        mean, std = sde.transition(name, x, v, sigma, sigma_next, 0.0, sigma_max=0.9)
        torch.testing.assert_close(mean, x + (sigma_next - sigma) * v, rtol=0, atol=1e-12)
        assert float(std.abs().max()) == 0


@pytest.mark.parametrize("name", KEEP_MARGINALS)
@pytest.mark.parametrize("steps", [2, 5, 40])
def test_a_point_mass_keeps_its_marginal_exactly_at_any_step_count(name, steps):
    sigmas, x0 = shifted(steps), 1.7
    spread = 1.0  # std of x around (1 - sigma) x0
    for sigma, sigma_next in zip(sigmas[:-1], sigmas[1:], strict=True):
        eps = torch.tensor([[0.0], [1.0]], dtype=torch.float64) * spread / sigma
        x = (1 - sigma) * x0 + sigma * eps
        mean, std = sde.transition(name, x, eps - x0, sigma, sigma_next, 0.6, sigmas[1])
        assert float(mean[0]) == pytest.approx(float((1 - sigma_next) * x0), abs=1e-12)
        spread = float(((mean[1] - mean[0]) ** 2 + std.flatten()[0] ** 2).sqrt())
        assert spread == pytest.approx(float(sigma_next), abs=1e-12)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_gaussian_data_is_reached_in_the_limit_of_many_steps(name):
    """A step of cps adds a share of noise that does not know the step's length: for a limit it falls as 1 / sqrt(steps)."""
    mean, var = 0.8, 0.25
    errors = []
    for steps in (50, 200, 800):
        level = 0.5 * (50 / steps) ** 0.5 if name == "cps" else 0.5
        moments = moments_after(name, shifted(steps), level, mean, var)
        errors.append(abs(moments[0] - mean) + abs(moments[1] - var))
    assert errors[2] < errors[1] < errors[0], f"the error must fall with the step size: {errors}"
    assert errors[2] < 0.01
    assert errors[1] / errors[2] > 1.8, f"at least about first order: {errors}"


MODES, WIDTH, SHARES = torch.tensor([-1.5, 1.5]).double(), 0.3, torch.tensor([0.7, 0.3]).double()


def velocity_of_two_gaussians(x, sigma):
    """E[eps - x0 | x], x (n, 1), for x0 of two Gaussians."""
    var = (1 - sigma) ** 2 * WIDTH**2 + sigma**2
    chance = torch.softmax(SHARES.log() - (x - (1 - sigma) * MODES) ** 2 / (2 * var), 1)
    return (chance * velocity_of_gaussian(x, sigma, MODES, WIDTH**2)).sum(1, keepdim=True)


def distance_from_two_gaussians(name: str, steps: int, count: int = 4000, seed: int = 0) -> tuple[float, float]:
    """Wasserstein-1 distance of samples, at noise level 0.8, from the data; the share of samples in the first mode.

    The table in docs/methods.md has its means over seeds 0, 1 and 2 with 20,000 samples.
    """
    sigmas, even = shifted(steps), (torch.arange(count).double() + 0.5) / count
    x, generator = torch.special.ndtri(even)[:, None], torch.Generator().manual_seed(seed)
    for sigma, sigma_next in zip(sigmas[:-1], sigmas[1:], strict=True):
        mean, std = sde.transition(name, x, velocity_of_two_gaussians(x, sigma), sigma, sigma_next, 0.8, sigmas[1])
        x = mean + std * torch.randn(count, 1, generator=generator, dtype=torch.float64)
    line = torch.linspace(-5, 5, 5001, dtype=torch.float64)
    data = (SHARES * torch.special.ndtr((line[:, None] - MODES) / WIDTH)).sum(1)
    drawn = torch.searchsorted(x[:, 0].sort().values, line) / count
    return float((data - drawn).abs().mean() * 10), float((x < 0).double().mean())


def test_ode_and_exact_sde_converge_to_the_data_with_more_steps_and_cps_does_not():
    """As docs/methods.md says: cps keeps a bias in how often it shows the larger mode."""
    ode = [distance_from_two_gaussians("ode", steps)[0] for steps in (10, 40, 160)]
    assert ode[1] < ode[0] / 3
    assert ode[2] < ode[1] / 3
    exact = [distance_from_two_gaussians("exact_sde", steps)[0] for steps in (10, 160)]
    assert exact[1] < exact[0] / 2
    for steps in (40, 160):
        distance, share = distance_from_two_gaussians("cps", steps)
        assert distance > 0.12
        assert share > 0.73


def test_flow_sde_inflates_its_noise_as_the_formula_predicts():
    sigmas, level = shifted(10), 0.7
    predicted = 1.0  # variance around the point mass at 0
    drawn = torch.randn(200_000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for i in range(9):
        sigma, sigma_next = float(sigmas[i]), float(sigmas[i + 1])
        delta = sigma_next - sigma
        g = level * math.sqrt(sigma / (1 - (float(sigmas[1]) if sigma == 1 else sigma)))
        slope = 1 + g**2 * delta / (2 * sigma) + (1 + g**2 * (1 - sigma) / (2 * sigma)) * delta / sigma
        predicted = slope**2 * predicted + g**2 * -delta
        mean, std = sde.transition("flow_sde", drawn, drawn / sigma, sigma, sigma_next, level, sigmas[1])
        noise = torch.randn(drawn.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i + 1))
        drawn = mean + std * noise
        assert float(drawn.var()) == pytest.approx(predicted, rel=0.02)
    assert float(sigmas[9]) == pytest.approx(0.0089, abs=1e-4)
    assert math.sqrt(predicted) / float(sigmas[9]) == pytest.approx(28, abs=1)


def test_flow_sde_and_dance_sde_differ_only_in_g():
    x, v = torch.randn(2, 4, 6, dtype=torch.float64)
    sigma, sigma_next, level = 0.6, 0.5, 0.7
    g = level * math.sqrt(sigma / (1 - sigma))
    for ours, other in zip(
        sde.transition("flow_sde", x, v, sigma, sigma_next, level),
        sde.transition("dance_sde", x, v, sigma, sigma_next, g),
        strict=True,
    ):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-12)


def test_the_published_std_of_flow_sde():
    _, std = sde.transition("flow_sde", torch.zeros(1, 1), torch.zeros(1, 1), 0.8, 0.6, 0.7)
    assert float(std) == pytest.approx(0.7 * math.sqrt(0.8 / 0.2) * math.sqrt(0.2), rel=1e-6)


def test_at_a_sigma_of_1_the_published_std_of_flow_sde_has_the_second_sigma_in_its_denominator():
    """`sqrt(sigma / (1 - where(sigma == 1, sigmas[1], sigma))) * noise_level`, arXiv 2505.05470; the drift has the same g."""
    x, v = torch.randn(2, 1, 4, dtype=torch.float64)
    mean, std = sde.transition("flow_sde", x, v, 1.0, 0.96, 0.7, sigma_max=0.9)
    g = 0.7 * math.sqrt(1 / (1 - 0.9))
    assert float(std) == pytest.approx(g * math.sqrt(0.04), rel=1e-12)
    torch.testing.assert_close(mean, x * (1 - g**2 * 0.04 / 2) - v * 0.04, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("level", "share"), [(1 / 3, 0.5), (0.5, 0.5**0.5), (1.0, 1.0)])
def test_the_noise_of_cps_is_the_sine_of_a_right_angle_times_its_level(level, share):
    """std = sigma_next sin(noise_level pi / 2), arXiv 2509.05952: at level 1 all the noise of x_next is fresh."""
    x, v = torch.randn(2, 1, 4, dtype=torch.float64)
    mean, std = sde.transition("cps", x, v, 0.8, 0.6, level)
    assert float(std) == pytest.approx(0.6 * share, rel=1e-12)
    kept = 0.6 * math.sqrt(1 - share**2)
    torch.testing.assert_close(mean, 0.4 * (x - 0.8 * v) + kept * (x + 0.2 * v), rtol=0, atol=1e-7)


@pytest.mark.parametrize("level", [0.3, 0.7, 1.2])
def test_exact_sde_keeps_as_much_of_the_noise_as_flow_sde_does_in_many_small_steps(level):
    """On a point mass at 0, where v = x / sigma: both solve the same equation, of which flow_sde's steps are Euler's."""
    sigmas = torch.linspace(0.9, 0.2, 100_001, dtype=torch.float64)
    x = torch.ones(100_000, 1, dtype=torch.float64)  # a row for each step: the slopes multiply
    slopes, _ = sde.transition("flow_sde", x, x / sigmas[:-1, None], sigmas[:-1], sigmas[1:], level)
    kept = float(slopes.log().sum().exp())
    one = torch.ones(1, 1, dtype=torch.float64)
    mean, std = sde.transition("exact_sde", one, one / 0.9, 0.9, 0.2, level)
    rho = (0.2 * 0.1 / (0.9 * 0.8)) ** (level**2 / 2)
    assert float(mean) == pytest.approx(0.2 / 0.9 * rho, rel=1e-12)
    assert float(std) == pytest.approx(0.2 * math.sqrt(1 - rho**2), rel=1e-12)
    assert kept == pytest.approx(float(mean), rel=1e-4)


def test_exact_sde_does_not_depend_on_the_number_of_steps():
    """For a point mass the correlation of noise over a stretch is that of one step, however it is cut."""

    def kept(sigmas):
        share = 1.0
        for sigma, sigma_next in zip(sigmas[:-1], sigmas[1:], strict=True):
            x = torch.full((1, 1), float(sigma), dtype=torch.float64)
            mean, _ = sde.transition("exact_sde", x, x / sigma, sigma, sigma_next, 0.9)
            share *= float(mean) / float(sigma_next)
        return share

    grid = torch.linspace(0.9, 0.2, 2, dtype=torch.float64)
    fine = torch.linspace(0.9, 0.2, 200, dtype=torch.float64)
    assert kept(grid) == pytest.approx(kept(fine), rel=1e-9)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_a_sigma_per_sample_equals_one_call_each(name):
    x, v = torch.randn(2, 3, 2, 4)
    sigma, sigma_next = torch.tensor([1.0, 0.6, 0.2]), torch.tensor([0.9, 0.5, 0.1])
    mean, std = sde.transition(name, x, v, sigma, sigma_next, 0.5, 0.9)
    for i in range(3):
        alone = sde.transition(name, x[i : i + 1], v[i : i + 1], sigma[i], sigma_next[i], 0.5, 0.9)
        assert torch.equal(mean[i : i + 1], alone[0])
        assert torch.equal((std * torch.ones_like(x))[i : i + 1], alone[1] * torch.ones_like(x[:1]))


def test_log_prob_is_the_mean_of_normal_log_densities():
    x, mean = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    std = torch.rand(4, 1, 1, dtype=torch.float64) + 0.1
    expected = Normal(mean, std.expand_as(mean)).log_prob(x).mean((1, 2))
    torch.testing.assert_close(sde.log_prob(x, mean, std), expected)


def test_kl_is_that_of_two_normals_and_its_gradient_flows_through_the_mean():
    mean, reference = torch.randn(2, 4, 6, dtype=torch.float64)
    mean.requires_grad_(True)
    std = torch.rand(4, 1, dtype=torch.float64) + 0.1
    kl = sde.kl(mean, reference, std)
    wide = std.expand_as(mean)
    torch.testing.assert_close(kl, kl_divergence(Normal(mean, wide), Normal(reference, wide)).mean(1))
    (gradient,) = torch.autograd.grad(kl.sum(), mean)
    torch.testing.assert_close(gradient, (mean - reference).detach() / std**2 / 6)
    assert float(gradient.abs().min()) > 0


def test_half_precision_inputs_are_computed_in_float32():
    x, v = torch.randn(2, 2, 8, dtype=torch.bfloat16)
    mean, std = sde.transition("cps", x, v, 0.7, 0.6, 0.5)
    assert mean.dtype == std.dtype == torch.float32
    assert sde.log_prob(x, x, torch.ones(1)).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cpps", 0.5, 0.4, 0.5), "unknown transition"),
        (("cps", 0.5, 0.4, 1.5), "out of range"),
        (("flow_sde", 0.5, 0.4, -0.1), "out of range"),
        (("flow_sde", 1.0, 0.9, 0.7), "sigma_max"),
    ],
)
def test_unknown_transitions_and_noise_levels_out_of_range_are_refused(arguments, words):
    name, sigma, sigma_next, level = arguments
    with pytest.raises(ValueError, match=words):
        sde.transition(name, torch.zeros(1, 2), torch.zeros(1, 2), sigma, sigma_next, level)


def test_one_row_at_a_sigma_of_1_is_enough_to_need_the_second_sigma():
    sigma, zeros = torch.tensor([1.0, 0.5]), torch.zeros(2, 3)
    for second in (None, torch.tensor([math.nan, 0.9])):
        with pytest.raises(ValueError, match="sigma_max"):
            sde.transition("flow_sde", zeros, zeros, sigma, sigma - 0.1, 0.7, second)


def test_those_without_noise_in_the_last_step_are_listed():
    x, v = torch.randn(2, 1, 4)
    last = {name: sde.transition(name, x, v, 0.2, 0.0, 0.7)[1] for name in sde.TRANSITIONS}
    assert {name: bool(std.any()) for name, std in last.items()} == {
        n: one.noise_at_end for n, one in sde.TRANSITIONS.items()
    }


def test_a_step_is_computed_where_the_state_is():
    """On `meta`, a device without numbers: a tensor made elsewhere can't be mixed with one of it."""
    x = torch.zeros(2, 3, device="meta")
    mean, std = sde.transition("cps", x, x, 0.7, 0.6, 0.5)
    assert (mean.device.type, std.device.type, mean.shape, std.shape) == ("meta", "meta", (2, 3), (1, 1))
