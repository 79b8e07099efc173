"""Anchors: KLs to references that hold the policy near them.

A reference's velocity is computed without gradients on the same rows as the policy's, once for all anchors that share it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flow_grpo import objectives, sde
from flow_grpo.config.anchor_config import NamedAnchor, decay_at
from flow_grpo.config.objective import Objective
from flow_grpo.data.prompts import SET_COLUMN
from flow_grpo.policy.encoding import Conditioning
from flow_grpo.policy.loading import check_guidance
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.policy.policy import Policy
from flow_grpo.types import Experience, Loss, TrainedStep, take_rows


@dataclass(frozen=True)
class Prediction:
    """The outputs of a model on n rows: its velocity and, of a trained step, the transition by it."""

    v: Float[Tensor, "n *state"]
    step: TrainedStep | None = None


class References:
    """The references of a stage's objective, by name: of its anchors, and the base model if the objective itself needs it.

    Args:
        start: the stage's first training step.

    Attributes:
        copies: the first anchor to each moving average of the LoRA, by the adapter's name.
    """

    def __init__(self, policy: Policy, objective: Objective, start: int) -> None:
        self.policy, self.kl, self.start = policy, objective.kl, start
        self.anchors, self.names = objective.named_anchors, objective.references
        self.copies = copied_references(objective)

    def update(self, step: int) -> None:
        """Move the averages after training step `step`."""
        for adapter, anchor in self.copies.items():
            assert anchor.config.decay is not None
            self.policy.lora.update_copy(adapter, decay_at(anchor.config.decay, step + 1 - self.start))


class Anchors:
    """The anchors of an objective on the images of an experience.

    Args:
        conditioning: of the policy, for the experience's prompts.
    """

    def __init__(self, references: References, experience: Experience, conditioning: Conditioning) -> None:
        self.policy, self.conditioning = references.policy, conditioning
        self.kl, self.anchors, self.names = references.kl, references.anchors, references.names
        self.by_reference = {anchor.reference: anchor for anchor in self.anchors}  # one for each
        self._guided_conditioning: dict[float, Conditioning] = {}
        sets = [row.get(SET_COLUMN) for row in experience.batch.metadata]
        named = {anchor.config.prompts for anchor in self.anchors} - {None}
        self._of_set = {name: torch.tensor([float(of_row == name) for of_row in sets]) for name in named}

    def evaluate(
        self, compute: Callable[[FlowPipeline, Conditioning], Prediction], names: list[str] | None = None
    ) -> dict[str, Prediction]:
        """The results of `compute` for each reference by name, or for those of `names`, without gradients."""
        computed = {}
        for name in self.names if names is None else names:
            with torch.no_grad(), self._active(name) as (model, conditioning):
                computed[name] = compute(model, conditioning)
        return computed

    def with_kl(self, loss: Loss, current: Prediction, references: dict[str, Prediction], rows: Int[Tensor, " n"]) -> Loss:
        """The loss of these rows with each weighted KL added. Metrics are unweighted; a KL is 0 in rows that a teacher does not teach.

        Args:
            current: of the policy, with the gradient.
            references: of `evaluate`.
        """
        for anchor in self.anchors:
            distance = kl(self.kl, current, references[anchor.reference])
            if anchor.config.prompts is not None:
                distance = distance * take_rows(self._of_set[anchor.config.prompts], rows, distance.device)
            value = loss.value + anchor.config.weight * distance
            loss = Loss(value, {**loss.metrics, anchor.metric: distance.detach()})
        return loss

    @contextmanager
    def _active(self, name: str) -> Iterator[tuple[FlowPipeline, Conditioning]]:
        """Switch the model to that reference within the context. Yields the model and the conditioning that it takes."""
        anchor = self.by_reference.get(name)
        adapter, guidance = (None, None) if anchor is None else (anchor.adapter, anchor.config.guidance)
        with self.policy.base_model() if adapter is None else self.policy.lora.use(adapter):
            yield (self.policy, self.conditioning) if guidance is None else self._guided(guidance)

    def _guided(self, guidance: float) -> tuple[FlowPipeline, Conditioning]:
        """The model with that guidance scale, and its conditioning, which is computed once."""
        model = self.policy.with_guidance(guidance)
        if guidance not in self._guided_conditioning:
            self._guided_conditioning[guidance] = model.encode(self.conditioning.prompts)
        return model, self._guided_conditioning[guidance]


def kl(kind: str | None, current: Prediction, reference: Prediction) -> Float[Tensor, " n"]:
    """The KL to a reference, of the transitions if there are any and `velocity` is not asked for."""
    if current.step is None or reference.step is None or kind == "velocity":
        return objectives.velocity_kl(current.v, reference.v)
    if kind == "k3":
        return objectives.k3(current.step.log_prob, reference.step.log_prob)
    gaussian = sde.kl(current.step.mean, reference.step.mean, current.step.std)
    if kind == "flow_grpo":
        return gaussian * -current.step.delta  # the paper divides by g^2, a Gaussian's KL by std^2 = g^2 (-delta)
    return gaussian


def copied_references(objective: Objective) -> dict[str, NamedAnchor]:
    """The references of an objective that are copies of the LoRA, by the adapter's name, each with the first anchor to it."""
    copies: dict[str, NamedAnchor] = {}
    for anchor in objective.named_anchors:
        if anchor.adapter is not None and anchor.config.lora is None:
            copies.setdefault(anchor.adapter, anchor)
    return copies


def add_references(policy: Policy, objectives: Iterable[Objective]) -> None:
    """Add the copies of the LoRA, the teachers and the guided models that anchors of these objectives refer to.

    Call it before weights are sharded.

    Raises:
        FlowGRPOError: the pipeline has no guidance, or a teacher can't be loaded.
    """
    anchors = [anchor for objective in objectives for anchor in objective.named_anchors]
    for adapter, anchor in {anchor.adapter: anchor for anchor in anchors if anchor.adapter is not None}.items():
        if anchor.config.lora is not None:
            policy.add_teacher(adapter, anchor.config.lora)
        else:
            policy.lora.add_adapter_copy(adapter)
    for guidance in dict.fromkeys(anchor.config.guidance for anchor in anchors):
        if guidance is not None:
            hint = "an anchor to guided would be one to base. In objective.anchors, set to: base."
            check_guidance(policy, guidance, hint)
