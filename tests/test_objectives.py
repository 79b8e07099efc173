"""Objectives against their formulas, their reductions, and a policy gradient that is known in closed form."""

import math
from dataclasses import replace

import pytest
import torch
from support.method_names import ON_FINAL_LATENTS, STOCHASTIC

from flow_grpo import objectives, sde
from flow_grpo.advantages import group_advantages
from flow_grpo.types import GradientState, NoisedImage, TrainedStep


def transitions(n=24, moved=0.05, std=0.7, delta=-0.1):
    """n rows of a step in float64: drawn with one mean, seen with another."""
    generator = torch.Generator().manual_seed(3)
    old_mean, noise, move = torch.randn(3, n, 4, 5, generator=generator, dtype=torch.float64)
    std = torch.full((n, 1, 1), std, dtype=torch.float64)
    x_next = old_mean + std * noise
    mean = (old_mean + moved * move).requires_grad_(True)
    delta = torch.tensor(delta, dtype=torch.float64)
    step = TrainedStep(sde.log_prob(x_next, mean, std), sde.log_prob(x_next, old_mean, std), mean, old_mean, std, delta)
    advantage = torch.randn(n, generator=generator, dtype=torch.float64)
    return step, advantage, x_next


def gradient(loss, step):
    return torch.autograd.grad(loss.value.sum(), step.mean, retain_graph=True)[0]


def surrogate(ratio, advantage, low, high):
    pairs = zip(ratio.tolist(), advantage.tolist(), strict=True)
    values = [-min(r * a, min(max(r, 1 - low), 1 + high) * a) for r, a in pairs]
    return torch.tensor(values, dtype=torch.float64)


def test_grpo_is_the_clipped_surrogate():
    step, advantage, _ = transitions()
    low, high = 0.002, 0.004
    ratio = (step.log_prob - step.old_log_prob).exp().detach()
    loss = objectives.grpo(step, advantage, low, high)
    torch.testing.assert_close(loss.value, surrogate(ratio, advantage, low, high))
    low_clipped, high_clipped = (ratio < 1 - low) & (advantage < 0), (ratio > 1 + high) & (advantage > 0)
    assert low_clipped.any()
    assert high_clipped.any(), "the example must reach both sides"
    assert loss.metrics["clip_ratio/low_mean"].bool().equal(low_clipped)
    assert loss.metrics["clip_ratio/high_mean"].bool().equal(high_clipped)
    assert (gradient(loss, step)[low_clipped | high_clipped] == 0).all(), "what is clipped must not push further"


def test_before_any_update_grpo_and_dppo_have_the_gradient_of_reinforce():
    step, advantage, _ = transitions(moved=0.0)
    expected = gradient(objectives.reinforce(step, advantage), step)
    assert expected.abs().max() > 0
    for loss in (objectives.grpo(step, advantage, math.inf, math.inf), objectives.dppo(step, advantage, 1.0)):
        torch.testing.assert_close(gradient(loss, step), expected)


def test_reinforce_is_the_advantage_times_the_log_probability():
    step, advantage, x_next = transitions()
    normal = torch.distributions.Normal(step.mean, step.std.expand_as(step.mean))
    expected = -advantage * normal.log_prob(x_next).mean((1, 2))
    torch.testing.assert_close(objectives.reinforce(step, advantage).value, expected)


def test_grpo_guard_is_its_formula():
    step, advantage, x_next = transitions()
    std = float(step.std[0, 0, 0])
    mean, old = step.mean.detach(), step.old_mean
    log = step.log_prob - step.old_log_prob + ((mean - old) ** 2).mean((1, 2)) / (2 * std**2)
    ratio = (log * std).exp().detach()
    loss = objectives.grpo_guard(step, advantage, 0.002, 0.01)
    torch.testing.assert_close(loss.value, surrogate(ratio, advantage, 0.002, 0.01) / 0.1)
    noise = (x_next - old) / std
    torch.testing.assert_close(ratio.log(), (noise * (mean - old)).mean((1, 2)))


def test_the_ratio_of_grpo_guard_is_centred_and_that_of_grpo_is_not():
    """Over the noise of the step, the mean of log rho is 0 for guard, and minus the KL for grpo."""
    generator = torch.Generator().manual_seed(0)
    n, std = 100_000, torch.full((1, 1), 0.5, dtype=torch.float64)
    old_mean = torch.zeros(n, 8, dtype=torch.float64)
    mean = old_mean + torch.linspace(-0.4, 0.4, 8, dtype=torch.float64)
    x_next = old_mean + 0.5 * torch.randn(n, 8, generator=generator, dtype=torch.float64)
    step = TrainedStep(
        sde.log_prob(x_next, mean, std), sde.log_prob(x_next, old_mean, std), mean, old_mean, std, torch.tensor(-1.0)
    )
    positive = torch.ones(n, dtype=torch.float64)
    guard = -objectives.grpo_guard(step, positive, math.inf, math.inf).value
    grpo = -objectives.grpo(step, positive, math.inf, math.inf).value
    error = float(guard.log().std()) / n**0.5
    assert abs(float(guard.log().mean())) < 4 * error
    assert float(grpo.log().mean()) == pytest.approx(-float(sde.kl(mean[:1], old_mean[:1], std)), abs=8 * error)


def test_before_any_update_grpo_guard_weighs_the_gradient_of_grpo_by_std_over_the_length_of_the_step():
    step, advantage, _ = transitions(moved=0.0)
    guard = gradient(objectives.grpo_guard(step, advantage, 1.0, 1.0), step)
    torch.testing.assert_close(guard, gradient(objectives.grpo(step, advantage, 1.0, 1.0), step) * 0.7 / 0.1)


def test_dppo_is_its_formula():
    step, advantage, _ = transitions()
    ratio = (step.log_prob - step.old_log_prob).exp().detach()
    divergence = sde.kl(step.mean, step.old_mean, step.std).detach()
    threshold = float(divergence.median())
    masked = (divergence >= threshold) & (advantage * (ratio - 1) > 0)
    assert 0 < int(masked.sum()) < len(masked)
    loss = objectives.dppo(step, advantage, threshold)
    torch.testing.assert_close(loss.value, torch.where(masked, 0.0, -advantage * ratio))
    assert loss.metrics["dppo/masked"].bool().equal(masked)


def test_dppo_masks_all_that_pushes_further_at_threshold_0_and_nothing_at_infinity():
    step, advantage, _ = transitions()
    ratio = (step.log_prob - step.old_log_prob).exp()
    further = (advantage * (ratio.detach() - 1)) > 0
    everything = gradient(objectives.dppo(step, advantage, 0.0), step)
    assert (everything[further] == 0).all()
    assert (everything[~further].abs().amax((1, 2)) > 0).all()
    free = gradient(objectives.dppo(step, advantage, math.inf), step)
    torch.testing.assert_close(free, gradient(objectives.grpo(step, advantage, math.inf, math.inf), step))


def test_dppo_masks_from_the_threshold_on():
    step, advantage, _ = transitions()
    ratio = (step.log_prob - step.old_log_prob).exp().detach()
    divergence = sde.kl(step.mean, step.old_mean, step.std).detach()
    row = int((advantage * (ratio - 1) > 0).nonzero()[0])
    assert objectives.dppo(step, advantage, float(divergence[row])).metrics["dppo/masked"][row] == 1
    assert objectives.dppo(step, advantage, float(divergence[row]) * 1.001).metrics["dppo/masked"][row] == 0


def test_before_any_update_nothing_is_clipped_or_masked_however_narrow_the_range():
    step, advantage, _ = transitions(moved=0.0)
    expected = gradient(objectives.reinforce(step, advantage), step)
    dppo = objectives.dppo(step, advantage, 0.0)
    torch.testing.assert_close(gradient(dppo, step), expected)
    assert not dppo.metrics["dppo/masked"].any()
    clipped = objectives.grpo(step, advantage, 0.0, 0.0).metrics
    assert not clipped["clip_ratio/low_mean"].any()
    assert not clipped["clip_ratio/high_mean"].any()


def test_a_row_without_advantage_is_not_counted_as_clipped():
    step, _, _ = transitions()
    metrics = objectives.grpo(step, torch.zeros(24, dtype=torch.float64), 1e-9, 1e-9).metrics
    assert (metrics["ratio/max_deviation"] > 1e-9).all()
    assert not metrics["clip_ratio/low_mean"].any()
    assert not metrics["clip_ratio/high_mean"].any()


CLIP = {"clip_ratio/low_mean", "clip_ratio/high_mean"}


@pytest.mark.parametrize(
    ("name", "options", "reported"),
    [
        ("grpo", (0.002, 0.004), CLIP),
        ("reinforce", (), set()),
        ("grpo_guard", (0.002, 0.004), CLIP),
        ("dppo", (1e-3,), {"dppo/divergence", "dppo/masked"}),
    ],
)
def test_objectives_on_steps_report_their_ratio_as_detached_numbers_of_each_row(name, options, reported):
    step, advantage, _ = transitions()
    loss = getattr(objectives, name)(step, advantage, *options)
    assert set(loss.metrics) == {"ratio/mean", "ratio/max_deviation"} | reported
    for value in loss.metrics.values():
        assert (value.shape, value.requires_grad, value.is_floating_point()) == ((24,), False, True)
    if name != "grpo_guard":  # whose ratio is centred
        torch.testing.assert_close(loss.metrics["ratio/mean"], (step.log_prob - step.old_log_prob).exp().detach())
    ratio = loss.metrics["ratio/mean"]
    assert float(ratio.min()) < 1 < float(ratio.max())
    torch.testing.assert_close(loss.metrics["ratio/max_deviation"], torch.maximum(ratio - 1, 1 - ratio))


@pytest.mark.parametrize(
    ("name", "options", "reported"),
    [
        ("awm", (0.2, 0.2), CLIP | {"ratio/mean", "ratio/max_deviation"}),
        ("nft", (0.5, 5.0), {"nft/positive", "nft/negative"}),
        ("sft", (), {"sft/error"}),
        ("dpo", (3.0,), {"dpo/margin", "dpo/accuracy"}),
    ],
)
def test_forward_objectives_report_detached_numbers_of_each_row(name, options, reported):
    image, advantage = forward_process(n=6), [torch.linspace(-1, 1, 6)] if name in ("awm", "nft") else []
    loss = getattr(objectives, name)(image, *advantage, *options)
    assert set(loss.metrics) == reported
    for value in (loss.value.detach(), *loss.metrics.values()):
        assert (value.shape, value.requires_grad, value.is_floating_point()) == ((6,), False, True)


def test_velocity_kl_is_the_mean_square_of_the_difference():
    v, v_ref = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = (v.double() - v_ref.double()).square().mean((1, 2))
    torch.testing.assert_close(objectives.velocity_kl(v, v_ref).double(), expected, rtol=1e-5, atol=0)
    assert objectives.velocity_kl(v, v_ref).dtype == torch.float32
    torch.testing.assert_close(objectives.velocity_kl(v.double(), v_ref), expected, rtol=1e-12, atol=0)


def test_k3_is_exact_in_float32_where_log_probabilities_are_means():
    d = torch.tensor([1e-4, -3e-4, 2e-5])
    kl = objectives.k3(torch.zeros(3), d)
    torch.testing.assert_close(kl, d**2 / 2, rtol=1e-3, atol=0)


def test_k3_is_never_negative_and_its_mean_is_the_kl():
    """For samples of N(0, 1) the mean of exp(d) - d - 1 is the KL to N(m, 1), m^2 / 2 (arXiv 2402.03300)."""
    x = torch.randn(400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    m, log = 0.3, torch.distributions.Normal
    kl = objectives.k3(log(0.0, 1.0).log_prob(x), log(m, 1.0).log_prob(x))
    assert float(kl.min()) >= 0
    assert abs(float(kl.mean()) - m**2 / 2) < 4 * float(kl.std()) / len(x) ** 0.5


def test_the_policy_gradient_of_a_toy_is_the_closed_form():
    """One step x_next ~ N(theta, s^2), reward -(x_next - c)^2: the gradient of its expectation is 2 (c - theta)."""
    theta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    c, s, n = 1.0, 0.5, 400_000
    x_next = theta.detach() + s * torch.randn(n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reward = -((x_next[:, 0] - c) ** 2)
    centred = reward - reward.mean()
    mean = theta.expand(n, 1)
    log_prob = sde.log_prob(x_next, mean, torch.tensor([[s]], dtype=torch.float64))
    step = TrainedStep(log_prob, log_prob.detach(), mean, mean, torch.tensor([[s]]), torch.tensor(-1.0))
    loss = objectives.grpo(step, centred, 0.2, 0.2).value.mean()
    (gradient,) = torch.autograd.grad(loss, theta)
    per_sample = centred * (x_next[:, 0] - theta.detach()) / s**2
    error = float(per_sample.std()) / n**0.5
    assert abs(-float(gradient) - 2 * (c - 0.3)) < 4 * error
    assert error < 0.02


@pytest.mark.parametrize("objective", ["grpo", "reinforce", "grpo_guard", "dppo"])
@pytest.mark.parametrize("name", STOCHASTIC)
def test_the_gradient_of_the_whole_chain_is_the_finite_difference(name, objective):
    """v -> transition -> log_prob -> objective, in float64, for every stochastic transition, at a policy that has moved."""
    generator = torch.Generator().manual_seed(1)
    x, base, noise = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    direction = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    advantage = group_advantages(torch.tensor([1.0, 0.0, 0.3, 0.7]), torch.tensor([0, 0, 1, 1])).double()
    old_mean, std = sde.transition(name, x, base, 0.8, 0.7, 0.6, 0.9)
    x_next = old_mean + std * noise
    old = sde.log_prob(x_next, old_mean, std)

    def loss(shift):
        mean, _ = sde.transition(name, x, base + shift * direction, 0.8, 0.7, 0.6, 0.9)
        step = TrainedStep(sde.log_prob(x_next, mean, std), old, mean, old_mean, std, torch.tensor(-0.1))
        extra = {"grpo": (0.5, 0.5), "grpo_guard": (0.5, 0.5), "dppo": (math.inf,), "reinforce": ()}[objective]
        return getattr(objectives, objective)(step, advantage, *extra).value.sum()

    shift = torch.full((), 0.02, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(shift), shift)
    h = 1e-6
    assert float(gradient) == pytest.approx(float(loss(0.02 + h) - loss(0.02 - h)) / (2 * h), rel=1e-5)


def forward_process(seed=0, n=5):
    """Noised images in float64, each at a sigma of its own."""
    generator = torch.Generator().manual_seed(seed)
    x0, eps, error, old, ref = torch.randn(5, n, 2, 3, generator=generator, dtype=torch.float64)
    sigma = torch.rand(n, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    v = (eps - x0 + 0.3 * error).requires_grad_(True)
    return NoisedImage(x0, eps, sigma, v, eps - x0 + 0.31 * error, eps - x0 + 0.3 * old, eps - x0 + 0.3 * ref)


def errors(image, v):
    return (v.detach().double() - (image.eps - image.x0)).square().mean((1, 2))


def test_awm_is_the_clipped_ratio_of_matching_losses():
    image = forward_process()
    advantage = torch.tensor([1.0, -2, 0.5, -0.3, 3], dtype=torch.float64)
    now, before = errors(image, image.v), errors(image, image.v_rollout)
    for weight in ("uniform", "ghuber"):
        score = {
            "uniform": lambda e: -e,
            "ghuber": lambda e: -(image.sigma / 0.25) * ((e + 1e-10) ** 0.25 - 1e-10**0.25),
        }[weight]
        ratio = (score(now) - score(before)).exp()
        loss = objectives.awm(image, advantage, 0.001, 0.004, weight).value
        torch.testing.assert_close(loss.detach().double(), surrogate(ratio, advantage, 0.001, 0.004), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="unknown weight"):
        objectives.forward_log_prob(image, image.v, "hubber")


def test_the_log_probability_of_awm_is_the_error_itself_or_a_root_of_it_from_0_on():
    error, sigma = torch.tensor([0.0, 1e-10, 2.0], dtype=torch.float64), torch.tensor([0.5, 0.5, 0.8], dtype=torch.float64)
    zeros = torch.zeros(3, 1, dtype=torch.float64)
    image = NoisedImage(zeros, zeros, sigma, v=error.sqrt()[:, None], v_rollout=zeros)
    torch.testing.assert_close(objectives.forward_log_prob(image, image.v, "uniform"), -error)
    root = objectives.forward_log_prob(image, image.v, "ghuber")
    small = -2 * ((2e-10) ** 0.25 - 1e-10**0.25)
    expected = torch.tensor([0.0, small, -3.2 * (2**0.25 - 1e-10**0.25)], dtype=torch.float64)
    torch.testing.assert_close(root, expected, rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize(("off", "distance"), [(0.0, 0.0), (1e-6, 1e-7), (0.1, 0.1)])
def test_the_weight_of_nft_is_the_mean_error_but_at_least_1e_5(off, distance):
    zeros, sigma = torch.zeros(1, 2, 3), torch.tensor([0.5])
    v = torch.full_like(zeros, -off / 0.5)  # then x0_hat is `off` away from x0
    loss = objectives.nft(NoisedImage(zeros, zeros, sigma, v, v, v), torch.zeros(1), 0.5, 5.0)
    assert float(loss.value) == pytest.approx(5.0 / 0.5 * distance, rel=1e-5)
    assert float(loss.metrics["nft/positive"]) == pytest.approx(distance, rel=1e-5)


def test_nft_computes_in_float32_what_the_network_says_in_half_precision():
    image = forward_process()
    half = replace(image, v=image.v.detach().bfloat16(), v_old=image.v_old.bfloat16())
    exact = replace(half, v=half.v.double(), v_old=half.v_old.double())
    loss, expected = (objectives.nft(one, torch.linspace(-5, 5, 5), 0.3, 5.0).value for one in (half, exact))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_nft_is_its_formula():
    image = forward_process()
    advantage, beta, top = torch.tensor([-8.0, -1, 0, 2, 9], dtype=torch.float64), 0.4, 5.0
    v, old, column = image.v.detach(), image.v_old, image.sigma.view(-1, 1, 1)
    x = (1 - column) * image.x0 + column * image.eps
    expected = []
    for i in range(5):
        r = 0.5 + 0.5 * max(-1.0, min(1.0, float(advantage[i]) / top))
        value = 0.0
        for share, velocity in ((r, beta * v + (1 - beta) * old), (1 - r, (1 + beta) * old - beta * v)):
            error = (x - column * velocity - image.x0)[i]
            value += share * float(error.square().mean() / error.abs().mean().clamp_min(1e-5))
        expected.append(top / beta * value)
    loss = objectives.nft(image, advantage, beta, top).value.detach()
    torch.testing.assert_close(loss.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-5)


def test_nft_with_beta_1_trains_the_model_itself_on_good_images():
    image = forward_process()
    loss = objectives.nft(image, torch.full((5,), 9.0), 1.0, 5.0)
    error = image.x - image.column * image.v.detach() - image.x0
    expected = 5 * error.square().mean((1, 2)) / error.abs().mean((1, 2))
    torch.testing.assert_close(loss.value.detach().double(), expected, rtol=1e-4, atol=1e-5)


def test_sft_is_the_matching_loss_and_least_at_the_true_velocity():
    image = forward_process()
    torch.testing.assert_close(objectives.sft(image).value.detach().double(), errors(image, image.v), rtol=1e-5, atol=1e-6)
    true = replace(image, v=image.eps - image.x0)
    assert float(objectives.sft(true).value.abs().max()) < 1e-12


def test_dpo_is_its_formula_and_log_2_at_the_reference():
    image = forward_process(n=6)
    gain = errors(image, image.v) - errors(image, image.v_ref)
    for beta in (30.0, 1.0):
        margin = -beta * (gain[0::2] - gain[1::2])
        expected = (1 + (-margin).exp()).log().repeat_interleave(2)
        loss = objectives.dpo(image, beta)
        torch.testing.assert_close(loss.value.detach().double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(loss.metrics["dpo/margin"].double(), margin.repeat_interleave(2), rtol=1e-4, atol=1e-5)
        assert loss.metrics["dpo/accuracy"].bool().tolist() == (margin > 0).repeat_interleave(2).tolist()
    assert ((margin > 0) & (margin < 1)).any()
    assert (margin < 0).any()
    same = objectives.dpo(replace(image, v=image.v_ref), 30.0)
    torch.testing.assert_close(same.value.double(), torch.full((6,), math.log(2), dtype=torch.float64))
    assert not same.metrics["dpo/accuracy"].any()


@pytest.mark.parametrize("name", ["awm", "nft"])
def test_forward_objectives_pull_to_good_images_and_push_from_bad_ones(name):
    image = forward_process()

    def slope(advantage):
        step = torch.zeros((), dtype=torch.float64, requires_grad=True)
        start = image.v.detach()
        moved = replace(image, v=start + step * ((image.eps - image.x0) - start), v_old=start)  # step 1 draws x0 exactly
        rows = torch.full((5,), advantage)
        loss = objectives.nft(moved, rows, 1.0, 5.0) if name == "nft" else objectives.awm(moved, rows, 0.2, 0.2)
        return float(torch.autograd.grad(loss.value.sum(), step)[0])

    assert slope(2.0) < 0 < slope(-2.0)


# -- the adaptive weight of arXiv 2602.04663, and what is built on it ----------------------------------------------------------


def moved_on(n=6):
    """Noised images whose policy has moved far enough for ratios that are not 1."""
    image = forward_process(n=n)
    away = torch.randn(image.v.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return replace(image, v_rollout=image.v.detach() + 0.4 * away)


def adaptive(image, v, at=None):
    """The adaptive error of v; its divisor, which has no gradient, is that of the velocity `at`, by default of v."""
    target = image.eps - image.x0
    divisor = ((v if at is None else at).detach() - target).abs().mean((1, 2))
    return (v - target).square().mean((1, 2)) / divisor


def adaptive_ratio(image, unit=1):
    """The log-probability and the log-ratio, in float64."""
    log_prob, before = (-unit * image.sigma * adaptive(image, v) for v in (image.v, image.v_rollout))
    return log_prob, log_prob - before


def gradient_of(value, image):
    return torch.autograd.grad(value.sum(), image.v, retain_graph=True)[0]


def check_forward(loss, expected, image):
    torch.testing.assert_close(loss.value, expected, rtol=1e-10, atol=1e-12)
    theirs = gradient_of(expected, image)
    assert theirs.abs().max() > 0
    torch.testing.assert_close(gradient_of(loss.value, image), theirs, rtol=1e-10, atol=1e-12)


ROWS = torch.tensor([1.0, -2, 0.5, -0.3, 3, 0.0], dtype=torch.float64)
BY_LOG_RATIO = {  # of the log-probability, the log-ratio d, and the log-ratio without a gradient
    "pepg": lambda log_prob, d, fixed: -(ROWS - fixed) * fixed.exp() * log_prob,
    "awm": lambda log_prob, d, fixed: -d.exp() * ROWS,
}


def with_adaptive_weight(name, image, advantage=ROWS, **more):
    if name == "awm":
        return objectives.awm(image, advantage, math.inf, math.inf, loss_weight="adaptive", **more)
    return getattr(objectives, name)(image, advantage, **more)


@pytest.mark.parametrize("name", BY_LOG_RATIO)
@pytest.mark.parametrize("unit", [1, 6])
def test_objectives_of_the_adaptive_weight_are_their_formulas(name, unit):
    image = moved_on()
    log_prob, log_ratio = adaptive_ratio(image, unit)
    assert (log_ratio.abs() > 0.05).any()
    loss = with_adaptive_weight(name, image, sum_over_latents=unit == 6)
    check_forward(loss, BY_LOG_RATIO[name](log_prob, log_ratio, log_ratio.detach()), image)
    torch.testing.assert_close(loss.metrics["ratio/mean"].double(), log_ratio.detach().exp(), rtol=1e-4, atol=1e-5)


def test_pepg_is_awm_without_a_clip_and_a_kl_to_the_policy_that_drew_the_images():
    image = moved_on()
    _, log_ratio = adaptive_ratio(image)
    awm, pepg = (gradient_of(with_adaptive_weight(name, image).value, image) for name in ("awm", "pepg"))
    kl = gradient_of(log_ratio.exp() * (log_ratio - 1), image)
    torch.testing.assert_close(pepg, awm + kl, rtol=1e-4, atol=1e-6)
    assert (pepg - awm).abs().max() > 1e-3
    start = replace(image, v_rollout=image.v.detach())
    first = [gradient_of(with_adaptive_weight(name, start).value, start) for name in ("awm", "pepg")]
    torch.testing.assert_close(first[1], first[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("off", "expected"), [(0.0, 0.0), (1e-6, 1e-7), (0.1, 0.1)])
def test_the_divisor_of_the_adaptive_error_is_at_least_1e_5(off, expected):
    zeros = torch.zeros(1, 2, 3)
    image = NoisedImage(zeros, zeros, torch.tensor([0.5]), torch.full_like(zeros, off), zeros)
    assert float(image.adaptive_error(image.v)) == pytest.approx(expected, rel=1e-5)
    assert float(objectives.forward_log_prob(image, image.v, "adaptive")) == pytest.approx(-0.5 * expected, rel=1e-5)


@pytest.mark.parametrize("weight", ["uniform", "ghuber"])
def test_a_sum_over_latents_is_their_number_times_the_mean(weight):
    image = forward_process()
    one, whole = (objectives.forward_log_prob(image, image.v, weight, summed) for summed in (False, True))
    torch.testing.assert_close(whole, 6 * one)


# -- objectives that centre in a group -----------------------------------------------------------------------------------------

GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])


def by_group(value):
    """Each row's mean over its group."""
    return torch.stack([value[g == GROUPS].mean() for g in GROUPS]).detach()


def centred(function, image, *more):
    return replace(image, group_mean=by_group(function(image, *more)))


def crd_loss(image, advantage=ROWS, beta=0.8, top=2.0):
    return objectives.crd(centred(objectives.crd_residual, image, advantage, beta, top), advantage, beta, top)


def dgpo_loss(image, advantage=ROWS, beta=20.0):
    return objectives.dgpo(centred(objectives.dgpo_preference, image, advantage, beta), advantage)


@pytest.mark.parametrize("top", [1.0, 2.0])
def test_crd_is_its_formula(top):
    """Advantages are clipped on both sides at the smaller `top`."""
    image, beta = forward_process(n=6), 0.8
    reward = -(adaptive(image, image.v) - adaptive(image, image.v_old))
    wanted = 0.5 + 0.5 * (ROWS / top).clamp(-1, 1)
    expected = top / beta * (beta * (reward - by_group(reward)) - (wanted - by_group(wanted))) ** 2
    loss = crd_loss(image, top=top)
    check_forward(loss, expected, image)
    torch.testing.assert_close(loss.metrics["crd/reward"].double(), reward.detach(), rtol=1e-4, atol=1e-5)
    residual = beta * (reward - by_group(reward)) - (wanted - by_group(wanted))
    torch.testing.assert_close(loss.metrics["crd/residual"].double(), residual.detach().abs(), rtol=1e-4, atol=1e-5)


def test_at_the_old_policy_crd_weighs_the_errors_by_centred_advantages_and_nft_by_plain_ones_and_sigma():
    """The gradient of crd at any beta, that of nft, and that of pepg: all of the one adaptive error."""
    image = forward_process(n=6)
    start = replace(image, v_old=image.v.detach(), v_rollout=image.v.detach())
    error = adaptive(start, start.v)
    for beta in (0.3, 2.0):
        ours = gradient_of(crd_loss(start, beta=beta, top=5.0).value, start)
        torch.testing.assert_close(ours, gradient_of((ROWS - by_group(ROWS)) * error, start), rtol=1e-4, atol=1e-6)
    nft = gradient_of(objectives.nft(start, ROWS, 0.7, 5.0).value, start)
    torch.testing.assert_close(nft, gradient_of(ROWS * start.sigma * error, start), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(nft, gradient_of(objectives.pepg(start, ROWS).value, start), rtol=1e-4, atol=1e-6)


def test_dgpo_is_its_formula():
    image, beta = forward_process(n=6), 20.0
    now, base = ((v - (image.eps - image.x0)).square().mean((1, 2)) for v in (image.v, image.v_ref))
    weight = 1 / (1 + (-by_group(beta * ROWS * (now - base))).exp())
    assert weight.max() - weight.min() > 0.1
    loss = dgpo_loss(image)
    check_forward(loss, weight * ROWS * now, image)
    torch.testing.assert_close(loss.metrics["dgpo/weight"].double(), weight, rtol=1e-4, atol=1e-5)


def test_dgpo_weighs_a_group_by_half_at_the_base_model_and_less_once_it_is_learned():
    image = forward_process(n=6)
    true = image.eps - image.x0

    def weight(closer):
        """Good images drawn closer to the truth than by the base model, bad ones further from it."""
        sign = ROWS.sign().view(-1, 1, 1)
        return dgpo_loss(replace(image, v=image.v_ref + closer * sign * (true - image.v_ref))).metrics["dgpo/weight"]

    torch.testing.assert_close(weight(0.0).double(), torch.full((6,), 0.5, dtype=torch.float64))
    assert (weight(0.5) < 0.49).all()
    assert (weight(-0.5) > 0.51).all()
    start = replace(image, v=image.v_ref.clone().requires_grad_(True))
    error = (start.v - true).square().mean((1, 2))
    expected = gradient_of(0.5 * ROWS * error, start)
    torch.testing.assert_close(gradient_of(dgpo_loss(start, beta=100.0).value, start), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["awm", "pepg", "crd", "dgpo"])
def test_newer_forward_objectives_pull_to_good_images_and_push_from_bad_ones(name):
    image = forward_process(n=6)
    advantage = torch.tensor([2.0, -2.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    towards = ((image.eps - image.x0) - image.v).detach()
    start = replace(image, v_rollout=image.v.detach(), v_old=image.v.detach(), v_ref=image.v.detach())
    losses = {"crd": crd_loss, "dgpo": dgpo_loss}
    loss = losses[name](start, advantage) if name in losses else with_adaptive_weight(name, start, advantage)
    slopes = (gradient_of(loss.value, start) * towards).sum((1, 2))
    assert (slopes[[0, 2, 4]] < 0).all()
    assert (slopes[[1, 3, 5]] > 0).all()


def test_newer_forward_objectives_report_detached_numbers_of_each_row():
    image, ratio = moved_on(), {"ratio/mean", "ratio/max_deviation"}
    losses = {"pepg": (with_adaptive_weight("pepg", image), ratio)}
    losses["crd"] = crd_loss(image), {"crd/reward", "crd/residual"}
    losses["dgpo"] = dgpo_loss(image), {"dgpo/weight", "dgpo/error"}
    for loss, reported in losses.values():
        assert set(loss.metrics) == reported
        for value in (loss.value.detach(), *loss.metrics.values()):
            assert (value.shape, value.requires_grad, value.is_floating_point()) == ((6,), False, True)


# -- gradients by finite differences -------------------------------------------------------------------------------------------


def _nft_by_hand(at, v, beta=0.7, top=5.0):
    good, value = 0.5 + 0.5 * (ROWS / top).clamp(-1, 1), 0.0
    for sign, share in ((1, good), (-1, 1 - good)):

        def error(velocity, sign=sign):
            return at.x - at.column * ((1 - sign * beta) * at.v_old + sign * beta * velocity) - at.x0

        value = value + share * error(v).square().mean((1, 2)) / error(at.v.detach()).abs().mean((1, 2))
    return top / beta * value


def _crd_by_hand(at, v, beta=0.8, top=2.0):
    def reward(velocity):
        return adaptive(at, at.v_old) - adaptive(at, velocity, at.v)

    wanted = 0.5 + 0.5 * (ROWS / top).clamp(-1, 1)
    return top / beta * (beta * (reward(v) - by_group(reward(at.v))) - (wanted - by_group(wanted))) ** 2


def _dgpo_by_hand(at, v, beta=20.0):
    def error(velocity):
        return (velocity - (at.eps - at.x0)).square().mean((1, 2))

    return by_group(beta * ROWS * (error(at.v) - error(at.v_ref))).sigmoid() * ROWS * error(v)


def _adaptive_by_hand(name):
    def value(at, v):
        log_prob, start = (-at.sigma * adaptive(at, one, at.v) for one in (v, at.v.detach()))
        before = -at.sigma * adaptive(at, at.v_rollout)
        return BY_LOG_RATIO[name](log_prob, log_prob - before, start - before)

    return value


def _dpo_by_hand(at, v, beta=3.0):
    gain = (v - (at.eps - at.x0)).square().mean((1, 2)) - (at.v_ref - (at.eps - at.x0)).square().mean((1, 2))
    return (1 + (beta * (gain[0::2] - gain[1::2])).exp()).log().repeat_interleave(2)


def _of(name, *options):
    return lambda image: getattr(objectives, name)(image, *options).value


# The package's loss, and the same by hand at any velocity v, with what has no gradient held at the image's own.
BY_DIFFERENCES = {
    "awm": (_of("awm", ROWS, math.inf, math.inf), lambda at, v: -(errors(at, at.v_rollout) - _matching(at, v)).exp() * ROWS),
    "awm_adaptive": (lambda image: with_adaptive_weight("awm", image).value, _adaptive_by_hand("awm")),
    "pepg": (_of("pepg", ROWS), _adaptive_by_hand("pepg")),
    "nft": (_of("nft", ROWS, 0.7, 5.0), _nft_by_hand),
    "crd": (lambda image: crd_loss(image).value, _crd_by_hand),
    "dgpo": (lambda image: dgpo_loss(image).value, _dgpo_by_hand),
    "sft": (_of("sft"), lambda at, v: _matching(at, v)),
    "dpo": (_of("dpo", 3.0), _dpo_by_hand),
    "velocity_kl": (
        lambda image: objectives.velocity_kl(image.v, image.v_ref),
        lambda at, v: (v - at.v_ref).square().mean((1, 2)),
    ),
}


def _matching(at, v):
    return (v - (at.eps - at.x0)).square().mean((1, 2))


def test_every_forward_objective_has_its_gradient_checked_by_differences():
    assert set(ON_FINAL_LATENTS) - {"distill"} <= set(BY_DIFFERENCES), "distill's own loss is 0"


@pytest.mark.parametrize("name", BY_DIFFERENCES)
def test_the_gradient_of_forward_objectives_is_the_finite_difference(name):
    ours, by_hand = BY_DIFFERENCES[name]
    image = moved_on()
    direction = torch.randn(image.v.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    value, h = ours(image), 1e-5
    torch.testing.assert_close(value.detach(), by_hand(image, image.v.detach()).detach(), rtol=1e-10, atol=1e-12)
    slope = float((gradient_of(value, image) * direction).sum())
    up, down = (float(by_hand(image, image.v.detach() + one * direction).sum()) for one in (h, -h))
    assert abs(slope) > 1e-3
    assert slope == pytest.approx((up - down) / (2 * h), rel=1e-7)


def test_the_losses_at_the_states_of_a_reward_gradient_are_their_formulas():
    gradient, v, target, away, v_old = torch.randn(
        5, 6, 4, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    state = GradientState(v, gradient, -0.3, target, away, v_old)
    by_row = [0.3 * (gradient[i] * v[i]).sum() / 12 for i in range(6)]
    torch.testing.assert_close(objectives.reward_gradient(state).value, torch.stack(by_row))
    weight = torch.rand(6, dtype=torch.float64)
    by_row = [weight[i] * 0.09 * ((v[i] - target[i]) ** 2).sum() / 12 for i in range(6)]
    torch.testing.assert_close(objectives.mend(state, weight).value, torch.stack(by_row))
    advantage = torch.tensor([-9.0, -2.0, 0.0, 1.0, 4.0, 7.0], dtype=torch.float64)
    share = torch.tensor([0.0, 0.3, 0.5, 0.6, 0.9, 1.0], dtype=torch.float64)

    def weighted(distance):
        return (distance**2).sum() / distance.abs().sum()

    up, down = (
        torch.stack([weighted(0.3 * (each[i] - end[i])) for i in range(6)])
        for each, end in ((v, target), (2 * v_old - v, away))
    )
    loss = objectives.opsd(state, advantage)
    torch.testing.assert_close(loss.value, 5 * (share * up + (1 - share) * down))
    torch.testing.assert_close(loss.metrics["opsd/positive"], up)
    torch.testing.assert_close(loss.metrics["opsd/negative"], down)
