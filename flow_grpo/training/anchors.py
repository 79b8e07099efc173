"""Anchors: KLs to references that hold the policy near them, and a guard on the norm of its velocity.

A reference's velocity is computed without gradients on the same rows as the policy's, once for all anchors that share it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flow_grpo import objectives, sde
from flow_grpo.config.anchors import COPIES, AnchorConfig, decay_at
from flow_grpo.config.objective import ObjectiveConfig
from flow_grpo.policy.conditioning import Conditioning
from flow_grpo.policy.guidance import check_guidance
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.policy.policy import Policy
from flow_grpo.training import gates
from flow_grpo.types import Experience, Loss, TrainedStep, take_rows


@dataclass(frozen=True)
class Computed:
    """What a model computes on n rows: its velocity and, of a trained step, the transition by it."""

    v: Float[Tensor, "n *state"]
    step: TrainedStep | None = None


class Anchors:
    """The anchors of an objective on the images of an experience.

    Args:
        conditioning: of the policy, for the experience's prompts.
        needs_base: evaluate the base model even if no anchor refers to it.
    """

    def __init__(
        self,
        policy: Policy,
        experience: Experience,
        conditioning: Conditioning,
        objective: ObjectiveConfig,
        needs_base: bool = False,
    ) -> None:
        self.policy, self.experience, self.conditioning = policy, experience, conditioning
        self.by_metric, self.norm_guard = objective.anchors_by_metric, objective.norm_guard
        self.advantage_max = getattr(
            objective, "advantage_max", 5.0
        )  # of objectives that map advantages to [0, 1] themselves
        self.references = objective.references
        self.names = list(self.references)
        if (needs_base or self.norm_guard) and "base" not in self.names:
            self.names.append("base")

    def evaluate(
        self, compute: Callable[[FlowPipeline, Conditioning], Computed], names: list[str] | None = None
    ) -> dict[str, Computed]:
        """What `compute` returns for each reference by name, or for those of `names`, without gradients."""
        computed = {}
        for name in self.names if names is None else names:
            with torch.no_grad(), self._active(name) as (model, conditioning):
                computed[name] = compute(model, conditioning)
        return computed

    def added_to(self, loss: Loss, rows: Int[Tensor, " n"], now: Computed, references: dict[str, Computed]) -> Loss:
        """The loss of `rows` with each weighted KL added, and the norm guard; each is reported without its weight and gate.

        Args:
            now: of the policy, with the gradient.
            references: of `evaluate`.
        """
        for metric, anchor in self.by_metric.items():
            reference = next(n for n, known in self.references.items() if known.reference == anchor.reference)
            distance = kl(anchor.kl, now, references[reference])
            value = loss.value + self._weight(anchor, rows) * distance
            loss = Loss(value, {**loss.metrics, metric: distance.detach()})
        if self.norm_guard:
            ratio = objectives.velocity_norm_ratio(now.v, references["base"].v)
            value = loss.value + self.norm_guard * objectives.norm_guard(ratio)
            loss = Loss(value, {**loss.metrics, "velocity_norm/ratio": ratio.detach()})
        return loss

    def _weight(self, anchor: AnchorConfig, rows: Int[Tensor, " n"]) -> float | Float[Tensor, " n"]:
        if anchor.gate == "advantage":
            advantage = take_rows(self.experience.advantage, rows, self.policy.device)
            return anchor.weight * gates.advantage_gate(advantage, anchor.weight, self.advantage_max)
        if anchor.gate == "disagreement":
            assert self.experience.disagreement is not None
            return anchor.weight * take_rows(self.experience.disagreement, rows, self.policy.device)
        return anchor.weight

    @contextmanager
    def _active(self, name: str) -> Iterator[tuple[FlowPipeline, Conditioning]]:
        """Make the model that reference within the context. Yields the model and the conditioning that it takes."""
        anchor = self.references.get(name)
        if anchor is not None and anchor.to in COPIES:
            with self.policy.lora.use(adapter(name)):
                yield self.policy, self.conditioning
            return
        with self.policy.reference():
            if anchor is None or anchor.guidance is None:
                yield self.policy, self.conditioning
            else:
                model = self.policy.with_guidance(anchor.guidance)
                yield model, model.encode(self.conditioning.prompts)


def kl(kind: str | None, now: Computed, reference: Computed) -> Float[Tensor, " n"]:
    """The KL to a reference, of the transitions if there are any and `velocity` is not asked for."""
    if now.step is None or reference.step is None or kind == "velocity":
        return objectives.velocity_kl(now.v, reference.v)
    if kind == "k3":
        return objectives.k3(now.step.log_prob, reference.step.log_prob)
    gaussian = sde.kl(now.step.mean, reference.step.mean, now.step.std)
    if kind == "flow_grpo":
        return gaussian * -now.step.delta  # the paper divides by g^2, a Gaussian's KL by std^2 = g^2 (-delta)
    return gaussian


def adapter(reference: str) -> str:
    """The name of the LoRA that is a copy for this reference."""
    return f"anchor_{reference}"


def copied_references(objective: ObjectiveConfig) -> dict[str, AnchorConfig]:
    """The references of an objective that are copies of the LoRA, by the adapter's name."""
    return {adapter(name): anchor for name, anchor in objective.references.items() if anchor.to in COPIES}


def add_references(policy: Policy, objectives: Iterable[ObjectiveConfig]) -> None:
    """Add the copies of the LoRA and the guided models that anchors of these objectives refer to. Call it before weights are sharded.

    Raises:
        ValueError: the pipeline has no guidance.
    """
    anchors = [(name, anchor) for objective in objectives for name, anchor in objective.references.items()]
    for name in dict.fromkeys(adapter(name) for name, anchor in anchors if anchor.to in COPIES):
        policy.lora.add_adapter_copy(name)
    for _, anchor in anchors:
        if anchor.guidance is not None:
            hint = "an anchor to guided would be one to base. In objective.anchors, set to: base."
            check_guidance(policy, anchor.guidance, hint)


class AnchorCopies:
    """The copies of the LoRA that anchors refer to, and when each was renewed; equal on all processes.

    Args:
        start: the stage's first training step, at which all of them are the policy.
    """

    def __init__(self, policy: Policy, objective: ObjectiveConfig, start: int) -> None:
        self.policy, self.copies, self.start = policy, copied_references(objective), start
        metrics = {anchor.reference: name for name, anchor in reversed(objective.anchors_by_metric.items())}
        self.metrics = {name: metrics[anchor.reference] for name, anchor in self.copies.items()}
        self.renewed = {name: start for name, anchor in self.copies.items() if anchor.to == "reset"}
        for name in self.copies:
            policy.lora.update_copy(name, 0.0)

    def update(self, step: int, measured: dict[str, float]) -> None:
        """Move the averages, and renew the other copies that are due, after training step `step`.

        Args:
            measured: the step's metrics, equal on all processes. A KL that is not measured, in a step without a loss, renews nothing.
        """
        for name, anchor in self.copies.items():
            if anchor.decay is not None:
                self.policy.lora.update_copy(name, decay_at(anchor.decay, step + 1 - self.start))
            elif self._is_due(anchor, step + 1 - self.renewed[name], measured.get(self.metrics[name], 0.0)):
                self.policy.lora.update_copy(name, 0.0)
                self.renewed[name] = step + 1

    def state_dict(self) -> dict[str, Any]:
        """The steps at which copies were renewed, for a checkpoint."""
        return dict(self.renewed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.renewed = {name: state.get(name, step) for name, step in self.renewed.items()}

    @staticmethod
    def _is_due(anchor: AnchorConfig, age: int, distance: float) -> bool:
        is_old = anchor.every is not None and age >= anchor.every
        return is_old or (anchor.threshold is not None and distance > anchor.threshold)
