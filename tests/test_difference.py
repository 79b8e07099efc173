"""The transition `difference`: noise on the line from an image to another one of its group."""

import functools
import math

import pytest
import torch
from support import small_policy as small
from torch.distributions import Normal, kl_divergence

from flow_grpo import sampling, sde
from flow_grpo.data.prompts import PromptSet
from flow_grpo.training.step_loss import ClipRange
from flow_grpo.types import PromptBatch, Schedule, StepDistribution

SIGMAS = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.1, 0.0])
SCHEDULE = Schedule(1000 * SIGMAS[:-1], SIGMAS)
SHAPE, LEVEL = (2, 3), 1.5
TRAINED = [1, 2]


def velocity(x, i, rows, shift=0.0):
    return torch.tanh(x) * (i + 1) + rows.view(-1, 1, 1) // 3 + shift


def batch(prompts=2, images=3) -> PromptBatch:
    return PromptSet([f"p{i}" for i in range(prompts)], [{}] * prompts).repeat(images)


def roll(microbatch=6, shift=0.0, rows=None, level=LEVEL):
    rows = batch() if rows is None else rows
    return sampling.rollout(
        functools.partial(velocity, shift=shift),
        SCHEDULE,
        sampling.batch_noise(SHAPE, rows, 0, "start", 0),
        microbatch=microbatch,
        stochastic=sampling.StochasticSteps(
            TRAINED,
            StepDistribution("difference", level),
            noise=lambda i: sampling.batch_noise((1, 1), rows, 0, "step", 0, i),
            partners=lambda i: sampling.partners(rows, 0, "partner", 0, i),
        ),
    )


def test_a_partner_is_another_image_of_the_group_and_each_is_as_probable():
    rows, found = batch(prompts=2, images=4), torch.zeros(8, 8)
    for step in range(600):
        found[torch.arange(8), sampling.partners(rows, 0, "partner", step)] += 1
    others = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)) - torch.eye(8)
    assert torch.equal(found > 0, others > 0)
    assert (found[others > 0] - 200).abs().max() < 5 * math.sqrt(600 * 2 / 9)


def test_a_partner_does_not_depend_on_what_other_groups_a_process_has():
    rows = batch(prompts=3, images=4)
    alone = rows.take(torch.arange(4, 8))
    whole = sampling.partners(rows, 0, "partner", 7)
    assert torch.equal(sampling.partners(alone, 0, "partner", 7), whole[4:8] - 4)
    assert not torch.equal(sampling.partners(rows, 1, "partner", 7), whole)


def test_a_step_moves_along_the_difference_of_two_predicted_images():
    """With a noise_level times a normal number of 1, to the state of which the other image is predicted."""
    trajectory, rows = roll(), batch()
    for k, i in enumerate(TRAINED):
        sigma, sigma_next = SIGMAS[i], SIGMAS[i + 1]
        x, v = trajectory.x[:, k], velocity(trajectory.x[:, k], i, torch.arange(6))
        x0_hat, eps_hat = x - sigma * v, x + (1 - sigma) * v
        other = x0_hat[sampling.partners(rows, 0, "partner", 0, i)]
        z = sampling.batch_noise((1, 1), rows, 0, "step", 0, i)
        mixed = x0_hat + LEVEL * z * (other - x0_hat)
        torch.testing.assert_close(
            trajectory.mean[:, k], (1 - sigma_next) * x0_hat + sigma_next * eps_hat, atol=1e-6, rtol=0
        )
        torch.testing.assert_close(
            trajectory.x_next[:, k], (1 - sigma_next) * mixed + sigma_next * eps_hat, atol=1e-5, rtol=0
        )


def test_its_log_probability_is_that_of_one_normal_number():
    trajectory, rows = roll(), batch()
    for k, i in enumerate(TRAINED):
        z = sampling.batch_noise((1, 1), rows, 0, "step", 0, i).flatten()
        std = trajectory.std[:, k]
        distance = (trajectory.x_next[:, k] - trajectory.mean[:, k]).flatten(1).norm(dim=1)
        torch.testing.assert_close(std * z.abs(), distance, atol=1e-6, rtol=1e-5)
        expected = Normal(0.0, std).log_prob(std * z)
        torch.testing.assert_close(trajectory.log_prob_BK[:, k], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_the_micro_batch_changes_nothing_also_where_it_splits_a_group(microbatch):
    one, other = roll(microbatch), roll()
    for name in ("x", "x_next", "mean", "std", "log_prob_BK", "final"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def ratios(trajectory, shift, k=0):
    """Of all rows, with the velocity moved by `shift`."""
    rows = torch.arange(len(trajectory.final))
    moved = functools.partial(velocity, shift=shift)
    return (sampling.replay(moved, trajectory, k, rows).log_prob - trajectory.log_prob_BK[:, k]).exp()


def test_replaying_gives_a_ratio_of_exactly_1():
    trajectory = roll()
    for k in range(len(TRAINED)):
        assert torch.equal(ratios(trajectory, 0.0, k), torch.ones(6))


def test_the_ratio_of_a_policy_that_has_moved_has_mean_1():
    """It is the density of one normal variable over that of another. Over all dimensions it would count a move that no noise can make."""
    trajectory = roll(rows=batch(prompts=4000), microbatch=12_000)
    shift = torch.tensor([[2.0, 0.0, -1.0], [0.5, -3.0, 1.0]])
    ratio = ratios(trajectory, shift)
    assert ratio.std() > 0.1
    assert abs(float(ratio.mean()) - 1) < 4 * float(ratio.std()) / len(ratio) ** 0.5


def test_its_gradient_is_that_of_the_expected_reward_over_the_noise():
    """With a linear reward <c, x_next>, moving the mean by m changes the expectation by <c, u> <u, m>, u the direction of the line."""
    rows = batch(prompts=4000)
    trajectory = roll(rows=rows, microbatch=12_000)
    c, m = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    u = torch.nn.functional.normalize((trajectory.x_next[:, 0] - trajectory.mean[:, 0]).flatten(1), dim=1)
    by_hand = (u @ c) * (u @ m)
    shift = torch.zeros_like(trajectory.mean[:, 0]).requires_grad_()  # of the velocity; the mean moves by delta times that
    moved = functools.partial(velocity, shift=shift)
    log_prob = sampling.replay(moved, trajectory, 0, torch.arange(len(trajectory.final))).log_prob
    reward = trajectory.x_next[:, 0].flatten(1) @ c - trajectory.mean[:, 0].flatten(1) @ c
    (gradient,) = torch.autograd.grad((reward * log_prob).sum(), shift)
    estimates = gradient.flatten(1) @ m / (SIGMAS[TRAINED[0] + 1] - SIGMAS[TRAINED[0]])
    error = float((estimates - by_hand).std()) / len(estimates) ** 0.5
    assert abs(float((estimates - by_hand).mean())) < 4 * error
    assert error < 0.1 * float(by_hand.abs().mean())


def test_images_that_are_equal_learn_nothing_from_their_step():
    x = torch.ones(2, 3, 4)
    coordinate = sde.line_coordinate(x + 1, x, x)
    assert torch.equal(coordinate, torch.zeros(2, 1))
    mean = (x + 1).requires_grad_()
    (gradient,) = torch.autograd.grad(sde.line_coordinate(mean, x, x).sum(), mean)
    assert torch.equal(gradient, torch.zeros_like(x))


def test_the_kl_of_its_transitions_is_that_of_two_normal_variables():
    args = small.settings(sampling={"transition": "difference"}, objective={"kl": "gaussian", "kl_weight": 1.0})
    policy, advantage = small.policy(), torch.tensor([[1.0, -0.5, -0.5], [0.5, 0.5, -1.0]])
    small.move(policy, 2.0)
    experience = small.experience(policy, args, advantage, [0, 1])
    conditioning = policy.encode(experience.batch.prompts)
    loss = small.step_loss(policy, args, experience, conditioning, ClipRange(None))
    rows, trajectory = torch.arange(6), experience.trajectory
    for k, one in enumerate(loss.losses(rows, torch.ones(6, dtype=torch.bool))):
        with torch.no_grad(), policy.base_model():
            v = policy.velocity_fn(trajectory.schedule, conditioning)(trajectory.x[:, k], k, rows)
        sigma, sigma_next = trajectory.schedule.sigmas[k : k + 2]
        base = trajectory.x[:, k] + (sigma_next - sigma) * v
        along = sde.line_coordinate(base, trajectory.mean[:, k], trajectory.x_next[:, k])[:, 0]
        std = trajectory.std[:, k]
        expected = kl_divergence(Normal(torch.zeros(6), std), Normal(along, std))
        assert expected.max() > 1e-4
        torch.testing.assert_close(one.metrics["kl"], expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("sampling_settings", "sentence"),
    [
        (
            {"shared_initial_noise": True},
            "with sampling.shared_initial_noise they share their state: remove shared_initial_noise",
        ),
        ({"branches": [3]}, "with sampling.branches they share their state: remove branches"),
        (
            {"window": {"schedule": "auto", "size": 2}},
            "window.schedule=auto measures steps of images that share their state",
        ),
    ],
)
def test_images_that_share_a_state_are_refused(sampling_settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        small.settings(sampling={"transition": "difference", **sampling_settings})


def test_kl_flow_grpo_is_refused():
    with pytest.raises(ValueError, match="difference has none"):
        small.settings(sampling={"transition": "difference"}, objective={"kl": "flow_grpo", "kl_weight": 1.0})


def test_without_noise_it_is_the_ode():
    trajectory = roll(level=0.0)
    assert torch.equal(trajectory.x_next, trajectory.mean)
