"""Rollouts: trajectories of the sampler, with the Gaussian steps that are to be trained inside a window.

Every random number comes from `noise(shape, seed, name, ...)`, seeded by a hash of (run seed, training step, prompt, image, ...). So
neither the micro-batch nor the number of processes changes an image, and a resumed run needs no replay. torch's CPU generator uses 32
bits of a seed: among n noises expect n^2 / 2^33 equal ones, some 20 of 400,000.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flow_grpo import sde
from flow_grpo.types import (
    PromptBatch,
    RecordedTransition,
    ReplayedTransition,
    Schedule,
    StochasticSteps,
    Trajectory,
    take_rows,
)

# state (n, ...), step of the schedule -> velocity (n, ...)
Velocity = Callable[[Tensor, int], Tensor]
# x, v, sigma, sigma_next, history -> the state at sigma_next, and the history for the next step; None starts afresh
Solver = Callable[[Tensor, Tensor, Tensor, Tensor, Any], tuple[Tensor, Any]]


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


def euler(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, history: None) -> tuple[Tensor, None]:
    """Euler's step of the ODE."""
    return sde.transition("ode", x, v, sigma, sigma_next, noise_level=0.0)[0], None


def dpm_2m(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, history: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """DPM-Solver++ (2M), arXiv 2211.01095: one velocity a step, the predicted image extrapolated from the step before.

    It extrapolates over log((1 - sigma) / sigma), which is infinite at sigma 1 and 0: a step after sigma 1 is Euler's, and so must be one
    to sigma 0, by history None. The same operations as diffusers' DPMSolverMultistepScheduler, to the last bit.

    Args:
        history: the predicted image and the log of the step before.
    """
    x0_hat = x - sigma * v
    log_snr, log_snr_next = ((1 - s).log() - s.log() for s in (sigma, sigma_next))
    h = log_snr_next - log_snr
    gain = (1 - sigma_next) * ((-h).exp() - 1)
    x_next = (sigma_next / sigma) * x - gain * x0_hat
    if history is not None:
        x0_before, log_snr_before = history
        slope = 1 / ((log_snr - log_snr_before) / h) * (x0_hat - x0_before)
        x_next = x_next - 0.5 * gain * slope
    return x_next, (x0_hat, log_snr)


SOLVERS: dict[str, Solver] = {"euler": euler, "dpm_2m": dpm_2m}


@torch.no_grad()
def rollout(
    velocity: Velocity,
    schedule: Schedule,
    x: Float[Tensor, "n *state"],
    *,
    stochastic: StochasticSteps | None = None,
    noise: Callable[[int], Tensor] | None = None,
    solver: Solver = euler,
    steps: range | None = None,
    keep_graphs: bool = False,
    trained: Velocity | None = None,
) -> Trajectory:
    """Sample n images of one micro-batch: along the ODE, but for the stochastic steps. All is float32, on the device of x.

    Args:
        x: the state before the first of `steps`.
        stochastic: the steps that add noise and are recorded; by default none.
        noise: returns the standard normal noise (n, ...) of a stochastic step.
        solver: of the steps along the ODE; it starts afresh after a stochastic step (MixGRPO-Flash, arXiv 2507.21802).
        steps: the steps of the schedule that are taken; by default all.
        keep_graphs: compute the stochastic steps with gradients and keep their graphs (LeanGRPO, arXiv 2609.03528). No gradient flows
            from one step to another, as in a replay.
        trained: the velocity whose transition is recorded at a stochastic step, if it is not the one that samples, such as the one
            without guidance. The state that was sampled is then a less likely one.
    """
    steps = range(len(schedule)) if steps is None else steps
    recorded = set() if stochastic is None else set(stochastic.steps)
    x, history, records = x.float(), None, list[RecordedTransition]()
    for i in steps:
        if i not in recorded:
            if i + 1 == steps.stop or i + 1 in recorded:
                history = None  # the last step before a stochastic one, or to sigma 0, is of first order
            x, history = solver(x, velocity(x, i), schedule.sigmas[i], schedule.sigmas[i + 1], history)
            continue
        assert stochastic is not None
        assert noise is not None
        with torch.set_grad_enabled(keep_graphs):
            v = velocity(x, i)
            mean, std = _transition(stochastic, schedule, i, x, v)
            x_next = mean.detach() + std * noise(i)
            if trained is not None:
                v = trained(x, i)
                mean, std = _transition(stochastic, schedule, i, x, v)
            log_prob = sde.log_prob(x_next, mean, std)
        graph = ReplayedTransition(v, mean, std, log_prob) if keep_graphs else None
        records.append(RecordedTransition(x, x_next, mean.detach(), log_prob.detach(), graph))
        x, history = x_next, None
    return Trajectory.from_records(schedule, stochastic, records, final=x)


def endpoint_derivatives(schedule: Schedule, solver: Solver = euler) -> list[float]:
    """The derivative of an ODE rollout's final latents by the velocity of each step, with the other velocities and the start fixed.

    Solvers are linear in states and velocities, so it is what a rollout makes of a velocity of 1 at that step alone. Euler's is the
    length of the step, below 0.
    """
    alone = torch.eye(len(schedule))
    final = rollout(lambda x, i: alone[:, i : i + 1], schedule, torch.zeros(len(schedule), 1), solver=solver).final
    return final[:, 0].tolist()


def replay(
    velocity: Velocity, trajectory: Trajectory, k: int, rows: Int[Tensor, " n"], device: torch.device | None = None
) -> ReplayedTransition:
    """Repeat the k-th stochastic step of `rows` with the velocity as it is now, on `device`, by default where the records are.

    Args:
        velocity: of these rows.
    """
    assert trajectory.stochastic is not None, "no step was recorded"
    x, x_next = (take_rows(values[:, k], rows, device) for values in (trajectory.x, trajectory.x_next))
    i = trajectory.steps[k]
    v = velocity(x, i)
    mean, std = _transition(trajectory.stochastic, trajectory.schedule, i, x, v)
    return ReplayedTransition(v, mean, std, sde.log_prob(x_next, mean, std))


def _transition(
    stochastic: StochasticSteps, schedule: Schedule, i: int, x: Float[Tensor, "n *state"], v: Float[Tensor, "n *state"]
) -> tuple[Float[Tensor, "n *state"], sde.Std]:
    """Mean and std of step i of the schedule."""
    sigma, sigma_next = schedule.sigmas[i], schedule.sigmas[i + 1]
    name, level = stochastic.transition, stochastic.noise_level
    return sde.transition(name, x, v, sigma, sigma_next, noise_level=level, sigma_max=schedule.sigmas[1])
