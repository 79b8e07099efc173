"""Which steps each window trains; how much each step's noise varies the reward, by hand, and the window that it chooses."""

import contextlib
import math

import pytest
import torch
from support import small_policy as small

from flow_grpo import sampling
from flow_grpo.config.stepwise_objectives import Grpo, WindowConfig
from flow_grpo.data.prompts import PromptSampler
from flow_grpo.distributed.processes import Processes
from flow_grpo.doctor.step_variance import StepVariance, most_variable_window, step_reward_variance
from flow_grpo.errors import Interrupted
from flow_grpo.rewards import WeightedSum
from flow_grpo.training.rollouts import trained_steps
from flow_grpo.types import StochasticSteps

SIZES = {"prompts_per_step": 3, "images_per_prompt": 4, "microbatch": 6}


def trained(schedule, step, seed=0, steps=8, size=2, first_step=1, last_step=5):
    window = WindowConfig(schedule=schedule, size=size, first_step=first_step, last_step=last_step)
    return trained_steps(window, steps, step, seed)


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("all", 0, [1, 2, 3, 4, 5]),
        ("fixed", 9, [1, 2]),
    ],
)
def test_a_window_has_the_steps_of_its_schedule(schedule, step, expected):
    assert trained(schedule, step) == expected


def test_a_random_window_depends_on_seed_and_step_and_covers_every_place():
    windows = [tuple(trained("random", step)) for step in range(100)]
    assert windows == [tuple(trained("random", step)) for step in range(100)]
    assert set(windows) == {(1, 2), (2, 3), (3, 4), (4, 5)}
    assert windows != [tuple(trained("random", step, seed=1)) for step in range(100)]


def test_random_windows_are_those_of_earlier_versions():
    """A run that is resumed, or repeated from its config, trains the same steps again."""
    starts = [trained("random", step)[0] for step in range(12)]
    assert starts == [2, 3, 3, 4, 1, 2, 3, 1, 4, 2, 3, 1]


def test_a_window_ends_with_the_schedule_and_may_fill_it():
    assert trained("all", 0, steps=4, last_step=9) == [1, 2, 3]
    for schedule in ("fixed", "random"):
        assert trained(schedule, 7, steps=4, size=4, first_step=0, last_step=9) == [0, 1, 2, 3]


def test_by_default_the_last_step_is_not_trained():
    assert trained("all", 0, steps=4, last_step=None) == [1, 2]
    assert Grpo(window={"first_step": 1}).num_losses(sampling_steps=4) == 2


@pytest.mark.parametrize("schedule", ["fixed", "random"])
def test_a_window_that_does_not_fit_is_refused(schedule):
    with pytest.raises(ValueError, match="a window of 4 steps does not fit into steps 3 to 5"):
        trained(schedule, 0, size=4, first_step=3)


def bright(images, prompts):
    return images.mean((1, 2, 3))


def by_hand(policy, args, transition: str, noise_level: float, step: int) -> torch.Tensor:
    """The rewards (prompts, images), where the images of a prompt share all but the noise of one step."""
    batch = PromptSampler(small.PROMPTS, args.seed).sample(0, 3, 4)
    schedule, shape = policy.schedule(args.sampling.steps)
    noise = sampling.batch_noise(shape, batch, args.seed, "step", 0, step)
    final = sampling.rollout(
        policy.velocity_fn(schedule, policy.encode(batch.prompts), torch.arange(12)),
        schedule,
        sampling.batch_noise(shape, batch, args.seed, "start", 0, shared=True),
        stochastic=StochasticSteps([step], transition, noise_level),
        noise=lambda i: noise,
    ).final
    return bright(policy.decode(final), batch.prompts).view(3, 4)


@pytest.mark.parametrize(
    ("sampled", "window", "steps"),
    [
        ({"steps": 4, "transition": "cps", "noise_level": 0.8}, {"schedule": "all"}, [0, 1, 2]),
        ({"steps": 5, "transition": "cps", "noise_level": 0.8}, {"schedule": "fixed", "size": 2}, [0, 1, 2, 3]),
        ({"steps": 5}, {"schedule": "fixed", "size": 2, "first_step": 1, "last_step": 2}, [1, 2]),
    ],
)  # fmt: skip
@torch.no_grad()
def test_the_variance_of_a_step_is_that_of_its_noise_alone(sampled, window, steps):
    policy, args = small.policy(), small.settings(sampling={**sampled, "window": window}, seed=3, **SIZES)
    measured = step_reward_variance(
        policy, args, small.PROMPTS, WeightedSum({"bright": bright}, {"bright": 1.0}), transition="flow_sde", noise_level=0.5
    )
    assert [one.step for one in measured] == steps
    sigmas = policy.schedule(args.sampling.steps)[0].sigmas
    for one in measured:
        assert (one.transition, one.noise_level, one.sigma) == ("flow_sde", 0.5, float(sigmas[one.step]))
        reward = by_hand(policy, args, "flow_sde", 0.5, one.step)
        variance = (reward - reward.mean(1, keepdim=True)).square().sum(1) / 3
        assert one.variance == pytest.approx(float(variance.mean()), rel=1e-3)


@torch.no_grad()
def test_prompts_with_an_image_that_could_not_be_scored_count_in_no_variance():
    policy, args = small.policy(), small.settings(**SIZES)
    spoiled = 1

    def sometimes(images, prompts):
        value = bright(images, prompts)
        value[:spoiled] = math.nan
        return value

    rewards = WeightedSum({"sometimes": sometimes}, {"sometimes": 1.0}, ["sometimes"])
    settings = {"transition": "cps", "noise_level": 0.8}
    for one in step_reward_variance(policy, args, small.PROMPTS, rewards, **settings):
        variance = by_hand(policy, args, "cps", 0.8, one.step)[1:].var(1).mean()
        assert one.variance == pytest.approx(float(variance), rel=1e-3)
    spoiled = 12
    with pytest.raises(ValueError, match="gave no finite number for any prompt"):
        step_reward_variance(policy, args, small.PROMPTS, rewards, **settings)


@pytest.mark.parametrize("processes", [Processes(), small.Two()])
def test_one_process_leaves_a_measurement_before_its_next_forward_pass_and_several_do_not(processes):
    policy, args = small.policy(), small.settings(**SIZES)
    velocity, calls = policy.velocity, []
    policy.velocity = lambda *a: calls.append(1) or velocity(*a)
    rewards = WeightedSum({"bright": bright}, {"bright": 1.0})
    settings = {"transition": "cps", "noise_level": 0.8, "processes": processes}
    processes.stop_requested = True
    with pytest.raises(Interrupted) if processes.world_size == 1 else contextlib.suppress(Interrupted):
        step_reward_variance(policy, args, small.PROMPTS, rewards, **settings)
    assert bool(calls) == (processes.world_size > 1)


@pytest.mark.parametrize(("size", "first"), [(1, 2), (2, 4), (3, 2), (4, 2), (9, 2)])
def test_the_window_has_the_largest_sum_of_variances(size, first):
    measured = [StepVariance("cps", 0.8, 2 + i, 0.5, variance) for i, variance in enumerate([3.0, 1.0, 2.0, 2.5])]
    assert most_variable_window(measured, size) == first
