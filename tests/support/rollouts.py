"""Rollouts of several micro-batches, as the trainer makes them of `sampling.rollout`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.types import Schedule, Trajectory

ByRows = Callable[[Tensor, int, Tensor], Tensor]  # (x, step, rows) -> velocity


def of_rows(velocity: ByRows, rows: Tensor) -> sampling.Velocity:
    """The velocity of these rows."""
    return lambda x, i: velocity(x, i, rows)


def rollout(
    velocity: ByRows, schedule: Schedule, start: Tensor, microbatch: int, noise: Any = None, **options: Any
) -> Trajectory:
    """All rows of `start`, a micro-batch at a time."""

    def part(rows: Tensor) -> Trajectory:
        own_noise = None if noise is None else lambda i: noise(i)[rows]
        return sampling.rollout(of_rows(velocity, rows), schedule, start[rows], noise=own_noise, **options)

    return Trajectory.join([part(rows) for rows in torch.arange(len(start)).split(microbatch)])
