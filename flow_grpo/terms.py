"""What one update minimises, term by term: the policy run again on a rollout's rows, and an objective of what it says.

`StepTerms` replays the trained transitions, `FinalTerms` noises the final latents afresh. Both hand out one `Loss` for each
of their `count` terms; the trainer weighs the rows, runs backward and forgets the graph before it asks for the next. `Means`
collects what the losses report.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from flow_grpo import objectives, sampling, sde
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.policy import Conditioning, Policy
from flow_grpo.types import Loss, PromptBatch, Trajectory


class StepTerms:
    """The terms of objectives on per-step log-probabilities: one per trained step."""

    def __init__(
        self,
        policy: Policy,
        args: FlowGRPOConfig,
        conditioning: Conditioning,
        trajectory: Trajectory,
        advantage: Tensor,
    ) -> None:
        self.policy, self.o, self.s = policy, args.objective, args.sampling
        self.velocity = policy.along(trajectory.schedule, conditioning)
        self.trajectory, self.advantage = trajectory, advantage
        self.count = len(trajectory.steps)

    def losses(self, rows: Tensor) -> Iterator[Loss]:
        """One loss per trained step, its values those of `rows` (n,)."""
        o = self.o
        for k in range(self.count):
            mean, std = self._distribution(k, rows)
            log_prob = sde.LOG_PROBS[self.s.log_prob](self.trajectory.x_next[rows, k], mean, std)
            loss = objectives.grpo(
                log_prob, self.trajectory.log_prob_BK[rows, k], self.advantage[rows], o.clip_low, o.clip_high
            )
            if o.kl_weight:
                with torch.no_grad(), self.policy.reference():
                    mean_ref, _ = self._distribution(k, rows)
                loss = _with_kl(loss, sde.kl(mean, mean_ref, std), o.kl_weight)
            yield loss

    def _distribution(self, k: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        _, mean, std = sampling.replay(self.velocity, self.trajectory, k, rows, self.s.transition, self.s.noise_level)
        return mean, std


class FinalTerms:
    """The terms of forward-process objectives: one per noise level, which a group shares with its noise."""

    def __init__(
        self,
        policy: Policy,
        args: FlowGRPOConfig,
        conditioning: Conditioning,
        trajectory: Trajectory,
        advantage: Tensor,
        batch: PromptBatch,
        step: int,
    ) -> None:
        self.policy, self.o, self.advantage = policy, args.objective, advantage
        self.conditioning, self.x0 = conditioning, trajectory.final
        self.count = self.o.draws
        self.draws = [self._draw(trajectory, batch, args.seed, step, draw) for draw in range(self.count)]
        off_policy = self.o.name == "awm" and args.updates > 1
        self.old_log_prob = self._before_updates(args.microbatch) if off_policy else None

    def losses(self, rows: Tensor) -> Iterator[Loss]:
        """One loss per noise level, its values those of `rows` (n,)."""
        o = self.o
        for draw, (eps, timestep, sigma) in enumerate(self.draws):
            x0, eps, timestep, sigma = self.x0[rows], eps[rows], timestep[rows], sigma[rows]
            advantage, x = self.advantage[rows], _noised(x0, eps, sigma)
            v = self._velocity(x, timestep, rows)
            if o.name == "awm":
                log_prob = objectives.awm_log_prob(v, eps - x0, sigma, o.weight)
                old = log_prob.detach() if self.old_log_prob is None else self.old_log_prob[draw][rows]
                loss = objectives.awm(log_prob, old, advantage, o.clip_low, o.clip_high)
            else:
                with torch.no_grad(), self.policy.using("old"):
                    v_old = self._velocity(x, timestep, rows)
                loss = objectives.nft(v, v_old, x, x0, sigma, advantage, o.beta, o.advantage_max)
            if o.kl_weight:
                with torch.no_grad(), self.policy.reference():
                    v_ref = self._velocity(x, timestep, rows)
                loss = _with_kl(loss, objectives.velocity_kl(v, v_ref), o.kl_weight)
            yield loss

    def _draw(self, trajectory: Trajectory, batch: PromptBatch, seed: int, step: int, draw: int) -> tuple[Tensor, ...]:
        """Noise (B, ...), timestep (B,) and sigma (B,) of a term: sigma at a uniform place of the schedule's range."""
        eps = sampling.batch_noise(trajectory.final.shape[1:], batch, seed, "eps", step, draw, shared=True)
        low, high = self.o.sigma_range
        normal = sampling.batch_noise((1,), batch, seed, "sigma", step, draw, shared=True)[:, 0]
        u = low + (high - low) * torch.special.ndtr(normal)  # uniform in the range
        return eps, *trajectory.schedule.at((1 - u) * len(trajectory.schedule))

    def _velocity(self, x: Tensor, timestep: Tensor, rows: Tensor) -> Tensor:
        return self.policy.velocity(x, timestep, self.conditioning, rows).cpu()

    @torch.no_grad()
    def _before_updates(self, microbatch: int) -> list[Tensor]:
        """The log-probabilities (B,) of each term under the policy that drew the images."""
        found = []
        for eps, timestep, sigma in self.draws:
            x = _noised(self.x0, eps, sigma)
            v = torch.cat([self._velocity(x[c], timestep[c], c) for c in torch.arange(len(x)).split(microbatch)])
            found.append(objectives.awm_log_prob(v, eps - self.x0, sigma, self.o.weight))
        return found


class Means:
    """Weighted means and largest values of what losses report."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.sums: dict[str, float] = {}
        self.largest: dict[str, float] = {}
        self.weight = 0.0
        self.numbers: dict[str, float] = {}

    def add(self, loss: Loss, weight: Tensor) -> None:
        self.loss += (loss.value.detach() * weight).sum().item()
        self.weight += weight.sum().item()
        for name, values in loss.metrics.items():
            self.sums[name] = self.sums.get(name, 0.0) + (values * weight).sum().item()
            largest = values[weight > 0].max()
            self.largest[name] = torch.maximum(largest, largest.new_tensor(self.largest.get(name, 0.0))).item()  # NaN stays

    def metrics(self) -> dict[str, float]:
        means = {name: total / self.weight for name, total in self.sums.items() if not name.endswith("max_deviation")}
        largest = {name: value for name, value in self.largest.items() if name.endswith("max_deviation")}
        return {**means, **largest, **self.numbers}


def _with_kl(loss: Loss, kl: Tensor, weight: float) -> Loss:
    return Loss(loss.value + weight * kl, {**loss.metrics, "kl": kl.detach()})


def _noised(x0: Tensor, eps: Tensor, sigma: Tensor) -> Tensor:
    sigma = sigma.reshape((-1,) + (1,) * (x0.ndim - 1))
    return (1 - sigma) * x0 + sigma * eps
