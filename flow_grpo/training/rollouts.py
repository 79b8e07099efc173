"""What a training step learns from: prompts, their images, rewards and advantages.

`RolloutSource` samples images; `flow_grpo.training.offline` takes given ones. Both `collect(step)` an `Experience`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flow_grpo import advantages, tree
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import PromptSampler, rows_by_set
from flow_grpo.distributed.processes import Processes
from flow_grpo.policy.policy import Policy
from flow_grpo.training.critic import Critic
from flow_grpo.training.custom import load_custom_function
from flow_grpo.training.gates import DisagreementGate
from flow_grpo.training.image_sampler import ImageSampler
from flow_grpo.types import Experience, PromptBatch, Scores, Trajectory
from rewards import WeightedSum


@dataclass(frozen=True)
class ScoredImages:
    """Images of a step. `batch` and `scores` have the rows of all processes, `trajectory` those of this process alone.

    Attributes:
        reward_cap: the quantile of its group at which a reward is capped; None for no cap.
    """

    batch: PromptBatch
    trajectory: Trajectory
    scores: Scores
    reward_cap: float | None = None

    @staticmethod
    def join(parts: "Sequence[ScoredImages]") -> "ScoredImages":
        """The images of several rounds as one."""
        return ScoredImages(
            PromptBatch.join([part.batch for part in parts]),
            Trajectory.join([part.trajectory for part in parts]),
            Scores.join([part.scores for part in parts]),
            parts[0].reward_cap,
        )

    @property
    def complete(self) -> Tensor:
        """(B,) bool: the rows of complete groups."""
        return complete_groups(self.scores.total, self.batch.group)

    @property
    def has_spread(self) -> Tensor:
        """(B,) bool: the rows of complete groups whose rewards differ, once they are capped."""
        return has_reward_spread(self.scores.total, self.batch.group, self.reward_cap)


class RolloutSource:
    """Samples, scores and compares the images of training steps.

    Args:
        critic: gives the advantages in place of the group, for ppo.
        window: returns the trained sampling steps of a training step.
        should_stop, processes: as of `ImageSampler`.
    """

    def __init__(
        self,
        policy: Policy,
        args: FlowGRPOConfig,
        prompt_sampler: PromptSampler,
        rewards: WeightedSum,
        *,
        window: Callable[[int], list[int]],
        critic: Critic | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        processes: Processes | None = None,
    ) -> None:
        self.policy, self.args, self.prompt_sampler, self.rewards = policy, args, prompt_sampler, rewards
        self.window, self.critic, self.processes = window, critic, processes or Processes()
        self.image_sampler = ImageSampler(policy, args, rewards, should_stop, self.processes)
        gated = any(anchor.gate == "disagreement" for anchor in args.objective.anchors)
        self.disagreement_gate = DisagreementGate() if gated else None
        self.advantage_method = load_custom_function("advantage", args.objective.advantage) or args.objective.advantage

    def collect(self, step: int) -> Experience:
        """Sample a group of images for each prompt, score them, and compare them within their groups."""
        rounds = self._collect_until_signal(step)
        images = ScoredImages.join(rounds)
        batch, scores = images.batch, images.scores
        compared = images.complete & self._rows_of_step(images)
        compute_advantages = self._group_advantages if self.critic is None else self._critic_advantages
        with self.policy.meter.phase("advantage"):
            advantage, has_signal, metrics = compute_advantages(images, compared)
        rows, rows_per_group = select_rows(self.args.method.rows, scores.total, batch.group, has_signal)
        is_local = self.processes.owns(batch.group)
        disagreement, share = self._disagreement(scores, compared)
        return Experience(
            batch=batch.take(is_local.nonzero()[:, 0]),
            trajectory=images.trajectory,
            advantage=advantage[is_local],
            rows=local_rows(rows, is_local),
            rows_per_group=rows_per_group,
            groups=batch.group[compared].unique(),
            metrics={**self._metrics(step, images, len(rounds)), **metrics, **share},
            scores=scores.take(is_local),
            disagreement=None if disagreement is None else disagreement[is_local],
            has_signal=bool(advantage[has_signal].any())
            or not compared.any(),  # images that were dropped have a warning of their own
        )

    def _collect_until_signal(self, step: int) -> list[ScoredImages]:
        """Sample rounds of prompts until as many groups as a step needs have reward spread, or no round is left."""
        args = self.args
        # prompts whose images fill the micro-batches of all processes
        unit = self.processes.world_size * math.lcm(args.microbatch, args.images_per_prompt) // args.images_per_prompt
        rounds: list[ScoredImages] = []
        missing, num_prompts = args.prompts_per_step, 0
        for _ in range(1 + args.dynamic_sampling_rounds):
            count = min(args.prompts_per_step, -(-missing // unit) * unit)
            batch = self.prompt_sampler.sample(step, count, args.images_per_prompt, first_group=num_prompts)
            trajectory, scores = self.image_sampler.sample_and_score(batch, self.window(step), step)
            images = ScoredImages(batch, trajectory, scores, args.objective.reward_cap)
            rounds.append(images)
            num_prompts += count
            complete = images.complete.nonzero()[:, 0]  # incomplete groups don't count as zero std
            self.prompt_sampler.observe_signal(step, batch.take(complete), images.has_spread[complete])
            missing -= int(images.has_spread.sum()) // args.images_per_prompt
            if missing <= 0:
                break
        return rounds

    def _rows_of_step(self, images: ScoredImages) -> Tensor:
        """(B,) bool: of all images sampled, as many groups as a step has; those with signal first, incomplete ones last."""
        zero_std, incomplete = ~images.has_spread, ~images.complete
        order = (zero_std.int() + incomplete.int()).sort(stable=True).indices  # 0 spread, 1 zero std, 2 incomplete
        in_step = torch.zeros(len(order), dtype=torch.bool)
        in_step[order[: self.args.prompts_per_step * self.args.images_per_prompt]] = True
        return in_step

    def _group_advantages(self, images: ScoredImages, compared: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
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
            for alike in _of_equal_weights(row_weights, rows):  # rewards of two kinds have no common scale
                self._compare(images, alike, advantage, has_signal)
            if rows.any():
                metrics |= self._contributions(images, rows, prompt_set)
        if self.args.trains_on_zero_std_groups:
            has_signal = compared
        elif self.args.method.rows != "all":  # images are selected of groups in which the sum differs
            has_signal = compared & images.has_spread
        return advantage, has_signal, metrics

    def _by_reward(self, images: ScoredImages, rows: Tensor) -> tuple[PromptBatch, Tensor, Tensor]:
        """Of the rows (B,): their batch, their trained rewards (n, R), and the weights (R,) of these, or (n, R) if prompts name them."""
        batch = images.batch.take(rows.nonzero()[:, 0])
        by_reward = torch.stack([images.scores.by_name[name][rows] for name in self.rewards.trained_weights], 1)
        row_weights = self.rewards.row_weights(batch.metadata_columns())
        if row_weights is not None:  # a reward that does not score a group has no part in its sum
            return batch, by_reward.where(row_weights != 0, 0), row_weights
        return batch, by_reward, torch.tensor([*self.rewards.trained_weights.values()])

    def _contributions(self, images: ScoredImages, rows: Tensor, prompt_set: str) -> dict[str, float]:
        """Metrics of what each reward contributes to the advantages of the rows (B,) of one prompt set."""
        batch, by_reward, weights = self._by_reward(images, rows)
        names = list(self.rewards.trained_weights)
        return advantages.contributions(
            names, by_reward, weights, batch.group, method=self.advantage_method, prompt_set=prompt_set
        )

    def _compare(self, images: ScoredImages, rows: Tensor, advantage: Tensor, has_signal: Tensor) -> None:
        """Write the advantages and the signal of the rows (B,), whose rewards have one scale, in place."""
        objective, (batch, by_reward, weights) = self.args.objective, self._by_reward(images, rows)
        compared_rewards, compared_weights = self._capped(by_reward, weights, batch.group)
        compare = partial(
            advantages.group_advantages, group=batch.group, method=self.advantage_method, weights=compared_weights
        )
        if advantage.ndim == 2:
            means = tree.branch_means(compared_rewards, batch, self.args.sampling.branches, advantage.shape[1])
            advantage[rows] = torch.stack([compare(reward) for reward in means], 1)
        else:
            advantage[rows] = compare(compared_rewards)
        if objective.diversity_weight is not None:
            distance = images.scores.by_name[objective.diversity_weight][rows]
            advantage[rows] = advantages.diversity_weighted(advantage[rows], distance, batch.group)
        by_each = self.args.takes_each_reward or objective.reward_cap is not None
        has_signal[rows] = advantages.has_signal(
            compared_rewards if by_each else images.scores.total[rows], batch.group, self.advantage_method
        )

    def _capped(self, by_reward: Tensor, weights: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
        """The rewards (n, R) that are compared and their weights; capped, each if they are compared one by one, else their sum."""
        cap = self.args.objective.reward_cap
        if cap is None:
            return by_reward, weights
        if self.args.takes_each_reward:
            return advantages.capped(by_reward, group, cap), weights
        return advantages.capped(advantages.weighted_sum(by_reward, weights), group, cap)[:, None], torch.ones(1)

    def _critic_advantages(self, images: ScoredImages, compared: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Advantages (B, K) of each trained step by the critic; all rows `compared` (B,) have signal."""
        assert self.critic is not None
        advantage = torch.zeros(images.trajectory.log_prob_BK.shape)
        if not compared.any():
            return advantage, compared, {}
        text = self.policy.encode(images.batch.prompts).pooled()
        rows = compared.nonzero()[:, 0]
        trajectory, reward = images.trajectory.take(rows), images.scores.total[rows]
        advantage[compared], metrics = self.critic.advantages(trajectory, reward, text[rows])
        return advantage, compared, metrics

    def _disagreement(self, scores: Scores, compared: Tensor) -> tuple[Tensor | None, dict[str, float]]:
        """The factor (B,) of anchors with that gate, 0 outside the rows `compared` (B,); and the share of these that it holds."""
        if self.disagreement_gate is None:
            return None, {}
        factor = torch.zeros(len(compared))
        if not compared.any():
            return factor, {}
        others = [values[compared] for name, values in scores.by_name.items() if self._judges(name)]
        factor[compared] = self.disagreement_gate.weights(scores.total[compared], torch.stack(others, 1))
        return factor, {"disagreement/share": (factor[compared] > 0).float().mean().item()}

    def _judges(self, name: str) -> bool:
        """Whether a reward is not trained on and says how good an image is."""
        return self.rewards.weights[name] == 0 and name != self.args.objective.diversity_weight

    def _metrics(self, step: int, images: ScoredImages, num_rounds: int) -> dict[str, float]:
        metrics = {**reward_metrics(images), "images": float(len(images.batch.prompts))}
        if self.args.dynamic_sampling_rounds:
            metrics["dynamic_sampling/rounds"] = float(num_rounds)
        if self.prompt_sampler.patience:
            metrics["num_prompts_skipped"] = float(self.prompt_sampler.num_skipped(step + 1))
        return metrics


def select_rows(selection: str, reward: Tensor, group: Tensor, has_signal: Tensor) -> tuple[Tensor, int]:
    """The rows that an objective trains on, and how many rows each group of `has_signal` (B,) gives.

    Args:
        selection: "best", the best image of each group; "best_and_worst", the best and the worst image of each group, one after
            the other; "all" images of these groups.
    """
    if selection == "all":
        return has_signal.nonzero()[:, 0], int((group == group[0]).sum())
    rows = []
    for g in group[has_signal].unique().tolist():
        members = (group == g).nonzero()[:, 0]
        best = members[reward[members].argmax()]
        rows += [best] if selection == "best" else [best, members[reward[members].argmin()]]
    selected = torch.stack(rows) if rows else torch.zeros(0, dtype=torch.long)
    return selected, 1 if selection == "best" else 2


def _of_equal_weights(row_weights: Tensor | None, rows: Tensor) -> list[Tensor]:
    """`rows` (B,) bool in parts whose prompts weigh the rewards equally; row_weights is (B, R), or None if all prompts do."""
    if row_weights is None:
        return [rows] if rows.any() else []
    return [rows & (row_weights == weights).all(1) for weights in row_weights[rows].unique(dim=0)]


def local_rows(rows: Tensor, is_local: Tensor) -> Tensor:
    """Of `rows` those of this process, as places among its own rows; is_local is (B,) bool."""
    place = is_local.cumsum(0) - 1
    return place[rows[is_local[rows]]]


def complete_groups(reward: Tensor, group: Tensor) -> Tensor:
    """(B,) bool: the rows of groups in which every reward is a number. A dropped reward drops its group."""
    incomplete = group[~torch.isfinite(reward)].unique()
    return ~torch.isin(group, incomplete)


def has_reward_spread(reward: Tensor, group: Tensor, cap: float | None) -> Tensor:
    """(B,) bool: the rows of complete groups whose trained rewards differ, once they are capped at the quantile `cap`."""
    known = reward.nan_to_num()
    if cap is not None:
        known = advantages.capped(known, group, cap)
    return complete_groups(reward, group) & advantages.has_signal(known, group)


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
        metrics |= {
            name: mean for name, mean in means.items() if not (sets and math.isnan(mean))
        }  # of a set that was not drawn
    return metrics
