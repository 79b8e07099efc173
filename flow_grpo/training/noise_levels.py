"""The noise and the noise levels at which objectives on final latents compare velocities."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.config.objective import Objective
from flow_grpo.types import Experience, PromptBatch, Schedule


@dataclass(frozen=True)
class NoiseLevel:
    """The noise of B images and how much of it is added to each, on the CPU."""

    eps: Float[Tensor, "B *latent"]  # standard normal, float32
    timestep: Float[Tensor, " B"]
    sigma: Float[Tensor, " B"]


def draw_noise_levels(experience: Experience, objective: Objective, *, seed: int, step: int) -> list[NoiseLevel]:
    """The noise levels of the images of training step `step`, `num_noise_levels` of them."""
    schedule, shape = experience.trajectory.schedule, experience.trajectory.final.shape[1:]
    return [
        draw_noise_level(experience.batch, schedule, shape, objective, seed=seed, step=step, draw=draw)
        for draw in range(objective.num_noise_levels)
    ]


def draw_noise_level(
    batch: PromptBatch,
    schedule: Schedule,
    shape: Sequence[int],
    objective: Objective,
    *,
    seed: int,
    step: int,
    draw: int,
) -> NoiseLevel:
    """The `draw`-th noise level of a training step for latents (B, *shape), shared by a group or not."""
    eps = sampling.batch_noise(shape, batch, seed, "eps", step, draw, shared=objective.shared_noise)
    if objective.sigma_distribution == "schedule":
        steps = torch.tensor(objective.steps_in_range(len(schedule)))
        keys = sampling.batch_noise(steps.shape, batch, seed, "schedule", step, shared=objective.shared_noise)
        chosen = steps[keys.argsort(1)[:, draw]]  # an order of its own; each draw takes the next
        timestep, sigma = schedule.timesteps[chosen], schedule.sigmas[chosen]
    else:
        normal = sampling.batch_noise((), batch, seed, "sigma", step, draw, shared=objective.shared_noise)
        share = torch.special.ndtr(normal)
        low, high = objective.sigma_range
        timestep, sigma = schedule.at(low + (high - low) * share)
    return NoiseLevel(eps, timestep, sigma)


def add_noise(
    x0: Float[Tensor, "n *latent"], eps: Float[Tensor, "n *latent"], sigma: Float[Tensor, " n"]
) -> Float[Tensor, "n *latent"]:
    """The latents at noise level sigma: x = (1 - sigma) x0 + sigma eps."""
    column = sigma.reshape(sampling.number_shape(x0))
    return (1 - column) * x0 + column * eps
