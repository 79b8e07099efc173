"""The losses on final latents, noised afresh."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.config.forward_process_objectives import ForwardProcess
from flow_grpo.config.objective import OLD_ADAPTER
from flow_grpo.policy.encoding import Conditioning
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.training.anchors import Prediction, References
from flow_grpo.training.losses import BatchLoss, objective_function
from flow_grpo.types import Experience, Loss, NoisedImage, PromptBatch, Schedule, broadcast_rows


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
        experience: Experience,
        conditioning: Conditioning,
        references: References,
        *,
        objective: ForwardProcess,
        noise_levels: list[NoiseLevel],
        microbatch: int,
        several_updates: bool,
    ) -> None:
        super().__init__(experience, conditioning, references)
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
        """As in `BatchLoss`."""
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
    column = broadcast_rows(sigma, x0)
    return (1 - column) * x0 + column * eps


def mean_by_group(value: Float[Tensor, " n"], group: Int[Tensor, " n"], counts: Bool[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Each row's mean over the rows of its group that count; 0 for groups without any."""
    index = group.unique(return_inverse=True)[1].to(value.device, non_blocking=True)
    weight = counts.to(value)
    sums, sizes = (torch.zeros(len(group)).to(value).index_add(0, index, values) for values in (value * weight, weight))
    return (sums / sizes.clamp_min(1))[index]
