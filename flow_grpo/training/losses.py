"""The losses of a training step: on sampling steps (`StepLoss`), on final latents noised afresh (`ForwardProcessLoss`), and by the gradient
of rewards (`RewardGradientLoss`).
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.config.objective import OLD_ADAPTER, ForwardProcess, Objective, OwnFunction, RewardGradient, Stepwise
from flow_grpo.distributed.processes import Processes
from flow_grpo.policy.encoding import Conditioning
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.policy.policy import Policy
from flow_grpo.training.anchors import Anchors, Prediction
from flow_grpo.training.own_functions import own_loss
from flow_grpo.types import (
    RATIO_DEVIATION,
    Experience,
    GradientState,
    Loss,
    NoisedImage,
    PromptBatch,
    ReplayedTransition,
    Schedule,
    TrainedStep,
    take_rows,
)


class BatchLoss:
    """The loss of an objective on the images of a training step: what `PolicyUpdate` calls for each chunk of rows.

    Attributes:
        count: the losses of a row, of which the update takes the mean: one for each trained step, noise level or state.
        fixed_positions: whether rows must keep the chunk and position that they had in the rollout, since the loss compares with numbers
            that were computed there, and a kernel's last bits may depend on the position.
    """

    count: int
    fixed_positions = False

    def __init__(self, policy: Policy, experience: Experience, conditioning: Conditioning, objective: Objective) -> None:
        self.policy, self.conditioning = policy, conditioning
        self.trajectory, self.advantage = experience.trajectory, experience.advantage
        self.anchors = Anchors(policy, experience, conditioning, objective)

    def before_update(self, chunks: list[tuple[Tensor, Tensor]]) -> None:
        """Compute what the losses need of all rows of an optimizer step; most need nothing. Called before their losses are asked for.

        Args:
            chunks: the rows (n,) and weights (n,) of each chunk; rows that only fill it up weigh 0. Each group lies within them.
        """

    def losses(self, rows: Int[Tensor, " n"], is_real: Bool[Tensor, " n"]) -> Iterator[Loss]:
        """Yield the `count` losses of `rows`.

        The update weighs the rows and runs backward on each loss before it takes the next one, so only one graph is in memory.

        Args:
            is_real: false for rows that only fill up the chunk.
        """
        raise NotImplementedError

    def _on_device(self, values: Float[Tensor, "B ..."], rows: Int[Tensor, " n"]) -> Float[Tensor, "n ..."]:
        return take_rows(values, rows, self.policy.device)


class ClipRange:
    """Clip ranges calibrated from observed ratios, one for each step of the schedule.

    A range is the moving average of a quantile of |ratio - 1|. A step without observed ratios is not clipped.
    """

    DECAY = 0.9
    QUANTILE = 0.9

    def __init__(self) -> None:
        self.state: dict[int, float] = {}
        self._seen: dict[int, list[Tensor]] = {}

    def range_at(self, step: int) -> float:
        """The clip range at a step of the schedule; infinite before any ratio was seen."""
        return self.state.get(step, math.inf)

    def observe(self, step: int, deviation: Float[Tensor, " n"]) -> None:
        """Record |ratio - 1| of an update's rows; NaN is left out."""
        self._seen.setdefault(step, []).append(deviation)

    def update(self, processes: Processes) -> None:
        """Update the ranges from what all processes observed. Ratios of exactly 1 (before the first update) are ignored."""
        deviations: dict[int, list[Tensor]] = {}
        seen = {step: [values.cpu() for values in parts] for step, parts in self._seen.items()}
        for observed in processes.all_gather(seen):
            for step, parts in observed.items():
                deviations.setdefault(step, []).extend(parts)
        for step, parts in sorted(deviations.items()):
            deviation = torch.cat(parts)
            deviation = deviation[deviation.isfinite()]  # fp16 may overflow
            if deviation.any():
                quantile = deviation.quantile(self.QUANTILE).item()
                previous = self.state.get(step, quantile)
                self.state[step] = self.DECAY * previous + (1 - self.DECAY) * quantile
        self.reset()

    def reset(self) -> None:
        """Discard what was observed since the last update."""
        self._seen = {}

    def state_dict(self) -> dict[int, float]:
        """The clip ranges by step, for a checkpoint."""
        return dict(self.state)

    def load_state_dict(self, state: dict[int, float]) -> None:
        """Restore what `state_dict` returned."""
        self.state = dict(state)

    def metrics(self) -> dict[str, float]:
        """The clip ranges by step."""
        return {f"clip_range/step_{step}": value for step, value in sorted(self.state.items())}


class StepLoss(BatchLoss):
    """The loss of an objective on per-step log-probabilities, which replays the trained transitions: one `Loss` per trained step."""

    fixed_positions = True  # the update must reproduce the rollout's probabilities exactly

    def __init__(
        self,
        policy: Policy,
        experience: Experience,
        conditioning: Conditioning,
        *,
        objective: Stepwise,
        clip: ClipRange,
    ) -> None:
        super().__init__(policy, experience, conditioning, objective)
        self.objective, self.loss, self.clip = objective, objective_function(objective), clip
        self.count = len(self.trajectory.steps)
        if self.advantage.ndim == 1:
            self.advantage = self.advantage[:, None].expand(-1, self.count)

    def losses(self, rows: Int[Tensor, " n"], is_real: Bool[Tensor, " n"]) -> Iterator[Loss]:
        """As of `BatchLoss`. Where the rollout kept its graphs, `rows` are one of its micro-batches, whose graphs are used up."""
        graphs = self.trajectory.graphs.pop(int(rows[0]), None)
        for k, i in enumerate(self.trajectory.steps):
            current = (
                self._with_recorded(k, rows, graphs[k])
                if graphs
                else self._replayed(k, rows, self.policy, self.conditioning)
            )
            step = current.step
            assert step is not None
            known = {"observed_clip": self.clip.range_at(i)} if self.objective.has_auto_clip else {}
            loss = self.loss(step, self._on_device(self.advantage[:, k], rows), **known)
            if self.objective.has_auto_clip:
                deviation = loss.metrics[RATIO_DEVIATION]
                self.clip.observe(i, deviation.where(is_real.to(deviation.device, non_blocking=True), math.nan))
            if self.objective.weighs_by_std:
                loss = Loss(loss.value * step.std.flatten(1)[:, 0], loss.metrics)
            references = self.anchors.evaluate(functools.partial(self._replayed, k, rows))
            yield self.anchors.with_kl(loss, current, references, rows)

    def _replayed(self, k: int, rows: Int[Tensor, " n"], model: FlowPipeline, conditioning: Conditioning) -> Prediction:
        """Velocity and transition of the k-th trained step by a model."""
        velocity = model.velocity_fn(self.trajectory.schedule, conditioning, rows)
        return self._with_recorded(k, rows, sampling.replay(velocity, self.trajectory, k, rows, self.policy.device))

    def _with_recorded(self, k: int, rows: Int[Tensor, " n"], current: ReplayedTransition) -> Prediction:
        """Velocity and transition of the k-th trained step, beside what the rollout recorded."""
        trajectory, i = self.trajectory, self.trajectory.steps[k]
        delta = trajectory.schedule.sigmas[i + 1] - trajectory.schedule.sigmas[i]
        old_log_prob = self._on_device(trajectory.log_prob[:, k], rows)
        old_mean = self._on_device(trajectory.mean[:, k], rows)
        return Prediction(
            current.v, TrainedStep(current.log_prob, old_log_prob, current.mean, old_mean, std=current.std, delta=delta)
        )


@dataclass(frozen=True)
class NoiseLevel:
    """The noise of B images and how much of it is added to each, on the CPU."""

    eps: Float[Tensor, "B *latent"]  # standard normal, float32
    timestep: Float[Tensor, " B"]
    sigma: Float[Tensor, " B"]


@dataclass(frozen=True)
class NoisedRows:
    """Final latents of n rows noised afresh, on the policy's device: gathered once for all models that see them."""

    rows: Int[Tensor, " n"]
    x0: Float[Tensor, "n *latent"]
    eps: Float[Tensor, "n *latent"]
    sigma: Float[Tensor, " n"]
    x: Float[Tensor, "n *latent"]
    timestep: Float[Tensor, " n"]  # on the CPU


class ForwardProcessLoss(BatchLoss):
    """The loss of an objective on final latents, to which new noise is added: one `Loss` per noise level.

    Args:
        microbatch: rows per forward pass.
        several_updates: whether the policy is updated more than once on these images.
    """

    def __init__(
        self,
        policy: Policy,
        experience: Experience,
        conditioning: Conditioning,
        *,
        objective: ForwardProcess,
        noise_levels: list[NoiseLevel],
        microbatch: int,
        several_updates: bool,
    ) -> None:
        super().__init__(policy, experience, conditioning, objective)
        self.needs, self.loss = objective.needs, objective_function(objective)
        self.x0 = self.trajectory.final
        self.noise_levels, self.count = noise_levels, len(noise_levels)
        self.group, self.splits_groups = experience.batch.group, bool(microbatch % experience.rows_per_group)
        self.group_statistic = objective.group_statistic if objective.needs.group_mean else None
        self.group_means: list[Tensor] | None = None
        self.fixed_positions = several_updates and objective.needs.ratio
        self.v_rollout = self._rollout_velocities(microbatch) if self.fixed_positions else None

    def before_update(self, chunks: list[tuple[Tensor, Tensor]]) -> None:
        """Compute without gradients the means over whole groups that the objective needs, if groups are spread over chunks."""
        if self.group_statistic is None or not self.splits_groups:
            return
        self.group_means = []
        for k in range(self.count):
            values, counts = torch.zeros(len(self.x0)), torch.zeros(len(self.x0), dtype=torch.bool)
            for rows, weight in chunks:
                noised = self._noised(k, rows)
                references = self.anchors.evaluate(functools.partial(self._velocity, noised), self._own_references)
                with torch.set_grad_enabled(self.policy.compiled):  # as in `_rollout_velocities`
                    number = self._group_statistic(self._image(k, noised, references), rows)
                values[rows[weight > 0]], counts[rows[weight > 0]] = number.cpu()[weight > 0], True
            self.group_means.append(mean_by_group(values, self.group, counts))

    def _group_statistic(self, image: NoisedImage, rows: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        assert self.group_statistic is not None
        return self.group_statistic(image, self._on_device(self.advantage, rows)).detach()

    def losses(self, rows: Int[Tensor, " n"], is_real: Bool[Tensor, " n"]) -> Iterator[Loss]:
        """As of `BatchLoss`."""
        for k in range(self.count):
            noised = self._noised(k, rows)
            references = self.anchors.evaluate(functools.partial(self._velocity, noised))
            image = self._image(k, noised, references)
            if self.group_means is not None:
                image = replace(image, group_mean=self._on_device(self.group_means[k], rows))
            elif self.group_statistic is not None:
                mean = mean_by_group(self._group_statistic(image, rows), self.group[rows], is_real)
                image = replace(image, group_mean=mean)
            loss = self.loss(image, self._on_device(self.advantage, rows))
            yield self.anchors.with_kl(loss, Prediction(image.v), references, rows)

    @property
    def _own_references(self) -> list[str]:
        """Those that the objective itself needs."""
        return ["base"] if self.needs.reference else []

    def _image(self, k: int, noised: NoisedRows, references: dict[str, Prediction]) -> NoisedImage:
        """The objective's input: rows at the k-th noise level."""
        v, v_old = self._velocity(noised, self.policy, self.conditioning).v, None
        if self.needs.old_policy:
            with torch.no_grad(), self.policy.lora.use(OLD_ADAPTER):
                v_old = self._velocity(noised, self.policy, self.conditioning).v
        v_rollout = v.detach() if self.v_rollout is None else self._on_device(self.v_rollout[k], noised.rows)
        v_ref = references["base"].v if "base" in references else None
        return NoisedImage(noised.x0, noised.eps, noised.sigma, v=v, v_rollout=v_rollout, v_old=v_old, v_ref=v_ref)

    def _noised(self, k: int, rows: Int[Tensor, " n"]) -> NoisedRows:
        """`rows` at the k-th noise level."""
        level = self.noise_levels[k]
        x0, eps, sigma = (self._on_device(values, rows) for values in (self.x0, level.eps, level.sigma))
        return NoisedRows(rows, x0, eps, sigma, x=add_noise(x0, eps, sigma), timestep=level.timestep[rows])

    @staticmethod
    def _velocity(noised: NoisedRows, model: FlowPipeline, conditioning: Conditioning) -> Prediction:
        """The velocity by a model."""
        return Prediction(model.velocity(noised.x, noised.timestep, conditioning, noised.rows))

    def _rollout_velocities(self, microbatch: int) -> list[Tensor]:
        """The velocity (B, ...) at each noise level under the policy that sampled the images."""
        chunks = torch.arange(len(self.x0)).split(microbatch)
        with torch.set_grad_enabled(self.policy.compiled):  # a compiled model may use another kernel without gradients
            return [
                torch.cat(
                    [self._velocity(self._noised(k, chunk), self.policy, self.conditioning).v.detach() for chunk in chunks]
                )
                for k in range(self.count)
            ]


class RewardGradientLoss(BatchLoss):
    """The loss of an objective by reward gradients, which repeats states of a rollout: one `Loss` per trained state."""

    def __init__(
        self, policy: Policy, experience: Experience, conditioning: Conditioning, *, objective: RewardGradient
    ) -> None:
        super().__init__(policy, experience, conditioning, objective)
        assert self.trajectory.gradient_states is not None
        self.objective, self.states = objective, self.trajectory.gradient_states
        self.gradient = experience.reward_gradient
        self.count = len(self.states.steps)

    def losses(self, rows: Int[Tensor, " n"], is_real: Bool[Tensor, " n"]) -> Iterator[Loss]:
        """As of `BatchLoss`."""
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


def draw_noise_levels(experience: Experience, objective: ForwardProcess, *, seed: int, step: int) -> list[NoiseLevel]:
    """The noise levels of the images of training step `step`, `num_noise_levels` of them."""
    schedule, shape = experience.trajectory.schedule, experience.trajectory.final.shape[1:]
    return [
        draw_noise_level(experience.batch, schedule, shape, objective, seed=seed, step=step, draw=draw)
        for draw in range(objective.num_noise_levels)
    ]


def draw_noise_level(
    batch: PromptBatch,
    schedule: Schedule,
    shape: Sequence[int],
    objective: ForwardProcess,
    *,
    seed: int,
    step: int,
    draw: int,
) -> NoiseLevel:
    """The `draw`-th noise level of a training step for latents (B, *shape), shared by a group or not."""
    eps = sampling.batch_noise(shape, batch, seed, "eps", step, draw, shared=objective.shared_noise)
    if objective.sigma_distribution == "schedule":
        steps = torch.tensor(objective.steps_in_range(len(schedule)))
        keys = sampling.batch_noise(steps.shape, batch, seed, "schedule", step, shared=objective.shared_noise)
        chosen = steps[keys.argsort(1)[:, draw]]  # an order of its own; each draw takes the next
        timestep, sigma = schedule.timesteps[chosen], schedule.sigmas[chosen]
    else:
        normal = sampling.batch_noise((), batch, seed, "sigma", step, draw, shared=objective.shared_noise)
        share = torch.special.ndtr(normal)
        low, high = objective.sigma_range
        timestep, sigma = schedule.at(low + (high - low) * share)
    return NoiseLevel(eps, timestep, sigma)


def add_noise(
    x0: Float[Tensor, "n *latent"], eps: Float[Tensor, "n *latent"], sigma: Float[Tensor, " n"]
) -> Float[Tensor, "n *latent"]:
    """The latents at noise level sigma: x = (1 - sigma) x0 + sigma eps."""
    column = sigma.reshape(sampling.number_shape(x0))
    return (1 - column) * x0 + column * eps


def mean_by_group(value: Float[Tensor, " n"], group: Int[Tensor, " n"], counts: Bool[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Each row's mean over the rows of its group that count; 0 for groups without any."""
    index = group.unique(return_inverse=True)[1].to(value.device, non_blocking=True)
    weight = counts.to(value)
    sums, sizes = (torch.zeros(len(group)).to(value).index_add(0, index, values) for values in (value * weight, weight))
    return (sums / sizes.clamp_min(1))[index]


def objective_function(objective: Stepwise | ForwardProcess) -> Callable[..., Loss]:
    """An objective as a function of rows and advantages."""
    return functools.partial(own_loss, objective) if isinstance(objective, OwnFunction) else objective.loss


class LossMetrics:
    """Weighted means of the numbers that losses report, and other metrics of an update.

    What `add` is given stays on its device until `collect` fetches all of it at once.

    Attributes:
        loss, sums, weight: weighted sums of the loss, of each metric and of 1, as of the last `collect`.
        numbers: metrics that are no means: the largest deviation of a ratio, NaN if one is, and what the update adds.
    """

    def __init__(self) -> None:
        self.loss = 0.0
        self.sums: dict[str, float] = {}
        self.weight = 0.0
        self.numbers: dict[str, float] = {}
        self._added: list[tuple[list[str], Tensor]] = []
        self._added_numbers: dict[str, Tensor] = {}

    def add(self, loss: Loss, weight: Float[Tensor, " n"]) -> None:
        """Add a chunk's loss and metrics, its rows weighted by `weight` (n,), on the loss's device."""
        fetched = [weight.sum(), *((values.detach() * weight).sum() for values in (loss.value, *loss.metrics.values()))]
        if RATIO_DEVIATION in loss.metrics:
            fetched.append(loss.metrics[RATIO_DEVIATION].where(weight > 0, 0.0).max())
        self._added.append((list(loss.metrics), torch.stack(fetched)))

    def add_number(self, name: str, value: Tensor) -> None:
        """Add a metric that is not averaged: value (), on the device of the losses. A later one of the same name replaces it."""
        self._added_numbers[name] = value

    def collect(self) -> "LossMetrics":
        """Fetch what was added since the last call: the only method that waits for a GPU. Returns itself."""
        device_values = [values for _, values in self._added] + [number[None] for number in self._added_numbers.values()]
        added = torch.cat(device_values).cpu().tolist() if device_values else []
        for names, values in self._added:
            weight, loss, *of_metrics = added[: len(values)]
            added = added[len(values) :]
            self.weight, self.loss = self.weight + weight, self.loss + loss
            if RATIO_DEVIATION in names:
                _merge_max(self.numbers, {RATIO_DEVIATION: of_metrics.pop()})
            for name, value in zip(names, of_metrics, strict=True):
                self.sums[name] = self.sums.get(name, 0.0) + value
        self.numbers.update(zip(self._added_numbers, added, strict=True))
        self._added, self._added_numbers = [], {}
        return self

    @staticmethod
    def merge(parts: "list[LossMetrics]") -> "LossMetrics":
        """The collected metrics of several processes as one."""
        merged = LossMetrics()
        for part in parts:
            merged.loss, merged.weight = merged.loss + part.loss, merged.weight + part.weight
            for name, value in part.sums.items():
                merged.sums[name] = merged.sums.get(name, 0.0) + value
            _merge_max(merged.numbers, part.numbers)
        return merged

    def metrics(self) -> dict[str, float]:
        """Weighted means, and `numbers`."""
        return {**{name: total / self.weight for name, total in self.sums.items()}, **self.numbers}


def _merge_max(largest: dict[str, float], others: dict[str, float]) -> None:
    """The larger number of each name, or NaN."""
    for name, value in others.items():
        if name not in largest or value > largest[name] or math.isnan(value):
            largest[name] = value
