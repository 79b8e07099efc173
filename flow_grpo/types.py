"""The data that flows through a training step. P prompts, G images each, B = P G rows, K trained steps.

PromptBatch  --policy.encode-->     conditioning
conditioning --sampling.rollout-->  Trajectory
Trajectory   --policy.decode-->     images, float32 RGB (B, 3, H, W) in [0, 1]
images       --rewards-->           Scores
Scores       --group_advantages-->  advantage (B,)
advantage    --objective-->         Loss
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class PromptBatch:
    """B rows, the images of a prompt next to each other: a group. Row b is image `image[b]` of prompt `group[b]`."""

    prompts: list[str]
    metadata: list[dict]
    group: Tensor  # (B,) int64, 0..P-1
    image: Tensor  # (B,) int64, 0..G-1

    def columns(self) -> dict[str, list]:
        """The metadata as one list of B values per key, which is how rewards take it."""
        keys = sorted({key for row in self.metadata for key in row})
        return {key: [row.get(key) for row in self.metadata] for key in keys}


@dataclass(frozen=True)
class Schedule:
    """The pipeline's own pairs of timestep (what the network is told) and sigma (the noise level)."""

    timesteps: Tensor  # (T,)
    sigmas: Tensor  # (T + 1,), falling from about 1 to 0

    def __len__(self) -> int:
        return len(self.timesteps)

    def at(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Timestep and sigma between steps, (n,) each, at positions (n,) in [0, T]: linear between the schedule's pairs."""
        end = self.timesteps[-1:] * self.sigmas[-1:] / self.sigmas[-2:-1]
        timesteps = torch.cat([self.timesteps, end])
        low = position.floor().long().clamp(0, len(self) - 1)
        share = position - low
        return timesteps[low].lerp(timesteps[low + 1], share), self.sigmas[low].lerp(self.sigmas[low + 1], share)

    @property
    def sigma_max(self) -> Tensor:
        """What `flow_sde` puts in place of a sigma of 1."""
        return self.sigmas[1]


@dataclass(frozen=True)
class Trajectory:
    """What a rollout leaves for the update: K trained transitions of each of B images, and where they ended."""

    schedule: Schedule
    steps: list[int]  # (K,) indices into the schedule
    x: Tensor  # (B, K, ...) float32, the state before each trained step
    x_next: Tensor  # (B, K, ...) float32, the state after it: the tensor that was scored and stepped from
    log_prob_BK: Tensor  # (B, K)
    final: Tensor  # (B, ...) float32 latents of the images


@dataclass(frozen=True)
class Scores:
    """Rewards of B images: the weighted sum, and each reward alone, all (B,) float32."""

    total: Tensor
    by_name: dict[str, Tensor]


@dataclass(frozen=True)
class Loss:
    """What to minimise, per row (B,), and detached numbers to report, (B,) each.

    Rows, not their mean: the trainer weighs them, so that the micro-batch size changes nothing.
    """

    value: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
