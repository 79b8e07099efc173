"""The advantages of a training step: which images are compared with each other, and by what."""

from functools import partial

import torch
from torch import Tensor

from flow_grpo import advantages, tree
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import rows_by_set
from flow_grpo.training.custom import load_custom_function
from flow_grpo.training.scored_images import ScoredImages
from rewards import WeightedSum


class GroupAdvantages:
    """Compares images with those of their group, by the settings of a stage.

    Attributes:
        method: the advantage's name, or the user's function.
    """

    def __init__(self, args: FlowGRPOConfig, rewards: WeightedSum) -> None:
        self.args, self.rewards = args, rewards
        self.method = load_custom_function("advantage", args.objective.advantage) or args.objective.advantage

    def __call__(self, images: ScoredImages, compared: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Advantages (B,) against the group, 0 outside the rows `compared` (B,); (B,) bool, the rows with signal; metrics."""
        advantage, has_signal = torch.zeros(len(compared)), torch.zeros(len(compared), dtype=torch.bool)
        if not compared.any():
            return advantage, has_signal, {}
        branches, steps = self.args.sampling.branches, images.trajectory.steps
        if branches and steps:  # each step has the advantage of the branch that it led to
            advantage = advantage[:, None].repeat(1, len(steps))
        metrics: dict[str, float] = {}
        row_weights = self.rewards.row_weights(images.batch.metadata_columns())
        for prompt_set, in_set in (rows_by_set(images.batch.metadata) or {"": compared}).items():
            rows = in_set & compared
            for part in _split_by_weights(rows, row_weights):  # rewards of two kinds have no common scale
                advantage[part], has_signal[part] = self._compare(images, part, row_weights, len(steps) if branches else 0)
            if rows.any():
                metrics |= self._contributions(images, rows, row_weights, prompt_set)
        if self.args.trains_on_zero_std_groups:
            has_signal = compared
        elif self.args.method.rows != "all":  # images are selected of groups in which the sum differs
            has_signal = compared & images.has_spread
        return advantage, has_signal, metrics

    def _by_reward(self, images: ScoredImages, rows: Tensor, row_weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of the rows (B,): their trained rewards (n, R), and the weights (R,) of these, or (n, R) if prompts name them."""
        by_reward = torch.stack([images.scores.by_name[name][rows] for name in self.rewards.trained_weights], 1)
        if row_weights is None:
            return by_reward, torch.tensor([*self.rewards.trained_weights.values()])
        weights = row_weights[rows]  # a reward that does not score a group has no part in its sum
        return by_reward.where(weights != 0, 0), weights

    def _contributions(
        self, images: ScoredImages, rows: Tensor, row_weights: Tensor | None, prompt_set: str
    ) -> dict[str, float]:
        """Metrics of what each reward contributes to the advantages of the rows (B,) of one prompt set."""
        by_reward, weights = self._by_reward(images, rows, row_weights)
        names, group = list(self.rewards.trained_weights), images.batch.group[rows]
        return advantages.contributions(names, by_reward, weights, group, method=self.method, prompt_set=prompt_set)

    def _compare(
        self, images: ScoredImages, rows: Tensor, row_weights: Tensor | None, branching_steps: int
    ) -> tuple[Tensor, Tensor]:
        """Of the n rows (B,), whose rewards have one scale: their advantages (n,), or (n, K) of the steps of a tree; their signal (n,)."""
        objective, batch = self.args.objective, images.batch.take(rows.nonzero()[:, 0])
        by_reward, weights = self._by_reward(images, rows, row_weights)
        compared_rewards, compared_weights = self._capped(by_reward, weights, batch.group)
        compare = partial(advantages.group_advantages, group=batch.group, method=self.method, weights=compared_weights)
        if branching_steps:
            by_step = tree.branch_rewards(compared_rewards, batch, self.args.sampling.branches, branching_steps)
            advantage = torch.stack([compare(reward) for reward in by_step], 1)
        else:
            advantage = compare(compared_rewards)
        if objective.diversity_weight is not None:
            distance = images.scores.by_name[self.rewards.names[objective.diversity_weight]][rows]
            advantage = advantages.diversity_weighted(advantage, distance, batch.group)
        by_each = self.args.takes_each_reward or objective.reward_cap is not None
        reward = compared_rewards if by_each else images.scores.total[rows]
        return advantage, advantages.has_signal(reward, batch.group, self.method)

    def _capped(self, by_reward: Tensor, weights: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
        """The rewards (n, R) that are compared and their weights; capped, each if they are compared one by one, else their sum."""
        cap = self.args.objective.reward_cap
        if cap is None:
            return by_reward, weights
        if self.args.takes_each_reward:
            return advantages.capped(by_reward, group, cap), weights
        return advantages.capped(advantages.weighted_sum(by_reward, weights), group, cap)[:, None], torch.ones(1)


def _split_by_weights(rows: Tensor, row_weights: Tensor | None) -> list[Tensor]:
    """`rows` (B,) bool in parts whose prompts weigh the rewards equally; row_weights is (B, R), or None if all prompts do."""
    if row_weights is None:
        return [rows] if rows.any() else []
    return [rows & (row_weights == weights).all(1) for weights in row_weights[rows].unique(dim=0)]
