"""The loss of objectives on final latents that are noised afresh."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flow_grpo.config.objective import OLD_ADAPTER, Objective
from flow_grpo.policy.encoding import Conditioning
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.policy.policy import Policy
from flow_grpo.training.anchors import Anchors, Prediction
from flow_grpo.training.losses import mean_by_group, objective_function
from flow_grpo.training.noise_levels import NoiseLevel, add_noise
from flow_grpo.types import Experience, Loss, NoisedImage, take_rows


@dataclass(frozen=True)
class NoisedRows:
    """Final latents of n rows noised afresh, on the policy's device: gathered once for all models that see them."""

    rows: Int[Tensor, " n"]
    x0: Float[Tensor, "n *latent"]
    eps: Float[Tensor, "n *latent"]
    sigma: Float[Tensor, " n"]
    x: Float[Tensor, "n *latent"]
    timestep: Float[Tensor, " n"]  # on the CPU


class ForwardProcessLoss:
    """The loss of an objective on final latents: one `Loss` per noise level.

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
        objective: Objective,
        noise_levels: list[NoiseLevel],
        microbatch: int,
        several_updates: bool,
    ) -> None:
        self.policy, self.needs, self.advantage = policy, objective.needs, experience.advantage
        self.loss = objective_function(objective)
        self.conditioning, self.x0 = conditioning, experience.trajectory.final
        self.anchors = Anchors(policy, experience, conditioning, objective)
        self.noise_levels, self.count = noise_levels, len(noise_levels)
        self.group, self.splits_groups = experience.batch.group, bool(microbatch % experience.rows_per_group)
        self.group_statistic = objective.group_statistic if objective.needs.group_mean else None
        self.group_means: list[Tensor] | None = None
        self.fixed_positions = several_updates and objective.needs.ratio
        self.v_rollout = self._rollout_velocities(microbatch) if self.fixed_positions else None

    def before_update(self, chunks: list[tuple[Tensor, Tensor]]) -> None:
        """Compute without gradients what the objective needs of whole groups, if they are spread over chunks.

        Args:
            chunks: rows and their weights of the update, whose losses are asked for next; a group is whole in them.
        """
        if self.group_statistic is None or not self.splits_groups:
            return
        self.group_means = []
        for k in range(self.count):
            values, counts = torch.zeros(len(self.x0)), torch.zeros(len(self.x0), dtype=torch.bool)
            for rows, weight in chunks:
                noised = self._noised(k, rows)
                references = self.anchors.evaluate(functools.partial(self._velocity, noised), self._own_references)
                with torch.set_grad_enabled(self.policy.compiled):  # as of `_rollout_velocities`
                    number = self._group_statistic(self._image(k, noised, references), rows)
                values[rows[weight > 0]], counts[rows[weight > 0]] = number.cpu()[weight > 0], True
            self.group_means.append(mean_by_group(values, self.group, counts))

    def _group_statistic(self, image: NoisedImage, rows: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        assert self.group_statistic is not None
        return self.group_statistic(image, self._on_device(self.advantage, rows)).detach()

    def losses(self, rows: Int[Tensor, " n"], is_real: Bool[Tensor, " n"]) -> Iterator[Loss]:
        """One loss per noise level, its values those of `rows`."""
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
            yield self.anchors.with_kl(loss, Prediction(image.v), references)

    @property
    def _own_references(self) -> list[str]:
        """Those that the objective itself needs."""
        return ["base"] if self.needs.reference else []

    def _image(self, k: int, noised: NoisedRows, references: dict[str, Prediction]) -> NoisedImage:
        """What the objective sees of rows at the k-th noise level."""
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

    def _on_device(self, values: Float[Tensor, "B ..."], rows: Int[Tensor, " n"]) -> Float[Tensor, "n ..."]:
        return take_rows(values, rows, self.policy.device)

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
