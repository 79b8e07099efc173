"""The advantages of a training step: which images are compared with each other, by what, and what each reward's share is."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flow_grpo import advantages
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import rows_by_set
from flow_grpo.distributed.processes import Processes
from flow_grpo.rewards import WeightedSum
from flow_grpo.rewards.scoring import REWARDS_COLUMN
from flow_grpo.run_folder.metrics_file import SHARE
from flow_grpo.training.custom_functions import load_custom_function
from flow_grpo.types import Experience, GradientStates, PromptBatch, Scores, Trajectory

MIN_REWARD_SHARE = 0.05  # of the advantage, for each trained reward


@dataclass(frozen=True)
class Comparison:
    """The comparison of a step's B images, of all processes, by their scores.

    Attributes:
        advantage: a column for each trained step if each has its own; 0 in rows that are not scored.
        scored: the rows of groups in which every reward is a number. A dropped reward drops its group.
        has_loss: the rows that the policy is trained on.
        gradient_weights: of objectives by reward gradients, the weight of each reward's gradient for this process's images.
    """

    advantage: Float[Tensor, "B *K"]
    scored: Bool[Tensor, " B"]
    has_loss: Bool[Tensor, " B"]
    metrics: dict[str, float]
    gradient_weights: dict[str, Tensor] | None = None


class Comparer:
    """Gives the images of a step their advantages, or the weights of their rewards' gradients. Some learn from step to step."""

    def __call__(self, batch: PromptBatch, trajectory: Trajectory, scores: Scores) -> Comparison:
        """Compare B images of all processes; the trajectory is of this process."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The values that steps change, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class GroupAdvantages(Comparer):
    """Compares images with those of their group, by the settings of a stage.

    Attributes:
        method: the advantage's name, or the user's function.
    """

    def __init__(self, args: FlowGRPOConfig, rewards: WeightedSum) -> None:
        self.args, self.rewards = args, rewards
        self.trains_on_zero_std_groups = args.trains_on_zero_std_groups
        self.method = load_custom_function("advantage", args.objective.advantage) or args.objective.advantage

    def __call__(self, batch: PromptBatch, trajectory: Trajectory, scores: Scores) -> Comparison:
        """Compare the images of a step; their trajectory is not used."""
        scored, informative = self.row_masks(batch, scores)
        advantage, has_loss = torch.zeros(len(scored)), torch.zeros_like(scored)
        metrics = reward_metrics(batch, scores, informative)
        if not scored.any():
            return Comparison(advantage, scored, has_loss, metrics)
        by_reward, weights = self.trained_rewards(batch, scores.by_name)
        for prompt_set, in_set in (rows_by_set(batch.metadata) or {"": scored}).items():
            rows = in_set & scored
            if not rows.any():
                continue
            advantage[rows], has_loss[rows] = self._compare(batch, scores, rows)
            metrics |= contribution_metrics(
                list(self.rewards.trained_weights),
                by_reward[rows],
                weights if weights.ndim == 1 else weights[rows],
                batch.group[rows],
                method=self.method,
                prompt_set=prompt_set,
            )
        if self.trains_on_zero_std_groups:
            has_loss = scored
        elif self.args.objective.needs.selection != "all":  # images are selected from groups whose summed rewards differ
            has_loss = informative
        return Comparison(advantage, scored, has_loss, metrics)

    def row_masks(self, batch: PromptBatch, scores: Scores) -> tuple[Tensor, Tensor]:
        """Masks (B,): rows whose group is scored in full, and of these the rows whose group's rewards differ."""
        scored = scored_rows(scores.total, batch.group)
        compared, _ = self.compared_rewards(batch, scores.by_name)
        return scored, scored & advantages.has_signal(compared.nan_to_num(), batch.group)

    def trained_rewards(self, batch: PromptBatch, by_name: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The trained rewards (B, R) and their weights (R,), or (B, R) if prompt sets name the rewards.

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
        return advantages.compared_rewards(by_reward, weights, self.method)

    def _compare(self, batch: PromptBatch, scores: Scores, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages (n,) of n rows whose rewards have one scale, and (n,) bool, whether the rewards of a row's group differ."""
        batch = batch.take(rows.nonzero()[:, 0])
        rewards, weights = self.compared_rewards(batch, scores.take(rows).by_name)
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
        **{f"{SHARE}{prefix}{name}": value for name, value in zip(names, share.tolist(), strict=True)},
        **{f"advantage/correlation/{prefix}{names[j]}/{names[i]}": correlation[i, j].item() for i, j in pairs},
    }


def logged_shares(metrics: dict[str, float]) -> dict[str, float]:
    """The share of each reward, as NAME or SET/NAME, in the metrics of `contribution_metrics`."""
    return {name.removeprefix(SHARE): value for name, value in metrics.items() if name.startswith(SHARE)}


def explain_small_share(share: dict[str, float], method: str | Callable[..., Tensor]) -> str | None:
    """Advice on the reward with the smallest share of the advantage. None if each has `MIN_REWARD_SHARE`.

    A share of exactly 0 is that of a reward without any spread in these groups, as of a penalty for what is rare: it may have some later.
    """
    with_spread = {name: value for name, value in share.items() if value != 0}
    if not with_spread or min(with_spread.values()) >= MIN_REWARD_SHARE:
        return None
    smallest = min(with_spread, key=lambda name: with_spread[name])
    percent = f"{round(with_spread[smallest], 3) + 0:.1%}"  # + 0: never -0.0%
    gdpo = "" if method == "gdpo" else ", or set objective.advantage=gdpo"
    return f"{smallest} has almost no effect, {percent} of the advantage: raise its weight{gdpo}."


def scored_rows(reward: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """The rows of groups in which every reward is a number."""
    incomplete = group[~torch.isfinite(reward)].unique()
    return ~torch.isin(group, incomplete)


def reward_metrics(batch: PromptBatch, scores: Scores, informative: Bool[Tensor, " B"]) -> dict[str, float]:
    """Metrics of all images of a step."""
    scored, reward, group = scored_rows(scores.total, batch.group), scores.total, batch.group
    metrics = {"images": float(len(batch.prompts))}
    if not scored.all():
        metrics["frac_reward_dropped"] = 1 - scored.float().mean().item()
    if scored.any():
        metrics["frac_reward_zero_std"] = 1 - informative[scored].float().mean().item()
        by_group = reward[scored].view(len(group[scored].unique()), -1)
        metrics["reward"] = reward[scored].mean().item()
        metrics["reward_std"] = by_group.std(1, correction=0).mean().item()
        sets = {name: reward[rows & scored] for name, rows in rows_by_set(batch.metadata).items()}
        metrics |= {f"reward/{name}": values.mean().item() for name, values in sets.items() if len(values)}
        means = {f"rewards/{name}/mean": v[scored].nanmean().item() for name, v in scores.by_name.items()}
        some_name_rewards = any(row.get(REWARDS_COLUMN) is not None for row in batch.metadata)
        # without a reward that no set of this step names
        metrics |= {name: mean for name, mean in means.items() if not (some_name_rewards and math.isnan(mean))}
    return metrics


def experience_of(
    batch: PromptBatch,
    trajectory: Trajectory,
    scores: Scores,
    compared: Comparison,
    *,
    args: FlowGRPOConfig,
    processes: Processes,
) -> Experience:
    """The experience of this process: its rows of a step.

    Args:
        batch, scores, compared: of all processes.
        trajectory: of this process.
    """
    rows, rows_per_group = select_rows(args.objective.needs.selection, scores.total, batch.group, compared.has_loss)
    is_local, states = processes.owns(batch.group, args.updates), trajectory.gradient_states
    without = 0.0 if states is None else frac_gradient_zero(states, compared.scored[is_local], processes)
    local_index = is_local.cumsum(0) - 1
    weights = compared.gradient_weights
    has_advantage = weights is not None or bool(compared.advantage[compared.has_loss].any())
    return Experience(
        batch=batch.take(is_local.nonzero()[:, 0]),
        trajectory=trajectory,
        advantage=compared.advantage[is_local],
        rows=local_index[rows[is_local[rows]]],
        rows_per_group=rows_per_group,
        groups=batch.group[compared.scored].unique(),
        metrics=compared.metrics | ({"frac_gradient_zero": without} if without else {}),
        scores=scores.take(is_local),
        # images that were dropped have a warning of their own
        has_advantage=(has_advantage and without < 1) or not compared.scored.any(),
        reward_gradient=None if states is None or weights is None else states.weighted(weights),
    )


def frac_gradient_zero(states: GradientStates, scored: Bool[Tensor, " B"], processes: Processes) -> float:
    """The share of the scored images of all processes at which the gradient of each reward is 0."""
    has_gradient = torch.stack([gradient.flatten(1).any(1).cpu() for gradient in states.gradient.values()]).any(0)[scored]
    parts = processes.all_gather((int((~has_gradient).sum()), len(has_gradient)))
    zeros, counts = zip(*parts, strict=True)
    return sum(zeros) / max(sum(counts), 1)


def select_rows(selection: str, reward: Tensor, group: Tensor, has_loss: Tensor) -> tuple[Tensor, int]:
    """The rows that an objective trains on, and how many rows each group of `has_loss` (B,) gives.

    Args:
        selection: "best", the best image of each group; "best_and_worst", the best and the worst image of each group, one after
            the other; "all" images of these groups.
    """
    if selection == "all":
        return has_loss.nonzero()[:, 0], int((group == group[0]).sum())
    rows = []
    for g in group[has_loss].unique().tolist():
        members = (group == g).nonzero()[:, 0]
        best = members[reward[members].argmax()]
        rows += [best] if selection == "best" else [best, members[reward[members].argmin()]]
    selected = torch.stack(rows) if rows else torch.zeros(0, dtype=torch.long)
    return selected, 1 if selection == "best" else 2
