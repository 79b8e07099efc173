"""Rollouts with a toy velocity: streams of noise, shared prefixes, micro-batches."""

import json
from typing import get_args

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from support.method_names import STOCHASTIC
from support.rollouts import of_rows, rollout

from flow_grpo import sampling, sde
from flow_grpo.config.sections import SamplingConfig
from flow_grpo.data.prompts import PromptSampler, PromptSet
from flow_grpo.sampling import SOLVERS
from flow_grpo.types import PromptBatch, Schedule, StochasticSteps, broadcast_rows

SIGMAS = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.1, 0.0])
SCHEDULE = Schedule(1000 * SIGMAS[:-1], SIGMAS)
SHAPE = (2, 3)


def velocity(x, i, rows):
    return torch.tanh(x) * (i + 1) + rows.view(-1, 1, 1) // 3


def batch(prompts=2, images=3) -> PromptBatch:
    return PromptSet([f"p{i}" for i in range(prompts)], [{}] * prompts).repeat(images)


def roll(trained, microbatch=6, transition="cps", seed=0):
    rows = batch()
    return rollout(
        velocity,
        SCHEDULE,
        sampling.batch_noise(SHAPE, rows, seed, "start", 0),
        microbatch,
        stochastic=StochasticSteps(trained, transition, noise_level=0.7) if trained else None,
        noise=lambda i: sampling.batch_noise(SHAPE, rows, seed, "step", 0, i),
    )


def test_each_stream_of_noise_belongs_to_its_name_alone():
    one = sampling.noise((4,), 0, "start", 3, 1)
    assert torch.equal(one, sampling.noise((4,), 0, "start", 3, 1))
    others = [
        sampling.noise((4,), *name)
        for name in [(1, "start", 3, 1), (0, "step", 3, 1), (0, "start", 3, 2), (0, "start", 13, 1)]
    ]
    assert not any(torch.equal(one, other) for other in others)


def test_the_streams_are_those_of_earlier_versions():
    """A run that is resumed, or repeated from its config, meets the same noise again."""
    torch.testing.assert_close(
        sampling.noise((4,), 0, "start", 3, 1), torch.tensor([-1.3631324, -0.0940343, -0.4452363, -0.9594598])
    )
    seeds = [sampling.generator(i).initial_seed() for i in range(64)]
    assert 2**62 < max(seeds) < 2**63, "what a generator can take, and all of it"


def test_each_image_has_a_stream_of_its_own_for_each_prompt_training_step_and_step():
    rows = PromptBatch(["a", "b", "b"], [{}] * 3, torch.tensor([4, 9, 9]), torch.tensor([0, 0, 1]))
    names = [("start", 0), ("start", 1), ("step", 0, 0), ("step", 0, 1), ("step", 1, 0)]
    drawn = torch.cat([sampling.batch_noise((3,), rows, 5, *name) for name in names])
    assert len(drawn.unique(dim=0)) == len(drawn)
    assert torch.equal(drawn[2], sampling.noise((3,), 5, "start", 0, 9, 1)), "named by the prompt, then by the image"
    shared = sampling.batch_noise((3,), rows, 5, "start", 0, shared=True)
    assert torch.equal(shared, torch.stack([sampling.noise((3,), 5, "start", 0, p) for p in (4, 9, 9)]))


def test_noise_is_standard_normal_across_streams():
    drawn = torch.stack([sampling.noise((8,), 0, "start", i) for i in range(2000)])
    assert abs(float(drawn.mean())) < 4 / 16000**0.5
    assert abs(float(drawn.var()) - 1) < 4 * (2 / 16000) ** 0.5
    neighbours = (drawn[1:] * drawn[:-1]).mean()
    assert abs(float(neighbours)) < 4 / 16000**0.5


def test_shared_noise_is_one_per_prompt():
    drawn = sampling.batch_noise(SHAPE, batch(), 0, "start", shared=True)
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[2], drawn[3])


@pytest.mark.parametrize("microbatch", [1, 2, 4, 6])
def test_the_micro_batch_changes_nothing(microbatch):
    whole, parts = roll([1, 2]), roll([1, 2], microbatch)
    assert torch.equal(whole.final, parts.final)
    assert torch.equal(whole.log_prob, parts.log_prob)
    assert torch.equal(whole.x_next, parts.x_next)


def test_stored_steps_are_what_was_scored_and_stepped_from():
    trajectory = roll([1, 2])
    assert torch.equal(trajectory.x_next[:, 0], trajectory.x[:, 1])
    for k, i in enumerate(trajectory.steps):
        v = velocity(trajectory.x[:, k], i, torch.arange(6))
        mean, std = sde.transition("cps", trajectory.x[:, k], v, SIGMAS[i], SIGMAS[i + 1], 0.7, SIGMAS[1])
        assert torch.equal(sde.log_prob(trajectory.x_next[:, k], mean, std), trajectory.log_prob[:, k])


@pytest.mark.parametrize("transition", STOCHASTIC)
def test_a_trained_step_is_its_mean_plus_std_times_the_noise_of_that_step(transition):
    """And the steps that are not trained are Euler's."""
    trajectory, x = roll([0, 2], transition=transition), sampling.batch_noise(SHAPE, batch(), 0, "start", 0)
    for i in range(5):
        v = velocity(x, i, torch.arange(6))
        if i not in trajectory.steps:
            x = x + (SIGMAS[i + 1] - SIGMAS[i]) * v
            continue
        k = trajectory.steps.index(i)
        mean, std = sde.transition(transition, x, v, SIGMAS[i], SIGMAS[i + 1], 0.7, SIGMAS[1])
        assert torch.equal(trajectory.x[:, k], x)
        assert torch.equal(trajectory.mean[:, k], mean)
        x = mean + std * sampling.batch_noise(SHAPE, batch(), 0, "step", 0, i)
        torch.testing.assert_close(trajectory.x_next[:, k], x, rtol=0, atol=1e-6)
    torch.testing.assert_close(trajectory.final, x, rtol=0, atol=1e-5)


def test_a_rollout_is_float32_without_gradients():
    weight = torch.ones(1, requires_grad=True)
    start = sampling.batch_noise(SHAPE, batch(), 0, "start", 0).double()
    stochastic = StochasticSteps([1], "cps", noise_level=0.7)
    trajectory = sampling.rollout(
        lambda x, i: weight * x, SCHEDULE, start, stochastic=stochastic, noise=lambda i: start.float()
    )
    for part in (trajectory.x, trajectory.x_next, trajectory.mean, trajectory.log_prob, trajectory.final):
        assert part.dtype == torch.float32
        assert not part.requires_grad


def test_without_trained_steps_a_trajectory_has_room_for_none():
    trajectory = roll([])
    assert [getattr(trajectory, name).shape for name in ("x", "x_next", "mean", "log_prob")] == [(6, 0)] * 4
    assert trajectory.steps == []


@pytest.mark.parametrize("transition", STOCHASTIC)
def test_replaying_gives_a_ratio_of_exactly_1(transition):
    trajectory = roll([0, 1, 3], transition=transition)
    for k, i in enumerate(trajectory.steps):
        rows = torch.tensor([5, 0, 3])
        now = sampling.replay(of_rows(velocity, rows), trajectory, k, rows)
        assert torch.equal(now.v, velocity(trajectory.x[rows, k], i, rows))
        assert torch.equal(now.log_prob, sde.log_prob(trajectory.x_next[rows, k], now.mean, now.std))
        assert torch.equal((now.log_prob - trajectory.log_prob[rows, k]).exp(), torch.ones(3))


def test_without_a_window_a_rollout_is_the_ode():
    start = sampling.batch_noise(SHAPE, batch(), 0, "start", 0)
    x = start
    for i in range(5):
        x = x + (SIGMAS[i + 1] - SIGMAS[i]) * velocity(x, i, torch.arange(6))
    torch.testing.assert_close(roll([]).final, x)
    assert roll([]).log_prob.shape == (6, 0)


def test_a_schedule_gives_pairs_between_its_steps():
    timestep, sigma = SCHEDULE.at(torch.tensor([1.0, 0.9, 0.2, 0.1, 0.0]))
    torch.testing.assert_close(sigma, torch.tensor([1.0, 0.95, 0.1, 0.05, 0.0]))
    torch.testing.assert_close(timestep, 1000 * sigma)


def ten_prompts() -> PromptSet:
    return PromptSet([f"p{i}" for i in range(10)], [{"n": i} for i in range(10)])


def test_prompts_are_sampled_in_whole_epochs_without_repeats():
    prompt_sampler = PromptSampler(ten_prompts(), seed=0)
    steps = [prompt_sampler.sample(step, 3, 2) for step in range(6)]
    for step in steps:
        assert len(set(step.prompts)) == 3
        assert step.group.tolist() == [0, 0, 1, 1, 2, 2]
        assert step.image.tolist() == [0, 1, 0, 1, 0, 1]
        assert step.columns()["n"] == [int(p[1:]) for p in step.prompts]
    epoch = [p for step in steps[:3] for p in step.prompts[::2]]
    assert len(set(epoch)) == 9
    assert PromptSampler(ten_prompts(), seed=1).sample(0, 3, 2).prompts != steps[0].prompts
    with pytest.raises(ValueError, match="only 10 prompts"):
        prompt_sampler.sample(0, 11, 2)


def test_a_prompt_sampler_continues_from_its_state():
    whole, former, later = (PromptSampler(ten_prompts(), 0) for _ in range(3))
    expected = [whole.sample(step, 3, 2).prompts for step in range(12)]
    assert [former.sample(step, 3, 2).prompts for step in range(5)] == expected[:5]
    later.load_state_dict(json.loads(json.dumps(former.state_dict())))
    assert [later.sample(step, 3, 2).prompts for step in range(5, 12)] == expected[5:]


def shifted(steps, end=0.2, shift=3.0) -> Schedule:
    """Sigmas from 1 to about `end` whose steps differ in length, as most pipelines have them; the last step goes nowhere."""
    sigmas = torch.linspace(1, end, steps + 1, dtype=torch.float64)
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    return Schedule(1000 * sigmas, torch.cat([sigmas, sigmas[-1:]]))


def error_on_a_known_flow(solver: str, schedule: Schedule) -> float:
    """The mean error of a solver's final states where x0 ~ N(0.8, 0.5^2) and eps ~ N(0, 1): velocity and solution are known."""
    mean, spread = 0.8, 0.5

    def scale(s):
        return ((1 - s) ** 2 * spread**2 + s**2) ** 0.5

    def velocity(x, i):
        s = schedule.sigmas[i]
        return (s - (1 - s) * spread**2) / scale(s) ** 2 * (x - (1 - s) * mean) - mean

    start, end = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), schedule.sigmas[-1]
    exact = (1 - end) * mean + scale(end) * start
    final = sampling.rollout(velocity, schedule, start, solver=SOLVERS[solver]).final
    return float((final - exact).abs().mean())


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("dpm_2m", 2)])
def test_the_solvers_have_their_order_of_convergence(solver, order):
    """Twice the steps divide the error by 2^order, on schedules that end above sigma 0."""
    errors = [error_on_a_known_flow(solver, shifted(steps)) for steps in (16, 32)]
    assert errors[0] / errors[1] == pytest.approx(2**order, rel=0.1)


def test_to_sigma_0_the_error_of_dpm_2m_is_of_order_2_times_a_logarithm():
    """The error of the k-th step before sigma 0 is proportional to h^2 / k: twice the steps add a constant to error / h^2."""
    scaled = []
    for steps in (160, 320, 640):
        levels = torch.linspace(1, 0, steps + 1)
        sigmas = 3 * levels / (1 + 2 * levels)
        scaled.append(steps**2 * error_on_a_known_flow("dpm_2m", Schedule(sigmas[:-1] * 1000, sigmas)))
    assert scaled[2] - scaled[1] == pytest.approx(scaled[1] - scaled[0], rel=0.2)


def solved(solver: str, schedule: Schedule, velocity, microbatch: int = 6) -> torch.Tensor:
    """The final states (6, 2, 3) of a solver."""
    start = torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(0))
    return rollout(velocity, schedule, start, microbatch, solver=SOLVERS[solver]).final


def test_dpm_2m_is_diffusers_scheduler_to_the_last_bit():
    theirs = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    theirs.set_timesteps(7)
    x = torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(0))
    schedule = Schedule(theirs.sigmas[:-1] * 1000, theirs.sigmas)
    ours = solved("dpm_2m", schedule, velocity)
    for i, timestep in enumerate(theirs.timesteps):
        x = theirs.step(velocity(x, i, torch.arange(6)), timestep, x).prev_sample
    assert torch.equal(ours, x)


@pytest.mark.parametrize("solver", ["euler", "dpm_2m"])
def test_a_solver_begins_with_eulers_step_and_ends_at_the_last_sigma(solver):
    asked = []

    def noted(x, i, rows):
        asked.append((i, x))
        return velocity(x, i, rows)

    final = solved(solver, SCHEDULE, noted)
    (_, start), (second, x) = asked[:2]
    assert second == 1
    euler = start + (SIGMAS[1] - SIGMAS[0]) * velocity(start, 0, torch.arange(6))
    torch.testing.assert_close(x, euler)
    i, last = asked[-1]
    torch.testing.assert_close(final, last - SIGMAS[i] * velocity(last, i, torch.arange(6)))
    assert torch.equal(solved(solver, SCHEDULE, velocity, microbatch=4), final), "each micro-batch is solved from the start"


def test_the_last_step_of_dpm_2m_is_eulers_where_it_leads_to_a_window_too():
    asked = []

    def noted(x, i, rows):
        asked.append(x)
        return velocity(x, i, rows)

    final = solved("dpm_2m", Schedule(SCHEDULE.timesteps[:4], SIGMAS[:5]), noted)  # to sigma 0.1
    third, eulers = (
        x + (SIGMAS[i + 1] - SIGMAS[i]) * velocity(x, i, torch.arange(6)) for i, x in enumerate(asked) if i >= 2
    )
    assert not torch.allclose(asked[3], third, atol=1e-3)
    torch.testing.assert_close(final, eulers)


@pytest.mark.parametrize("solver", ["euler", "dpm_2m"])
@pytest.mark.parametrize("trained", [[2, 3], [0], [5]])
def test_around_a_window_a_solver_takes_each_part_of_the_ode_from_its_own_start(solver, trained):
    """What is before the trained steps and what is after them are rollouts of their own, on a part of the schedule."""
    sigmas = shifted(7, end=0.0).sigmas[:-1]
    schedule = Schedule(1000 * sigmas[:-1], sigmas)

    def part(steps: range, x):
        return rollout(velocity, schedule, x, 6, steps=steps, solver=SOLVERS[solver]).final

    start = torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(0))
    whole = rollout(
        velocity,
        schedule,
        start,
        microbatch=4,
        stochastic=StochasticSteps(trained, "cps", noise_level=0.7),
        noise=lambda i: sampling.batch_noise(SHAPE, batch(), 0, "step", 0, i),
        solver=SOLVERS[solver],
    )
    assert torch.equal(whole.x[:, 0], part(range(trained[0]), start))
    assert torch.equal(whole.final, part(range(trained[-1] + 1, 7), whole.x_next[:, -1]))


def test_the_solvers_of_the_config_are_those_that_are_there():
    assert tuple(SOLVERS) == get_args(SamplingConfig.model_fields["solver"].annotation)


def test_a_derived_seed_has_48_bits_of_which_all_vary():
    seeds = [sampling.derived_seed(seed, "evaluation", place) for seed in range(8) for place in range(8)]
    assert len(set(seeds)) == 64
    assert [bit for bit in range(64) if len({seed >> bit & 1 for seed in seeds}) == 2] == list(range(48))


def test_a_number_of_each_row_is_broadcast_over_the_row():
    x = torch.ones(4, 2, 2)
    by_row = broadcast_rows(torch.arange(4.0), x) * x
    assert torch.equal(by_row.flatten(1), torch.arange(4.0)[:, None].expand(4, 4))
