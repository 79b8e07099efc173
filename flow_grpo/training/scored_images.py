"""The images of a training step with their rewards: which groups are complete, which have rewards that differ, and metrics of all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flow_grpo import advantages
from flow_grpo.data.prompts import rows_by_set
from flow_grpo.types import PromptBatch, Scores, Trajectory
from rewards.selection import COLUMN


@dataclass(frozen=True)
class ScoredImages:
    """Images of a step. `batch` and `scores` have the rows of all processes, `trajectory` those of this process alone.

    Attributes:
        reward_cap: the quantile of its group at which a reward is capped; None for no cap.
        separate_rewards: the names of rewards that are compared one by one; () if their weighted sum is compared.
    """

    batch: PromptBatch
    trajectory: Trajectory
    scores: Scores
    reward_cap: float | None = None
    separate_rewards: tuple[str, ...] = ()

    @staticmethod
    def join(parts: "Sequence[ScoredImages]") -> "ScoredImages":
        """The images of several rounds as one."""
        return ScoredImages(
            PromptBatch.join([part.batch for part in parts]),
            Trajectory.join([part.trajectory for part in parts]),
            Scores.join([part.scores for part in parts]),
            parts[0].reward_cap,
            parts[0].separate_rewards,
        )

    @property
    def complete(self) -> Tensor:
        """(B,) bool: the rows of complete groups."""
        return complete_groups(self.scores.total, self.batch.group)

    @property
    def has_spread(self) -> Tensor:
        """(B,) bool: the rows of complete groups whose rewards differ, once they are capped."""
        group, by_name = self.batch.group, self.scores.by_name
        reward = (
            torch.stack([by_name[name] for name in self.separate_rewards], 1) if self.separate_rewards else self.scores.total
        )
        reward = reward.nan_to_num()  # NaN: the group is incomplete, or the reward does not score this prompt
        if self.reward_cap is not None:
            reward = advantages.capped(reward, group, self.reward_cap)
        return self.complete & advantages.has_signal(reward, group)


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
