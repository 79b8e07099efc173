"""Rollouts: trajectories of the sampler, with the Gaussian steps that are to be trained inside a window.

Every random number comes from `noise(shape, seed, name, ...)`, seeded by a hash of (run seed, training step, prompt, image, ...). So
neither the micro-batch nor the number of processes changes an image, and a resumed run needs no replay. torch's CPU generator uses 32
bits of a seed: of n noises about n^2 / 2^33 equal another one, some 20 of 400,000.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flow_grpo import sde
from flow_grpo.types import PromptBatch, SampledStep, Schedule, StepDistribution, StepOutput, Trajectory, take_rows

# x (n, ...), schedule index, rows (n,) of the batch -> velocity (n, ...)
Velocity = Callable[[Tensor, int, Tensor], Tensor]
# x (n, ...), its velocity (n, ...) -> the state at which the next velocity is evaluated, finally the result
Advance = Callable[[Tensor, Tensor], Tensor]
# an ODE solver in place of Euler: adjacent steps of the schedule -> the indices at which velocities are evaluated, and a fresh start
Solver = Callable[[range], tuple[list[int], Advance]]
ODE = StepDistribution("ode", noise_level=0.0)


def generator(seed: int, *name: str | int) -> torch.Generator:
    """A CPU random generator that is a function of (seed, *name) alone."""
    return torch.Generator().manual_seed(_hashed(seed, *name) >> 1)


def derived_seed(seed: int, *name: str | int) -> int:
    """A seed that is a function of (seed, *name) alone: 48 bits, which JSON and spreadsheets keep exactly."""
    return _hashed(seed, *name) >> 16


def _hashed(seed: int, *name: str | int) -> int:
    """64 bits of (seed, *name)."""
    return int.from_bytes(hashlib.sha256(repr((seed, *name)).encode()).digest()[:8], "little")


def noise(shape: Sequence[int], seed: int, *name: str | int) -> Float[Tensor, "..."]:
    """Standard normal float32 noise of that shape that is a function of (seed, *name) alone."""
    return torch.randn(tuple(shape), generator=generator(seed, *name))


def batch_noise(
    shape: Sequence[int], batch: PromptBatch, seed: int, *name: str | int, shared: bool = False
) -> Float[Tensor, "B ..."]:
    """Noise (B, *shape), a stream per image, or per prompt if `shared`: then all images of a group get the same."""
    if shared:
        groups, inverse = batch.group.unique(return_inverse=True)
        return torch.stack([noise(shape, seed, *name, p) for p in groups.tolist()])[inverse]
    pairs = zip(batch.group.tolist(), batch.image.tolist(), strict=True)
    return torch.stack([noise(shape, seed, *name, p, g) for p, g in pairs])


def partners(batch: PromptBatch, seed: int, *name: str | int) -> Int[Tensor, " B"]:
    """For each image the row of another one of its group, drawn at random by (seed, *name, group, image)."""
    rows = []
    for row, (group, image) in enumerate(zip(batch.group.tolist(), batch.image.tolist(), strict=True)):
        others = (batch.group == group).nonzero()[:, 0]
        others = others[others != row]
        rows.append(others[torch.randint(len(others), (), generator=generator(seed, *name, group, image))])
    return torch.stack(rows)


@dataclass(frozen=True)
class StochasticSteps:
    """The steps of a rollout that add noise and are recorded; the others follow the ODE.

    Attributes:
        steps: their indices in the schedule.
        distribution: how they are sampled and scored.
        noise: returns the standard normal noise (B, ...) of a step.
        partners: returns the `partners` of the images at a step, where the noise is on the line between two images; the noise is then
            (B, 1, ...), a number for each.
        state_ids: (B, K), if images share their start and steps: the same number for rows that have the same state before a step.
            What they share is computed once.
    """

    steps: Sequence[int]
    distribution: StepDistribution
    noise: Callable[[int], Tensor]
    partners: Callable[[int], Int[Tensor, " B"]] | None = None
    state_ids: Int[Tensor, "B K"] | None = None


NO_STEPS = StochasticSteps((), ODE, noise=lambda i: torch.empty(0))  # so that a rollout follows the ODE all the way


@torch.no_grad()
def rollout(
    velocity: Velocity,
    schedule: Schedule,
    start: Float[Tensor, "B ..."],
    *,
    microbatch: int,
    stochastic: StochasticSteps = NO_STEPS,
    solver: Solver | None = None,
    keep_graphs: bool = False,
    record_device: torch.device | None = None,
) -> Trajectory:
    """Sample B images from `start` (B, ...), along the ODE but for the stochastic steps.

    States, means and log-probabilities stay on the device of `start`. There, no step waits for another device.

    Args:
        microbatch: rows per forward pass; the update must use the same, so that its ratio is exactly 1.
        solver: ODE solver in place of Euler, which starts afresh after the stochastic steps (MixGRPO-Flash, arXiv 2507.21802).
        keep_graphs: compute the stochastic steps with gradients and keep their graphs in the trajectory (LeanGRPO, arXiv 2609.03528).
            No gradient flows from one step to another, as in a replay.
        record_device: where the records of the stochastic steps are kept; by default where `start` is.
    """
    x, first = start.float(), 0
    steps = list(stochastic.steps)
    sampler = _Sampler(
        velocity,
        schedule,
        microbatch=microbatch,
        stochastic=stochastic,
        # all of it before the first step, since such a copy waits for what a GPU is computing
        noise={i: stochastic.noise(i).to(start.device, non_blocking=True) for i in steps},
        shared=_states_by_step(stochastic.state_ids, steps),
        solver=solver,
        keep_graphs=keep_graphs,
        record_device=record_device or start.device,
    )
    if sampler.shared:  # what comes before their first stochastic step is computed once for the rows that share it
        first = min(sampler.shared)
        leaders, inverse = _first_rows(sampler.shared[first])
        x = take_rows(sampler.sample(take_rows(x, leaders), range(first), leaders)[0], inverse)
    final, records, graphs = sampler.sample(x, range(first, len(schedule)), torch.arange(len(x)))
    trajectory = Trajectory.from_steps(schedule, steps, records, final, graphs)
    return dataclasses.replace(trajectory, distribution=stochastic.distribution, state_ids=stochastic.state_ids)


def replay(
    velocity: Velocity, trajectory: Trajectory, k: int, rows: Int[Tensor, " n"], device: torch.device | None = None
) -> StepOutput:
    """Repeat the k-th stochastic step with the velocity as it is now, on `device`, by default where the records are."""
    distribution = trajectory.distribution
    assert distribution is not None, "no step was recorded"
    x, x_next = (take_rows(values[:, k], rows, device) for values in (trajectory.x, trajectory.x_next))
    i, state_ids = trajectory.steps[k], None if trajectory.state_ids is None else trajectory.state_ids[:, k]
    v = _velocity(velocity, x, i, rows, state_ids)
    mean, std = _transition(distribution, trajectory.schedule, i, x, v)
    line_start = None
    if trajectory.std is not None:
        std = take_rows(trajectory.std[:, k], rows, device).reshape(number_shape(x))
        line_start = take_rows(trajectory.mean[:, k], rows, device)
    return _step_output(distribution, v, x_next, mean, std, line_start=line_start)


def _step_output(
    distribution: StepDistribution,
    v: Float[Tensor, "n *state"],
    x_next: Float[Tensor, "n *state"],
    mean: Float[Tensor, "n *state"],
    std: sde.Std,
    line_start: Float[Tensor, "n *state"] | None = None,
) -> StepOutput:
    """A step with its log-probability: of x_next, or with noise between images of its coordinate on the line of the noise.

    Args:
        line_start: of noise between images, the mean of the transition that drew x_next, where the line to x_next starts.
    """
    if line_start is None:
        return StepOutput(v, mean, std, sde.LOG_PROBS[distribution.log_prob](x_next, mean, std))
    end, mean = (sde.line_coordinate(values, line_start, x_next) for values in (x_next, mean))
    std = std.flatten(1)
    return StepOutput(v, mean, std, sde.LOG_PROBS[distribution.log_prob](end, mean, std))


def _velocity(
    velocity: Velocity, x: Float[Tensor, "n *state"], i: int, rows: Int[Tensor, " n"], state_ids: Int[Tensor, " B"] | None
) -> Float[Tensor, "n *state"]:
    """The velocity of each row, computed once for those with the same number in `state_ids`."""
    if state_ids is None:
        return velocity(x, i, rows)
    leaders, inverse = _first_rows(state_ids[rows])
    return take_rows(velocity(take_rows(x, leaders), i, rows[leaders]), inverse)


def _first_rows(state_ids: Int[Tensor, " n"]) -> tuple[Int[Tensor, " m"], Int[Tensor, " n"]]:
    """The index of the first row of each state, in the order of the rows, and for each row which of those it is."""
    _, inverse = state_ids.unique(return_inverse=True)
    first = torch.full((int(inverse.max()) + 1,), len(inverse)).scatter_reduce(
        0, inverse, torch.arange(len(inverse)), "amin"
    )
    order = first.argsort()
    return first[order], order.argsort()[inverse]


def _states_by_step(state_ids: Int[Tensor, "B K"] | None, steps: list[int]) -> dict[int, Int[Tensor, " B"]]:
    """The states (B,) before each step up to the last stochastic one; a step between two of these has those of the next."""
    if state_ids is None or not steps:
        return {}
    columns = dict(zip(steps, state_ids.unbind(1), strict=True))
    return {i: columns[min(k for k in steps if k >= i)] for i in range(min(steps), max(steps) + 1)}


@dataclass(frozen=True)
class _Sampler:
    """Takes states through steps of the schedule: the stochastic ones are recorded, the others are the ODE's."""

    velocity: Velocity
    schedule: Schedule
    microbatch: int
    stochastic: StochasticSteps
    noise: dict[int, Tensor]  # (B, ...) of each stochastic step
    shared: dict[int, Tensor]  # (B,) which rows have the same state before a step
    solver: Solver | None
    keep_graphs: bool
    record_device: torch.device

    def sample(
        self, x: Float[Tensor, "n ..."], steps: range, rows: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, "n ..."], list[SampledStep], dict[int, list[StepOutput]]]:
        """Take x, the states of `rows`, through `steps`: the last state, the records, and the graphs by a micro-batch's first row."""
        records: list[SampledStep] = []
        graphs: dict[int, list[StepOutput]] = {}
        for is_stochastic, adjacent in groupby(steps, self.noise.__contains__):
            if not is_stochastic:
                run = list(adjacent)
                parts = zip(x.split(self.microbatch), rows.split(self.microbatch), strict=True)
                x = torch.cat([self._solve(part, run, part_rows) for part, part_rows in parts])
                continue
            for i in adjacent:
                record, kept = self._stochastic_step(x, i, rows)
                x = record.x_next
                records.append(record.to(self.record_device))
                for first, graph in kept.items():
                    graphs.setdefault(first, []).append(graph)
        return x, records, graphs

    def _stochastic_step(
        self, x: Float[Tensor, "n *state"], i: int, rows: Int[Tensor, " n"]
    ) -> tuple[SampledStep, dict[int, StepOutput]]:
        """One stochastic step, and its graphs by the first row of a micro-batch. float32, and the tensor that is scored is stored."""
        distribution = self.stochastic.distribution
        parts = list(zip(x.split(self.microbatch), rows.split(self.microbatch), strict=True))
        records, graphs = [], {}
        with torch.set_grad_enabled(self.keep_graphs):
            velocities = [_velocity(self.velocity, x_part, i, part, self.shared.get(i)) for x_part, part in parts]
        noise, length = self._noise(x, velocities, i)
        for (x_part, part), v in zip(parts, velocities, strict=True):
            with torch.set_grad_enabled(self.keep_graphs):
                mean, std = _transition(distribution, self.schedule, i, x_part, v)
                drawn_mean = mean.detach()
                x_next = drawn_mean + std * take_rows(noise, part).to(mean)
                std = std if length is None else std * take_rows(length, part)
                output = _step_output(distribution, v, x_next, mean, std, line_start=None if length is None else drawn_mean)
            if self.keep_graphs:
                graphs[int(part[0])] = output
            kept_std = None if length is None else std.flatten()
            records.append(SampledStep(x_part, x_next, drawn_mean, output.log_prob.detach(), kept_std))
        return SampledStep.join(records), graphs

    def _noise(self, x: Float[Tensor, "B *state"], velocities: list[Tensor], i: int) -> tuple[Tensor, Tensor | None]:
        """Noise of a step in units of the std; and the length (B, 1, ...) of each image's line, None for noise in all dimensions."""
        if self.stochastic.partners is None:
            return self.noise[i], None
        sigma = self.schedule.sigmas[i].reshape(number_shape(x)).to(x, non_blocking=x.device.type != "cpu")
        x0_hat = sde.x0_hat_of(x, torch.cat(velocities).detach(), sigma)
        line = take_rows(x0_hat, self.stochastic.partners(i)) - x0_hat
        return self.noise[i] * line, line.flatten(1).norm(dim=1).clamp_min(1e-6).reshape(number_shape(x))

    def _solve(self, x: Float[Tensor, "n *state"], steps: list[int], rows: Int[Tensor, " n"]) -> Float[Tensor, "n *state"]:
        """Take x, the states of `rows`, through adjacent steps of the ODE."""
        if self.solver is None:
            for i in steps:
                x, _ = _transition(ODE, self.schedule, i, x, _velocity(self.velocity, x, i, rows, self.shared.get(i)))
            return x
        calls, advance = self.solver(range(steps[0], steps[-1] + 1))
        for i in calls:
            x = advance(x, _velocity(self.velocity, x, i, rows, self.shared.get(i)))
        return x


def number_shape(x: Float[Tensor, "n *state"]) -> tuple[int, ...]:
    """The shape of a number for each row, broadcastable to the states."""
    return -1, *[1] * (x.ndim - 1)


def _transition(
    distribution: StepDistribution, schedule: Schedule, i: int, x: Float[Tensor, "n *state"], v: Float[Tensor, "n *state"]
) -> tuple[Float[Tensor, "n *state"], sde.Std]:
    """Mean and std of step i of the schedule."""
    sigma, sigma_next = schedule.sigmas[i], schedule.sigmas[i + 1]
    name, level = distribution.transition, distribution.noise_level
    return sde.transition(name, x, v, sigma, sigma_next, noise_level=level, sigma_max=schedule.sigma_max)
