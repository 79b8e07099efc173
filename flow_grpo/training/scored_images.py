"""The images of a training step with their rewards: which groups are complete, which have rewards that differ, and metrics of all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flow_grpo import advantages
from flow_grpo.data.prompts import rows_by_set
from flow_grpo.rewards.selection import COLUMN
from flow_grpo.types import PromptBatch, Scores, Trajectory


@dataclass(frozen=True)
class ScoredImages:
    """Images of a step. `batch` and `scores` have the rows of all processes, `trajectory` those of this process alone.

    Attributes:
        compared_rewards: (B, K), as of `advantages.compared_rewards`; NaN in incomplete groups.
    """

    batch: PromptBatch
    trajectory: Trajectory
    scores: Scores
    compared_rewards: Tensor

    @staticmethod
    def join(parts: "Sequence[ScoredImages]") -> "ScoredImages":
        """The images of several rounds as one."""
        return ScoredImages(
            PromptBatch.join([part.batch for part in parts]),
            Trajectory.join([part.trajectory for part in parts]),
            Scores.join([part.scores for part in parts]),
            torch.cat([part.compared_rewards for part in parts]),
        )

    @property
    def complete(self) -> Tensor:
        """(B,) bool: the rows of complete groups."""
        return complete_groups(self.scores.total, self.batch.group)

    @property
    def has_spread(self) -> Tensor:
        """(B,) bool: the rows of complete groups whose compared rewards differ."""
        return self.complete & advantages.has_signal(self.compared_rewards.nan_to_num(), self.batch.group)


def complete_groups(reward: Tensor, group: Tensor) -> Tensor:
    """(B,) bool: the rows of groups in which every reward is a number. A dropped reward drops its group."""
    incomplete = group[~torch.isfinite(reward)].unique()
    return ~torch.isin(group, incomplete)


def reward_metrics(images: ScoredImages) -> dict[str, float]:
    """Metrics of all images that a step has sampled."""
    complete, reward, group = images.complete, images.scores.total, images.batch.group
    metrics = {} if complete.all() else {"frac_reward_dropped": 1 - complete.float().mean().item()}
    if complete.any():
        metrics["frac_reward_zero_std"] = 1 - images.has_spread[complete].float().mean().item()
        by_group = reward[complete].view(len(group[complete].unique()), -1)
        metrics["reward"] = reward[complete].mean().item()
        metrics["reward_std"] = by_group.std(1, correction=0).mean().item()
        sets = {name: reward[rows & complete] for name, rows in rows_by_set(images.batch.metadata).items()}
        metrics |= {f"reward/{name}": values.mean().item() for name, values in sets.items() if len(values)}
        means = {f"rewards/{name}/mean": v[complete].nanmean().item() for name, v in images.scores.by_name.items()}
        some_name_rewards = any(row.get(COLUMN) is not None for row in images.batch.metadata)
        metrics |= {  # without a reward that no prompt of this step names
            name: mean for name, mean in means.items() if not (some_name_rewards and math.isnan(mean))
        }
    return metrics
