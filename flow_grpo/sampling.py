"""Rollouts: trajectories of the sampler, with the Gaussian steps that are to be trained inside a window.

Every random number comes from `noise(shape, seed, name, ...)`: a stream of its own for (run seed, training step, prompt,
image, ...). So neither the micro-batch nor the number of processes changes a picture, and a resumed run needs no replay.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flow_grpo import sde
from flow_grpo.types import PromptBatch, Schedule, Trajectory

# x (n, ...), schedule index, rows (n,) of the batch -> velocity (n, ...)
Velocity = Callable[[Tensor, int, Tensor], Tensor]


@dataclass(frozen=True)
class Solver:
    """An ODE solver in place of Euler: at which steps of the schedule it asks for the velocity, and a fresh start of it."""

    calls: list[int]
    start: Callable[[], Callable[[Tensor, Tensor], Tensor]]  # gives (x (n, ...), v (n, ...)) -> where to ask next


def generator(seed: int, *name: str | int) -> torch.Generator:
    """A CPU random generator that belongs to (seed, *name) alone."""
    return torch.Generator().manual_seed(_hashed(seed, *name) >> 1)


def derived_seed(seed: int, *name: str | int) -> int:
    """A seed that belongs to (seed, *name) alone: 48 bits, which JSON and spreadsheets keep exactly."""
    return _hashed(seed, *name) >> 16


def _hashed(seed: int, *name: str | int) -> int:
    """64 bits of (seed, *name)."""
    return int.from_bytes(hashlib.sha256(repr((seed, *name)).encode()).digest()[:8], "little")


def noise(shape: Sequence[int], seed: int, *name: str | int) -> Tensor:
    """Standard normal float32 noise of that shape that belongs to (seed, *name) alone."""
    return torch.randn(tuple(shape), generator=generator(seed, *name))


def batch_noise(shape: Sequence[int], batch: PromptBatch, seed: int, *name: str | int, shared: bool = False) -> Tensor:
    """Noise (B, *shape), a stream per image, or per prompt if `shared`: then all images of a group get the same."""
    if shared:
        groups, place = batch.group.unique(return_inverse=True)
        return torch.stack([noise(shape, seed, *name, p) for p in groups.tolist()])[place]
    pairs = zip(batch.group.tolist(), batch.image.tolist(), strict=True)
    return torch.stack([noise(shape, seed, *name, p, g) for p, g in pairs])


def window(kind: str, steps: int, size: int, first: int, last: int, every: int, seed: int, training_step: int) -> list[int]:
    """The steps of a schedule that are stochastic and trained; the others are the ODE's.

    Args:
        kind: `all` (of first..last), `fixed` (`size` steps from `first`), `random` (`size` steps in a row, drawn from
            first..last for each training step: Flow-GRPO-Fast) or `sliding` (`size` steps in a row that move on by one
            every `every` training steps and start again at `first`: MixGRPO, arXiv 2507.21802).
        steps: length of the schedule. first, last: the steps to choose from, both inclusive.
        seed, training_step: what a random or sliding window depends on.
    """
    last = min(last, steps - 1)
    starts = last - first - size + 2  # how many places a window of that size has
    if kind == "all":
        return list(range(first, last + 1))
    if starts < 1:
        raise ValueError(f"a window of {size} steps does not fit into steps {first} to {last}.")
    if kind == "fixed":
        start = first
    elif kind == "random":
        start = first + int(torch.randint(starts, (1,), generator=generator(seed, "window", training_step)))
    elif kind == "sliding":
        start = first + training_step // every % starts
    else:
        raise ValueError(f"unknown window {kind!r}; choose all, fixed, random or sliding.")
    return list(range(start, start + size))


@torch.no_grad()
def rollout(
    velocity: Velocity,
    schedule: Schedule,
    start: Tensor,
    trained: list[int],
    transition: str,
    noise_level: float,
    step_noise: Callable[[int], Tensor],
    microbatch: int,
    group: Tensor | None = None,
    log_prob: str = "gaussian",
    solver: Solver | None = None,
) -> Trajectory:
    """Samples B images from `start` (B, ...): `transition` at the trained steps, Euler's step at the others.

    Args:
        step_noise: gives the standard normal noise (B, ...) of a trained step.
        microbatch: rows per forward pass; the update must use the same, so that its ratio is exactly 1.
        group: (B,) when the images of a group share their start: then the steps before the window, the same for all
            of a group, are computed once per group.
        solver: without trained steps, what solves the ODE in place of Euler.
    """
    x = start.float()
    first = min(trained, default=0)
    if group is not None and first > 0:
        lead = torch.stack([(group == p).nonzero()[0, 0] for p in range(int(group.max()) + 1)])
        x = _euler(velocity, schedule, x[lead], lead, range(first), microbatch)[group]
    else:
        first = 0
    rows = torch.arange(len(x))
    if not trained:
        empty = x.new_zeros(len(x), 0)
        if solver is not None:
            final = _solve(velocity, x, rows, microbatch, solver)
        else:
            final = _euler(velocity, schedule, x, rows, range(len(schedule)), microbatch)
        return Trajectory(schedule, [], empty, empty, empty, empty, final)
    finals, xs, nexts, means, log_probs = [], [], [], [], []
    noises = {i: step_noise(i) for i in trained}
    for chunk in rows.split(microbatch):
        state, kept, kept_next, kept_mean, scored = x[chunk], [], [], [], []
        for i in range(first, len(schedule)):
            v = velocity(state, i, chunk)
            if i not in noises:
                state = _step("ode", schedule, i, state, v, 0.0)[0]
                continue
            mean, std = _step(transition, schedule, i, state, v, noise_level)
            kept.append(state)
            kept_mean.append(mean)
            state = mean + std * noises[i][chunk].to(mean)  # float32, and the very tensor that is scored and stored
            kept_next.append(state)
            scored.append(sde.LOG_PROBS[log_prob](state, mean, std))
        finals.append(state)
        xs.append(torch.stack(kept, 1))
        nexts.append(torch.stack(kept_next, 1))
        means.append(torch.stack(kept_mean, 1))
        log_probs.append(torch.stack(scored, 1))
    return Trajectory(schedule, list(trained), *(torch.cat(t) for t in (xs, nexts, means, log_probs, finals)))


def replay(
    velocity: Velocity, trajectory: Trajectory, k: int, rows: Tensor, transition: str, noise_level: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The k-th trained step again, under the velocity as it is now: v (n, ...), mean (n, ...) and std (n, 1, ...)."""
    i = trajectory.steps[k]
    x = trajectory.x[rows, k]
    v = velocity(x, i, rows)
    return v, *_step(transition, trajectory.schedule, i, x, v, noise_level)


def _step(name: str, schedule: Schedule, i: int, x: Tensor, v: Tensor, noise_level: float) -> tuple[Tensor, Tensor]:
    return sde.transition(name, x, v, schedule.sigmas[i], schedule.sigmas[i + 1], noise_level, sigma_max=schedule.sigma_max)


def _solve(velocity: Velocity, x: Tensor, rows: Tensor, microbatch: int, solver: Solver) -> Tensor:
    """x (n, ...), states of `rows`, carried from noise to image by the solver."""
    done = []
    for state, chunk in zip(x.split(microbatch), rows.split(microbatch), strict=True):
        advance = solver.start()
        for i in solver.calls:
            state = advance(state, velocity(state, i, chunk))
        done.append(state)
    return torch.cat(done)


def _euler(velocity: Velocity, schedule: Schedule, x: Tensor, rows: Tensor, steps: range, microbatch: int) -> Tensor:
    """x (n, ...), states of `rows`, carried through `steps` of the ODE."""
    done = []
    for state, chunk in zip(x.split(microbatch), rows.split(microbatch), strict=True):
        for i in steps:
            state = _step("ode", schedule, i, state, velocity(state, i, chunk), 0.0)[0]
        done.append(state)
    return torch.cat(done)
