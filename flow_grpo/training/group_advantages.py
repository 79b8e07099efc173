"""The advantages of a training step: which images are compared with each other, and by what."""

from collections.abc import Callable

import torch
from torch import Tensor

from flow_grpo import advantages
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import rows_by_set
from flow_grpo.rewards import WeightedSum
from flow_grpo.training.custom import load_custom_function
from flow_grpo.training.scored_images import ScoredImages
from flow_grpo.types import PromptBatch

MIN_REWARD_SHARE = 0.05  # of the advantage, for each trained reward


class GroupAdvantages:
    """Compares images with those of their group, by the settings of a stage.

    Attributes:
        method: the advantage's name, or the user's function.
    """

    def __init__(self, args: FlowGRPOConfig, rewards: WeightedSum) -> None:
        self.args, self.rewards = args, rewards
        self.method = load_custom_function("advantage", args.objective.advantage) or args.objective.advantage

    def __call__(self, images: ScoredImages, compared: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Advantages (B,) against the group, 0 outside the rows `compared` (B,); (B,) bool, the rows that get a loss; metrics."""
        advantage, has_loss = torch.zeros(len(compared)), torch.zeros(len(compared), dtype=torch.bool)
        if not compared.any():
            return advantage, has_loss, {}
        metrics: dict[str, float] = {}
        by_reward, weights = self.trained_rewards(images.batch, images.scores.by_name)
        for prompt_set, in_set in (rows_by_set(images.batch.metadata) or {"": compared}).items():
            rows = in_set & compared
            for part in _split_by_weights(rows, weights):  # rewards of two kinds have no common scale
                advantage[part], has_loss[part] = self._compare(images, part)
            if rows.any():
                metrics |= contribution_metrics(
                    list(self.rewards.trained_weights),
                    by_reward[rows],
                    _of_rows(weights, rows),
                    images.batch.group[rows],
                    method=self.method,
                    prompt_set=prompt_set,
                )
        if self.args.trains_on_zero_std_groups:
            has_loss = compared
        elif self.args.objective.needs.rows != "all":  # images are selected of groups in which the sum differs
            has_loss = compared & images.has_spread
        return advantage, has_loss, metrics

    def trained_rewards(self, batch: PromptBatch, by_name: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The trained rewards (B, R) and their weights (R,), or (B, R) if prompts name the rewards.

        A reward that does not score a group is 0 there, and so is its weight.
        """
        by_reward = torch.stack([by_name[name] for name in self.rewards.trained_weights], 1)
        row_weights = self.rewards.row_weights(batch.metadata_columns())
        if row_weights is None:
            return by_reward, torch.tensor([*self.rewards.trained_weights.values()])
        return by_reward.where(row_weights != 0, 0), row_weights

    def compared_rewards(self, batch: PromptBatch, by_name: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The rewards (B, K) that groups are compared by, and their weights (K,) or (B, K)."""
        by_reward, weights = self.trained_rewards(batch, by_name)
        return advantages.compared_rewards(by_reward, weights, batch.group, self.method)

    def _compare(self, images: ScoredImages, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages (n,) of n rows whose rewards have one scale, and (n,) bool, whether the rewards of a row's group differ."""
        batch = images.batch.take(rows.nonzero()[:, 0])
        by_name = {name: values[rows] for name, values in images.scores.by_name.items()}
        rewards, weights = self.compared_rewards(batch, by_name)
        advantage = advantages.group_advantages(rewards, group=batch.group, method=self.method, weights=weights)
        return advantage, advantages.has_signal(rewards, batch.group, self.method)


def contribution_metrics(
    names: list[str],
    by_reward: Tensor,
    weights: Tensor,
    group: Tensor,
    *,
    method: str | Callable[..., Tensor],
    prompt_set: str = "",
) -> dict[str, float]:
    """Metrics of several rewards: advantage/share/NAME, and advantage/correlation/NAME/OTHER of each pair. See `advantages.shares`.

    With `prompt_set`, they are named advantage/share/SET/NAME and so on. {} if fewer than two rewards have a weight here.
    """
    if weights.ndim == 2:
        columns = weights.any(0).nonzero()[:, 0].tolist()
        names, by_reward, weights = [names[i] for i in columns], by_reward[:, columns], weights[:, columns]
    if len(names) < 2:
        return {}
    share, correlation = advantages.shares(by_reward, weights, group, method)
    pairs, prefix = [(i, j) for i in range(len(names)) for j in range(i)], f"{prompt_set}/" if prompt_set else ""
    return {
        **{f"advantage/share/{prefix}{name}": value for name, value in zip(names, share.tolist(), strict=True)},
        **{f"advantage/correlation/{prefix}{names[j]}/{names[i]}": correlation[i, j].item() for i, j in pairs},
    }


def logged_shares(metrics: dict[str, float]) -> dict[str, float]:
    """The share of each reward, as NAME or SET/NAME, in the metrics of `contribution_metrics`."""
    prefix = "advantage/share/"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def explain_small_share(share: dict[str, float], method: str | Callable[..., Tensor]) -> str | None:
    """What to do about the reward with the smallest share of the advantage. None if each has `MIN_REWARD_SHARE`.

    A share of exactly 0 is that of a reward without any spread within groups, which no weight changes.
    """
    with_spread = {name: value for name, value in share.items() if value != 0}
    if not with_spread or min(with_spread.values()) >= MIN_REWARD_SHARE:
        return None
    smallest = min(with_spread, key=lambda name: with_spread[name])
    percent = f"{round(with_spread[smallest], 3) + 0:.1%}"  # + 0: never -0.0%
    gdpo = "" if method == "gdpo" else ", or set objective.advantage=gdpo"
    return f"{smallest} has almost no effect, {percent} of the advantage: raise its weight{gdpo}."


def _split_by_weights(rows: Tensor, weights: Tensor) -> list[Tensor]:
    """`rows` (B,) bool in parts whose prompts weigh the rewards equally; weights is (B, R), or (R,) if all prompts do."""
    if weights.ndim == 1:
        return [rows] if rows.any() else []
    return [rows & (weights == of_part).all(1) for of_part in weights[rows].unique(dim=0)]


def _of_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """The weights (n, R) of n rows, or (R,) if all rows have the same."""
    return weights if weights.ndim == 1 else weights[rows]
