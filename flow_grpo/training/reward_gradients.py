"""Gradients of rewards at the end of a rollout: where they are taken, how they are weighed, which images they move, and the loss."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from flow_grpo import sampling, sde
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.reward_gradient_objectives import Mend, Opsd, RewardGradient, TrainedState
from flow_grpo.data.prompts import rows_by_set
from flow_grpo.distributed.processes import Processes
from flow_grpo.policy.encoding import Conditioning
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards import WeightedSum
from flow_grpo.training.anchors import Prediction, References
from flow_grpo.training.group_advantages import Comparer, Comparison, GroupAdvantages, reward_metrics
from flow_grpo.training.losses import BatchLoss
from flow_grpo.types import (
    Experience,
    GradientState,
    GradientStates,
    ImageMoves,
    Loss,
    PromptBatch,
    Scores,
    Trajectory,
    broadcast_rows,
    weighted_gradients,
)

DECAY = 0.9  # of the running mean square of a reward's gradient


class EndpointGradient(NamedTuple):
    """The gradient of one reward at an endpoint.

    Attributes:
        gradient: of the latents, (B, ...).
        fall: (B,) on the CPU, by which the reward falls on a short step against its gradient; NaN if that was not measured.
        images: the decoded endpoint, on the CPU.
    """

    gradient: Tensor
    fall: Tensor
    images: Tensor


class EndpointGradients:
    """Finds the states of a rollout that are trained, and the gradients of the rewards at the endpoints."""

    def __init__(self, policy: Policy, args: FlowGRPOConfig, objective: RewardGradient, rewards: WeightedSum) -> None:
        self.policy, self.args, self.objective, self.rewards = policy, args, objective, rewards

    def __call__(
        self,
        trajectory: Trajectory,
        states: list[TrainedState],
        visited: dict[int, tuple[Tensor, Tensor]],
        batch: PromptBatch,
        *,
        step: int,
        microbatch: int,
    ) -> tuple[GradientStates, Tensor]:
        """The trained states of a batch with the gradients of all rewards, and the images (B, 3, H, W) of its final latents.

        Args:
            visited: states (B, ...) before steps of the schedule, and the velocities (B, ...) there.
        """
        sigmas, final = trajectory.schedule.sigmas.tolist(), trajectory.final
        visits = [
            visited[state.step]
            if state.copy_number is None
            else self._noised_copy(trajectory, state, batch, step, microbatch)
            for state in states
        ]
        ends = [
            sde.predict_x0(x, v, sigmas[state.step]) if state.predicted else final
            for state, (x, v) in zip(states, visits, strict=True)
        ]
        endpoints = list({id(end): end for end in ends}.values())  # the final latents once, however many states lead to them
        position = {id(end): i for i, end in enumerate(endpoints)}
        gradient, fall, images = {}, {}, None
        for name in self.rewards.trained_weights:
            found = [self._gradient(name, end, batch, microbatch) for end in endpoints]
            gradient[name] = torch.stack([one.gradient for one in found], 1)
            fall[name] = torch.stack([one.fall for one in found], 1)
            images = found[position[id(final)]].images if id(final) in position else None
        gradient_states = GradientStates(
            x=torch.stack([x for x, _ in visits], 1),
            steps=[state.step for state in states],
            factor=[state.factor for state in states],
            endpoint=[position[id(end)] for end in ends],
            gradient=gradient,
            fall=fall,
        )
        return gradient_states, self.policy.decode(final, microbatch) if images is None else images

    def _noised_copy(
        self, trajectory: Trajectory, state: TrainedState, batch: PromptBatch, step: int, microbatch: int
    ) -> tuple[Tensor, Tensor]:
        """The final latents noised to the sigma of the state's step, and the velocity there."""
        assert state.copy_number is not None
        final, sigma = trajectory.final, trajectory.schedule.sigmas[state.step].item()
        eps = sampling.batch_noise(final.shape[1:], batch, self.args.seed, "copy", step, state.copy_number)
        x = (1 - sigma) * final + sigma * eps.to(final.device)
        model = self.policy.with_guidance(self.args.sampling.guidance)
        conditioning = model.encode(batch.prompts)
        with torch.no_grad(), self.policy.lora.use(self.objective.sampling_adapter):
            parts = [
                model.velocity(x[rows], trajectory.schedule.timesteps[state.step], conditioning, rows)
                for rows in torch.arange(len(x)).split(microbatch)
            ]
        return x, torch.cat(parts)

    def _gradient(self, name: str, latents: Tensor, batch: PromptBatch, microbatch: int) -> EndpointGradient:
        """Of one reward at an endpoint: its gradient (B, ...), its fall (B,) against it, and the decoded images; the last two on the CPU.

        Where a prompt does not name the reward, the gradient is 0 and the fall NaN.
        """
        fall, decoded = torch.full((len(latents),), torch.nan), list[Tensor]()
        reward, rho = self.rewards.subset([name]), self.objective.smoothing
        is_named = weights_of_rows(self.rewards, batch)[name] != 0

        def image_gradient(images: Tensor, rows: Tensor) -> Tensor:
            decoded.append(images.float().cpu())
            gradient, named = torch.zeros_like(images), is_named[rows].nonzero()[:, 0]
            if len(named):
                part = batch.take(rows[named])
                found = reward.gradients(images[named.to(images.device)], part.prompts, rho, **part.columns())[name]
                gradient[named.to(images.device)] = found.gradient.to(gradient)
                if found.fall is not None:
                    fall[rows[named]] = found.fall
            return gradient

        slice_size = 1 if self.args.memory.vae_slicing else microbatch
        with self.policy.meter.timed("reward"):
            gradient = self.policy.decode_vjp(latents, image_gradient, slice_size)
        return EndpointGradient(gradient, fall, torch.cat(decoded))

    def weighted(self, latents: Tensor, batch: PromptBatch, microbatch: int) -> Tensor:
        """The gradient (B, ...) of the weighted sum of the rewards at latents of a batch."""
        weights = weights_of_rows(self.rewards, batch)
        return weighted_gradients(
            {name: self._gradient(name, latents, batch, microbatch).gradient.float() for name in weights}, weights
        )


@dataclass(frozen=True)
class Endpoint:
    """The end of a batch's rollout: its images and their rewards, and those of other latents.

    Attributes:
        final: latents (B, ...) of the images.
        v: velocities (B, ...) of the rollout at the trained state.
        reward: of the images, (B,) on the CPU.
        rewards_of: latents (n, ...) of some rows (n,) of the batch -> their rewards (n,).
        gradient_at: latents (B, ...) -> the gradient of their weighted rewards.
    """

    batch: PromptBatch
    final: Tensor
    v: Tensor
    reward: Tensor
    rewards_of: Callable[[Tensor, Tensor], Tensor]
    gradient_at: Callable[[Tensor], Tensor]


def weights_of_rows(rewards: WeightedSum, batch: PromptBatch) -> dict[str, Tensor]:
    """The weight (B,) of each trained reward for each image, 0 where the prompt's set does not name it."""
    of_rows = rewards.row_weights(batch.metadata_columns())
    if of_rows is None:
        return {name: torch.full((len(batch.prompts),), weight) for name, weight in rewards.trained_weights.items()}
    return dict(zip(rewards.trained_weights, of_rows.unbind(1), strict=True))


class GradientWeights(Comparer):
    """Weighs the rewards' gradients, each by its running rms, so that neither the reward's unit nor the latents' scale matters.

    Attributes:
        mean_square: the running mean square of a reward's gradient, by the reward's name.
    """

    def __init__(self, groups: GroupAdvantages, processes: Processes) -> None:
        self.groups, self.processes = groups, processes
        self.mean_square: dict[str, float] = {}

    def __call__(self, batch: PromptBatch, trajectory: Trajectory, scores: Scores) -> Comparison:
        """The comparison of a step's images, without advantages, with the weight of each local gradient."""
        scored, informative = self.groups.row_masks(batch, scores)
        metrics = reward_metrics(batch, scores, informative)
        is_local = self.processes.owns(batch.group, self.groups.args.updates)
        local = batch.take(is_local.nonzero()[:, 0])
        weights, states = weights_of_rows(self.groups.rewards, local), trajectory.gradient_states
        assert states is not None
        is_scored = scored[is_local]
        for name, gradient in states.gradient.items():
            rows = is_scored & (weights[name] != 0)
            squares, fall = gradient.float().square().flatten(1).mean(1).cpu().double()[rows], states.fall[name][rows]
            square, count = squares.sum().item(), len(squares)
            sums = self.processes.all_gather((square, count, fall.nansum().item(), fall.isfinite().sum().item()))
            square, count, falls, num_falls = (sum(part) for part in zip(*sums, strict=True))
            if count:
                current = square / count
                previous = self.mean_square.get(name, current)
                self.mean_square[name] = DECAY * previous + (1 - DECAY) * current
                metrics[f"reward_gradient/{name}/rms"] = current**0.5
            if num_falls:
                metrics[f"reward_gradient/{name}/S1"] = falls / num_falls
            weights[name] = weights[name] / max(self.mean_square.get(name, 0.0) ** 0.5, 1e-12)
        zeros = torch.zeros(len(scored))
        return Comparison(zeros, scored, scored, metrics, gradient_weights=weights)

    def state_dict(self) -> dict[str, float]:
        """The running mean squares, for a checkpoint."""
        return dict(self.mean_square)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.mean_square = dict(state)


class ImageMover(Protocol):
    """Moves the images of a rollout by the gradient of their rewards."""

    def moves(self, states: GradientStates, end: Endpoint) -> ImageMoves:
        """The velocities at the trained states that lead to the moved images."""


class MendMover(Comparer):
    """Moves images along the gradient of their reward, as `mend` does, and weighs moved and kept ones.

    Attributes:
        ceilings: upper limit of the reward that a move can gain, by prompt set: a moving average of the median of a step's rewards that
            never falls. In the first step of a set, only the quantile of each group limits it. The paper does not say whether a
            step's own median counts already; here it does not.
        tau: how long a move may be for what it gains, in standard deviations of the group's rewards: a choice of ours, since the paper's
            range of tau is one of its reward's unit.
    """

    CEILING_RATE = 0.1
    TAU_RANGE, TAU_FACTOR = (1e-3, 10.0), 1.5
    MOVED_RANGE = (0.3, 0.6)  # of the tried images

    def __init__(self, objective: Mend, groups: GroupAdvantages, processes: Processes) -> None:
        self.objective, self.groups, self.processes = objective, groups, processes
        self.ceilings: dict[str, float] = {}
        self.tau = 0.1

    def moves(self, states: GradientStates, end: Endpoint) -> ImageMoves:
        """The targets of the velocities at the trained states."""
        batch, reward = end.batch, end.reward
        groups = [reward[batch.group == group] for group in batch.group]
        cap = torch.stack([of_group.quantile(self.objective.REWARD_QUANTILE) for of_group in groups])
        unit = torch.stack([of_group.std(correction=0) for of_group in groups]).clamp_min(1e-6)
        for prompt_set, rows in _rows_of_sets(batch).items():
            cap[rows] = cap[rows].clamp_min(self.ceilings.get(prompt_set, -math.inf))
        gradient = states.weighted(weights_of_rows(self.groups.rewards, batch))[:, 0].float()
        direction = gradient / (broadcast_rows(gradient.square().flatten(1).mean(1).sqrt(), gradient) + 1e-12)
        tried = (reward < cap) & gradient.flatten(1).any(1).cpu()
        rows = tried.nonzero()[:, 0]
        best, length = torch.zeros_like(reward), torch.zeros_like(reward)
        for move in self.objective.MOVES if len(rows) else ():
            moved = end.rewards_of(end.final[rows] + move * direction[rows], rows)
            gain = (torch.minimum(moved, cap[rows]) - reward[rows]) / unit[rows] - move**2 / (2 * self.tau)
            better = gain > best[rows]  # False for NaN
            best[rows[better]], length[rows[better]] = gain[better], move
        shift = broadcast_rows(length, end.v).to(end.v) * direction.to(end.v)
        return ImageMoves(end.v + shift / states.factor[0], tried, length > 0)

    def __call__(self, batch: PromptBatch, trajectory: Trajectory, scores: Scores) -> Comparison:
        """The comparison of a step's images, whose advantages are the weights of moved and kept ones; adapts ceiling and tau."""
        scored, informative = self.groups.row_masks(batch, scores)
        assert trajectory.gradient_states is not None
        moves = trajectory.gradient_states.moves
        assert moves is not None
        is_local = self.processes.owns(batch.group, self.groups.args.updates)
        parts = self.processes.all_gather((is_local.nonzero()[:, 0], moves.tried, moves.moved))
        tried, moved = torch.zeros_like(scored), torch.zeros_like(scored)
        for rows, was_tried, was_moved in parts:
            tried[rows], moved[rows] = was_tried, was_moved
        weight = torch.zeros(len(scored))
        # so weighted, the mean over all images is the sum of the means over moved and over kept ones
        for kind, factor in ((scored & moved, 1.0), (scored & ~moved, self.objective.KEPT_WEIGHT)):
            weight[kind] = factor * scored.sum() / kind.sum().clamp_min(1)
        share = (moved & scored).sum().item() / max((tried & scored).sum().item(), 1)
        metrics = reward_metrics(batch, scores, informative) | {"mend/frac_moved": share, "mend/tau": self.tau}
        if (tried & scored).any() and not self.MOVED_RANGE[0] <= share <= self.MOVED_RANGE[1]:
            tau = self.tau * self.TAU_FACTOR if share < self.MOVED_RANGE[0] else self.tau / self.TAU_FACTOR
            self.tau = min(max(tau, self.TAU_RANGE[0]), self.TAU_RANGE[1])
        for prompt_set, rows in _rows_of_sets(batch).items():
            if (rows & scored).any():
                median = scores.total[rows & scored].median().item()
                previous = self.ceilings.get(prompt_set, median)
                self.ceilings[prompt_set] = max(previous, previous + self.CEILING_RATE * (median - previous))
                metrics["mend/reward_ceiling" + (prompt_set and f"/{prompt_set}")] = self.ceilings[prompt_set]
        return Comparison(weight, scored, scored, metrics)

    def state_dict(self) -> dict[str, Any]:
        """The values that steps change, for a checkpoint."""
        return {"ceilings": dict(self.ceilings), "tau": self.tau}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.ceilings, self.tau = dict(state["ceilings"]), state["tau"]


def _rows_of_sets(batch: PromptBatch) -> dict[str, Tensor]:
    """The rows (B,) bool of each prompt set, which may have rewards of its own; those of a single one by the name ""."""
    return rows_by_set(batch.metadata) or {"": torch.ones(len(batch.prompts), dtype=torch.bool)}


class OpsdMover:
    """Moves the images that a state predicts along and against the gradient of their rewards, as `opsd` does.

    The paper projects the moved image to the ball of the budget's radius; steps whose lengths add up to the budget never leave it.
    """

    def __init__(self, objective: Opsd, groups: GroupAdvantages) -> None:
        self.objective, self.groups = objective, groups

    def moves(self, states: GradientStates, end: Endpoint) -> ImageMoves:
        """The velocities that lead to the moved images; an image whose gradient is 0 stays."""
        sigma, z = -states.factor[0], states.x[:, 0]
        image = sde.predict_x0(z, end.v, sigma).float()
        first = states.weighted(weights_of_rows(self.groups.rewards, end.batch))[:, 0].float()
        step = self.objective.BUDGET / self.objective.MOVES * _norm(image)
        targets = []
        for sign in (1, -1):
            moved = image + sign * step * _unit(first)
            for _ in range(self.objective.MOVES - 1):
                moved = moved + sign * step * _unit(end.gradient_at(moved.to(z)))
            targets.append(((z - moved) / sigma).to(z))
        moves = first.flatten(1).any(1).cpu()
        return ImageMoves(targets[0], moves, moves, away=targets[1], v_old=end.v)


def _norm(latents: Tensor) -> Tensor:
    """The norm of each of latents (B, ...), broadcastable to them."""
    return broadcast_rows(latents.flatten(1).norm(dim=1), latents)


def _unit(gradient: Tensor) -> Tensor:
    return gradient.float() / _norm(gradient.float()).clamp_min(1e-12)


class RewardGradientLoss(BatchLoss):
    """The loss of an objective by reward gradients, which repeats states of a rollout: one `Loss` per trained state."""

    def __init__(
        self, experience: Experience, conditioning: Conditioning, references: References, *, objective: RewardGradient
    ) -> None:
        super().__init__(experience, conditioning, references)
        assert self.trajectory.gradient_states is not None
        self.objective, self.states = objective, self.trajectory.gradient_states
        self.gradient = experience.reward_gradient
        self.count = len(self.states.steps)

    def losses(self, rows: Int[Tensor, " n"], is_real: Bool[Tensor, " n"]) -> Iterator[Loss]:
        """As in `BatchLoss`."""
        for k, (i, factor, endpoint) in enumerate(
            zip(self.states.steps, self.states.factor, self.states.endpoint, strict=True)
        ):
            gradient = None if self.gradient is None else self._on_device(self.gradient[:, endpoint], rows)
            moves = self.states.moves
            of_moves = {} if moves is None else {"target": moves.target, "away": moves.away, "v_old": moves.v_old}
            targets = {name: self._on_device(values, rows) for name, values in of_moves.items() if values is not None}
            x = self._on_device(self.states.x[:, k], rows)
            velocity = functools.partial(self._velocity, x, i, rows)
            current = velocity(self.policy, self.conditioning)
            loss = self.objective.loss(
                GradientState(current.v, gradient, factor, **targets), self._on_device(self.advantage, rows)
            )
            yield self.anchors.with_kl(loss, current, self.anchors.evaluate(velocity), rows)

    def _velocity(self, x: Tensor, i: int, rows: Tensor, model: FlowPipeline, conditioning: Conditioning) -> Prediction:
        return Prediction(model.velocity(x, self.trajectory.schedule.timesteps[i], conditioning, rows))
