"""Rollouts: trajectories of the sampler, with the Gaussian steps that are to be trained inside a window.

Every random number comes from `noise(shape, seed, name, ...)`: a stream of its own for (run seed, training step, prompt,
image, ...). So neither the micro-batch nor the number of processes changes a picture, and a resumed run needs no replay.
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
from flow_grpo.types import PromptBatch, SampledStep, Schedule, StepGraph, Trajectory, take_rows

# x (n, ...), schedule index, rows (n,) of the batch -> velocity (n, ...)
Velocity = Callable[[Tensor, int, Tensor], Tensor]
# x (n, ...), its velocity (n, ...) -> where to ask for the next velocity, at last the result
Advance = Callable[[Tensor, Tensor], Tensor]
# an ODE solver in place of Euler: adjacent steps of the schedule -> where in it to ask for velocities, and a fresh start
Solver = Callable[[range], tuple[list[int], Advance]]


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
        groups, place = batch.group.unique(return_inverse=True)
        return torch.stack([noise(shape, seed, *name, p) for p in groups.tolist()])[place]
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


@torch.no_grad()
def rollout(
    velocity: Velocity,
    schedule: Schedule,
    start: Float[Tensor, "B ..."],
    *,
    microbatch: int,
    trained: Sequence[int] = (),
    transition: str = "ode",
    noise_level: float = 0.0,
    step_noise: Callable[[int], Tensor] | None = None,
    step_partners: Callable[[int], Int[Tensor, " B"]] | None = None,
    log_prob: str = "gaussian",
    states: Int[Tensor, "B K"] | None = None,
    solver: Solver | None = None,
    keep_graphs: bool = False,
    record_device: torch.device | None = None,
) -> Trajectory:
    """Sample B images from `start` (B, ...): `transition` at the trained steps, the ODE at the others.

    States, means and log-probabilities stay on the device of `start`. There, no step waits for another device.

    Args:
        microbatch: rows per forward pass; the update must use the same, so that its ratio is exactly 1.
        trained: steps of the schedule that are stochastic and recorded.
        step_noise: returns the standard normal noise (B, ...) of a trained step.
        step_partners: returns the `partners` of the images at a trained step, where the noise is on the line between two images; the
            noise is then (B, 1, ...), a number for each.
        log_prob: name of a function of `sde.LOG_PROBS`.
        states: (B, K), if images share their start and steps: the same number for rows that have the same state before a trained step.
            What they share is computed once.
        solver: ODE solver in place of Euler, which starts afresh after the trained steps (MixGRPO-Flash, arXiv 2507.21802).
        keep_graphs: compute the trained steps with gradients and keep their graphs in the trajectory (LeanGRPO, arXiv 2609.03528).
            No gradient flows from one step to another, as in a replay.
        record_device: where the records of the trained steps are kept; by default where `start` is.
    """
    assert step_noise is not None or not trained, "a trained step needs noise"
    noise_of = {i: step_noise(i).to(start.device, non_blocking=True) for i in trained} if step_noise else {}
    shared = {} if states is None else _states_by_step(states, trained)
    sample = _Steps(
        velocity,
        schedule,
        transition,
        noise_level,
        microbatch=microbatch,
        noise=noise_of,
        partners={i: step_partners(i) for i in trained} if step_partners else {},
        shared=shared,
        log_prob=sde.LOG_PROBS[log_prob],
        solver=solver,
        keep_graphs=keep_graphs,
        record_device=record_device or start.device,
    )
    x, first = start.float(), 0
    if shared:
        first = min(trained)
        x = _before_branching(sample, x, first, shared[first])
    final, records, graphs = sample(x, range(first, len(schedule)), torch.arange(len(x)))
    return dataclasses.replace(Trajectory.from_steps(schedule, list(trained), records, final, graphs), states=states)


def _before_branching(
    sample: "_Steps", x: Float[Tensor, "B ..."], first: int, states: Int[Tensor, " B"]
) -> Float[Tensor, "B ..."]:
    """The states before step `first`, computed once for rows with the same number in `states`."""
    leaders, place = _first_rows(states)
    return take_rows(sample(take_rows(x, leaders), range(first), leaders)[0], place)


def replay(
    velocity: Velocity,
    trajectory: Trajectory,
    k: int,
    rows: Int[Tensor, " n"],
    transition: str,
    noise_level: float,
    device: torch.device | None = None,
) -> tuple[Float[Tensor, "n *state"], Float[Tensor, "n *state"], sde.Std]:
    """Repeat the k-th trained step with the velocity as it is now, on `device`, by default where the records are.

    Returns the velocity, the mean and the std.
    """
    i = trajectory.steps[k]
    x = take_rows(trajectory.x[:, k], rows, device)
    v = _velocity(velocity, x, i, rows, None if trajectory.states is None else trajectory.states[:, k])
    mean, std = _transition(transition, trajectory.schedule, i, x, v, noise_level=noise_level)
    if trajectory.std is not None:
        std = take_rows(trajectory.std[:, k], rows, x.device).reshape(number_shape(x))
    return v, mean, std


def log_prob_arguments(
    x_next: Float[Tensor, "n *state"],
    mean: Float[Tensor, "n *state"],
    std: sde.Std,
    line_start: Float[Tensor, "n *state"] | None,
) -> tuple[Float[Tensor, "n *noise"], Float[Tensor, "n *noise"], sde.Std]:
    """The arguments of a step's log-probability: x_next, mean and std, or with noise between images their coordinates (n, 1).

    Args:
        line_start: of noise between images, the mean of the transition that drew x_next, where the line to x_next starts.
    """
    if line_start is None:
        return x_next, mean, std
    return sde.line_coordinate(x_next, line_start, x_next), sde.line_coordinate(mean, line_start, x_next), std.flatten(1)


def _velocity(
    velocity: Velocity, x: Float[Tensor, "n *state"], i: int, rows: Int[Tensor, " n"], states: Int[Tensor, " B"] | None
) -> Float[Tensor, "n *state"]:
    """The velocity of each row, computed once for those with the same number in `states`."""
    if states is None:
        return velocity(x, i, rows)
    leaders, place = _first_rows(states[rows])
    return take_rows(velocity(take_rows(x, leaders), i, rows[leaders]), place)


def _first_rows(states: Int[Tensor, " n"]) -> tuple[Int[Tensor, " m"], Int[Tensor, " n"]]:
    """The place of the first row of each state, in the order of the rows, and for each row which of those it is."""
    _, place = states.unique(return_inverse=True)
    first = torch.full((int(place.max()) + 1,), len(states)).scatter_reduce(0, place, torch.arange(len(states)), "amin")
    order = first.argsort()
    return first[order], order.argsort()[place]


def _states_by_step(states: Int[Tensor, "B K"], trained: Sequence[int]) -> dict[int, Int[Tensor, " B"]]:
    """The states (B,) before each step up to the last trained one; a step between two trained ones has those of the next."""
    columns = dict(zip(trained, states.unbind(1), strict=True))
    return {i: columns[min(k for k in trained if k >= i)] for i in range(min(trained), max(trained) + 1)} if columns else {}


@dataclass(frozen=True)
class _Steps:
    """The steps of a rollout: stochastic and recorded where there is noise for them, else the ODE's."""

    velocity: Velocity
    schedule: Schedule
    transition: str
    noise_level: float
    microbatch: int
    noise: dict[int, Tensor]  # (B, ...) of each trained step
    partners: dict[int, Tensor]  # (B,) of each trained step, the row of another image
    shared: dict[int, Tensor]  # (B,) which rows have the same state before a step
    log_prob: Callable[..., Tensor]
    solver: Solver | None
    keep_graphs: bool
    record_device: torch.device

    def __call__(
        self, x: Float[Tensor, "n ..."], steps: range, rows: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, "n ..."], list[SampledStep], dict[int, list[StepGraph]]]:
        """Take x, the states of `rows`, through `steps`: the last state, the records, and the graphs by a micro-batch's first row."""
        records: list[SampledStep] = []
        graphs: dict[int, list[StepGraph]] = {}
        for stochastic, adjacent in groupby(steps, self.noise.__contains__):
            if not stochastic:
                run = list(adjacent)
                parts = zip(x.split(self.microbatch), rows.split(self.microbatch), strict=True)
                x = torch.cat([self._solve(part, run, part_rows) for part, part_rows in parts])
                continue
            for i in adjacent:
                record, kept = self._trained_step(x, i, rows)
                x = record.x_next
                records.append(record.to(self.record_device))
                for first, graph in kept.items():
                    graphs.setdefault(first, []).append(graph)
        return x, records, graphs

    def _trained_step(
        self, x: Float[Tensor, "n *state"], i: int, rows: Int[Tensor, " n"]
    ) -> tuple[SampledStep, dict[int, StepGraph]]:
        """One stochastic step, and its graphs by the first row of a micro-batch. float32, and the tensor that is scored is stored."""
        parts = list(zip(x.split(self.microbatch), rows.split(self.microbatch), strict=True))
        velocities, records, graphs = [], [], {}
        for x_part, part in parts:
            with torch.set_grad_enabled(self.keep_graphs):
                v = _velocity(self.velocity, x_part, i, part, self.shared.get(i))
            velocities.append(v if self.keep_graphs else v.detach())  # a compiled policy has computed it with a graph
        noise, length = self._draw(x, velocities, i)
        for (x_part, part), v in zip(parts, velocities, strict=True):
            with torch.set_grad_enabled(self.keep_graphs):
                mean, std = _transition(self.transition, self.schedule, i, x_part, v, noise_level=self.noise_level)
                drawn_mean = mean.detach()
                x_next = drawn_mean + std * take_rows(noise, part).to(mean)
                std = std if length is None else std * take_rows(length, part)
                line_start = None if length is None else drawn_mean
                end, of_mean, of_std = log_prob_arguments(x_next, mean, std, line_start)
                log_prob = self.log_prob(end, of_mean, of_std)
            if self.keep_graphs:
                graphs[int(part[0])] = StepGraph(v, of_mean, of_std, log_prob)
            kept_std = None if length is None else std.flatten()
            records.append(SampledStep(x_part, x_next, drawn_mean, log_prob.detach(), kept_std))
        return SampledStep.join(records), graphs

    def _draw(self, x: Float[Tensor, "B *state"], velocities: list[Tensor], i: int) -> tuple[Tensor, Tensor | None]:
        """What a step adds to its mean, over the transition's std; the lengths (B, 1, ...) of the lines that this lies on, if any."""
        if not self.partners:
            return self.noise[i], None
        sigma = self.schedule.sigmas[i].reshape(number_shape(x)).to(x, non_blocking=x.device.type != "cpu")
        x0_hat = sde.x0_hat_of(x, torch.cat(velocities).detach(), sigma)
        line = take_rows(x0_hat, self.partners[i]) - x0_hat
        return self.noise[i] * line, line.flatten(1).norm(dim=1).clamp_min(1e-6).reshape(number_shape(x))

    def _solve(self, x: Float[Tensor, "n *state"], steps: list[int], rows: Int[Tensor, " n"]) -> Float[Tensor, "n *state"]:
        """Take x, the states of `rows`, through adjacent steps of the ODE."""
        if self.solver is None:
            for i in steps:
                x, _ = _transition("ode", self.schedule, i, x, _velocity(self.velocity, x, i, rows, self.shared.get(i)))
            return x
        calls, advance = self.solver(range(steps[0], steps[-1] + 1))
        for i in calls:
            x = advance(x, _velocity(self.velocity, x, i, rows, self.shared.get(i)))
        return x


def number_shape(x: Float[Tensor, "n *state"]) -> tuple[int, ...]:
    """The shape of a number for each row, broadcastable to the states."""
    return -1, *[1] * (x.ndim - 1)


def _transition(
    name: str,
    schedule: Schedule,
    i: int,
    x: Float[Tensor, "n *state"],
    v: Float[Tensor, "n *state"],
    noise_level: float = 0.0,
) -> tuple[Float[Tensor, "n *state"], sde.Std]:
    """Mean and std of step i of the schedule."""
    sigma, sigma_next = schedule.sigmas[i], schedule.sigmas[i + 1]
    return sde.transition(name, x, v, sigma, sigma_next, noise_level=noise_level, sigma_max=schedule.sigma_max)
