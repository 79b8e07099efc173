"""PPO's critic on latents, and generalised advantage estimation. Group-relative advantages need neither."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from flow_grpo.advantages import CLAMP, EPS
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.policy import Policy
from flow_grpo.training.group_advantages import Comparer, Comparison, GroupAdvantages, reward_metrics
from flow_grpo.types import PromptBatch, Scores, Trajectory

NUM_EPOCHS = 4  # passes of the critic over a rollout
LR = 1e-3  # of the critic's AdamW
WIDTH = 128  # channels of its layers
GAE_LAMBDA = 0.95  # 1 uses the reward only, 0 the next value only


def gae(values: Tensor, reward: Tensor, gae_lambda: float) -> Tensor:
    """Generalised advantage estimation, arXiv 1506.02438, without discount and with the reward (B,) after the last step.

    values (B, K) are the critic's, of the states before the K steps. Returns the advantages (B, K); advantages plus values are
    the critic's targets.
    """
    next_values = torch.cat([values[:, 1:], reward[:, None]], 1)
    td_error = next_values - values
    advantage, last_gae = torch.empty_like(values), torch.zeros_like(reward)
    for k in reversed(range(values.shape[1])):
        last_gae = td_error[:, k] + gae_lambda * last_gae
        advantage[:, k] = last_gae
    return advantage


class Critic(nn.Module):
    """The expected reward of a state, of its sigma (n,), and of the prompt's mean embedding.

    States are latents (n, C, H, W), those of videos (n, C, F, H, W), or packed ones (n, L, C).

    Args:
        state_shape: of one state.
        text_channels: of the prompt's mean embedding.
    """

    def __init__(self, state_shape: torch.Size, text_channels: int, seed: int) -> None:
        super().__init__()
        is_packed = len(state_shape) == 2
        tokens = state_shape[0] if is_packed else math.prod(state_shape[1:])
        channels = state_shape[1] if is_packed else state_shape[0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Linear(channels, WIDTH)
            self.place = nn.Parameter(0.02 * torch.randn(tokens, WIDTH))
            self.read = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            self.condition = nn.Linear(text_channels + 2, WIDTH)
            self.value = nn.Sequential(nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=LR)

    def forward(self, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        """Values (n,)."""
        x = x.to(self.place.device)
        tokens = x if x.ndim == 3 else x.flatten(2).transpose(1, 2)
        image = self.read(self.embed(tokens) + self.place).mean(1)
        condition = self.condition(torch.cat([text, sigma[:, None], 1 - sigma[:, None]], 1))
        return self.value(torch.cat([image, condition], 1))[:, 0]

    @torch.no_grad()
    def values(self, trajectory: Trajectory, text: Tensor) -> Tensor:
        """(B, K), of the states before the trained steps."""
        sigmas = trajectory.schedule.sigmas[trajectory.steps]
        columns = [self(trajectory.x[:, k], sigma.expand(len(text)), text) for k, sigma in enumerate(sigmas)]
        return torch.stack(columns, 1)

    def advantages(self, trajectory: Trajectory, reward: Tensor, text: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Normalised advantages (B, K), clamped to +-5, by the critic before this step; then train it on this rollout."""
        values = self.values(trajectory, text)
        advantage = gae(values, reward, GAE_LAMBDA)
        target = advantage + values
        losses = [self._learn(trajectory, text, target) for _ in range(NUM_EPOCHS)]
        unexplained = (target - values).var() / target.var().clamp_min(1e-12)
        metrics = {"critic/loss": losses[0], "critic/explained_variance": 1 - unexplained.item()}
        normalised = (advantage - advantage.mean()) / (advantage.std(correction=0) + EPS)
        return normalised.clamp(-CLAMP, CLAMP), metrics

    def _learn(self, trajectory: Trajectory, text: Tensor, target: Tensor) -> float:
        """Run one AdamW step for each trained step; returns the mean squared error."""
        errors = []
        for k, sigma in enumerate(trajectory.schedule.sigmas[trajectory.steps]):
            loss = (self(trajectory.x[:, k], sigma.expand(len(text)), text) - target[:, k]).square().mean()
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            errors.append(loss.item())
        return sum(errors) / len(errors)


class CriticAdvantages(Comparer):
    """Gives the advantages of `ppo` in place of the group. It runs on one process."""

    def __init__(self, policy: Policy, critic: Critic, groups: GroupAdvantages) -> None:
        self.policy, self.critic, self.groups = policy, critic, groups

    def __call__(self, batch: PromptBatch, trajectory: Trajectory, scores: Scores) -> Comparison:
        """Advantages (B, K) of each trained step; all scored rows get a loss. Then the critic learns from this rollout."""
        scored, informative = self.groups.row_masks(batch, scores)
        advantage, metrics = torch.zeros(trajectory.log_prob.shape), reward_metrics(batch, scores, informative)
        if scored.any():
            rows = scored.nonzero()[:, 0]
            text = self.policy.encode(batch.prompts).pooled()[rows]
            advantage[scored], own = self.critic.advantages(trajectory.take(rows), scores.total[rows], text)
            metrics |= own
        return Comparison(advantage, scored, scored, metrics)

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer of the critic, as copies that later steps do not change."""
        return copy.deepcopy({"weights": self.critic.state_dict(), "optimizer": self.critic.optimizer.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. FlowGRPOError if it is of a critic of another shape."""
        try:
            self.critic.load_state_dict(state["weights"])
        except RuntimeError as error:
            raise FlowGRPOError("the checkpoint's critic has another shape than the config asks for") from error
        self.critic.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # it keeps the tensors that it is given
