"""What a training step learns from: prompts, their images, rewards and advantages.

`RolloutSource` samples images; `flow_grpo.training.offline` takes given ones. Both `collect(step)` an `Experience`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import PromptSampler
from flow_grpo.distributed.processes import Processes
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards import WeightedSum
from flow_grpo.training.critic import Critic
from flow_grpo.training.group_advantages import GroupAdvantages
from flow_grpo.training.image_sampler import ImageSampler
from flow_grpo.training.scored_images import ScoredImages, reward_metrics
from flow_grpo.types import Experience


class RolloutSource:
    """Samples, scores and compares the images of training steps.

    Args:
        critic: gives the advantages in place of the group, for ppo.
        window: returns the trained sampling steps of a training step.
        processes: as of `ImageSampler`.
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
        processes: Processes | None = None,
    ) -> None:
        self.policy, self.args, self.prompt_sampler, self.rewards = policy, args, prompt_sampler, rewards
        self.window, self.critic, self.processes = window, critic, processes or Processes()
        self.image_sampler = ImageSampler(policy, args, rewards, self.processes)
        self.group_advantages = GroupAdvantages(args, rewards)

    def collect(self, step: int) -> Experience:
        """Sample a group of images for each prompt, score them, and compare them within their groups."""
        rounds = self._collect_until_signal(step)
        images = ScoredImages.join(rounds)
        batch, scores = images.batch, images.scores
        compared = images.complete & self._rows_of_step(images)
        compute_advantages = self.group_advantages if self.critic is None else self._critic_advantages
        with self.policy.meter.phase("advantage"):
            advantage, has_loss, metrics = compute_advantages(images, compared)
        rows, rows_per_group = select_rows(self.args.objective.needs.rows, scores.total, batch.group, has_loss)
        is_local = self.processes.owns(batch.group)
        return Experience(
            batch=batch.take(is_local.nonzero()[:, 0]),
            trajectory=images.trajectory,
            advantage=advantage[is_local],
            rows=local_rows(rows, is_local),
            rows_per_group=rows_per_group,
            groups=batch.group[compared].unique(),
            metrics={**self._metrics(step, images, len(rounds)), **metrics},
            scores=scores.take(is_local),
            # images that were dropped have a warning of their own
            has_advantage=bool(advantage[has_loss].any()) or not compared.any(),
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
            compared_rewards, _ = self.group_advantages.compared_rewards(batch, scores.by_name)
            images = ScoredImages(batch, trajectory, scores, compared_rewards)
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

    def _critic_advantages(self, images: ScoredImages, compared: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Advantages (B, K) of each trained step by the critic; all rows `compared` (B,) get a loss."""
        assert self.critic is not None
        advantage = torch.zeros(images.trajectory.log_prob.shape)
        if not compared.any():
            return advantage, compared, {}
        text = self.policy.encode(images.batch.prompts).pooled()
        rows = compared.nonzero()[:, 0]
        trajectory, reward = images.trajectory.take(rows), images.scores.total[rows]
        advantage[compared], metrics = self.critic.advantages(trajectory, reward, text[rows])
        return advantage, compared, metrics

    def _metrics(self, step: int, images: ScoredImages, num_rounds: int) -> dict[str, float]:
        metrics = {**reward_metrics(images), "images": float(len(images.batch.prompts))}
        if self.args.dynamic_sampling_rounds:
            metrics["dynamic_sampling/rounds"] = float(num_rounds)
        if self.prompt_sampler.patience:
            metrics["num_prompts_skipped"] = float(self.prompt_sampler.num_skipped(step + 1))
        return metrics


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


def local_rows(rows: Tensor, is_local: Tensor) -> Tensor:
    """Rows of this process, as indices into its own batch; is_local is (B,) bool."""
    local_index = is_local.cumsum(0) - 1
    return local_index[rows[is_local[rows]]]
