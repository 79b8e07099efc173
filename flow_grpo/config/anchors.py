"""Anchors: references that the policy is held near, against reward hacking; and decay schedules of moving averages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from flow_grpo.config.sections import ConfigSection, PositiveFloat, Share
from flow_grpo.errors import FlowGRPOError

KL = Literal["gaussian", "k3", "flow_grpo", "velocity"]
SETTING_OF = {"ema": "decay", "guided": "guidance"}  # that one kind alone reads, and needs
EXAMPLES = {"ema": 0.3, "guided": 4.5}


class DecayRamp(ConfigSection):
    """A decay that grows: with the optimizer steps of a stage (`old_policy_decay`) or with its training steps (an anchor to `ema`)."""

    rate: PositiveFloat
    """How much the decay grows with every step."""
    max: Share
    """Largest decay."""
    after: Annotated[int, Field(ge=0)] = 0
    """Steps before it begins to grow."""
    start: Share = 0.0
    """The decay before it begins to grow."""

    def at(self, steps: int) -> float:
        """The decay after `steps` steps."""
        return min(self.max, self.start + self.rate * max(0, steps - self.after))


def _number_or_ramp(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, dict) and not {"rate", "max"} <= value.keys() <= DecayRamp.model_fields.keys():
        raise FlowGRPOError(f"{info.field_name} is {value}: give a number, or a ramp such as {{rate: 0.001, max: 0.5}}.")
    if (
        isinstance(value, dict)
        and all(isinstance(value.get(name), int | float) for name in ("start", "max"))
        and value["start"] > value["max"]
    ):
        raise FlowGRPOError(
            f"{info.field_name} starts at {value['start']:g}, above its max of {value['max']:g}: set a smaller start."
        )
    return value


Decay = Annotated[Share | DecayRamp, BeforeValidator(_number_or_ramp)]


def decay_at(decay: float | DecayRamp, steps: int) -> float:
    """The decay after `steps` steps."""
    return decay.at(steps) if isinstance(decay, DecayRamp) else decay


class AnchorConfig(ConfigSection):
    """One anchor: a reference, the KL to it and its weight."""

    to: Literal["base", "ema", "guided"]
    """The reference: the base model; `ema`, a moving average of the policy (AWM's code, arXiv 2509.25050); or `guided`, the base model
    with classifier-free guidance (CRD, arXiv 2603.14128)."""
    weight: PositiveFloat
    """Weight of the KL to it, whose mean is over all images of a step."""
    kl: KL | None = None
    """Which KL, as of `objective.kl`."""
    decay: Decay | None = None
    """ema: how slowly the average follows the policy after each training step, 0 at once, 1 never; a number, or a ramp. AWM's code:
    {rate: 0.001, max: 0.3}."""
    guidance: Annotated[float, Field(gt=1)] | None = None
    """guided: the guidance scale. CRD: 4.5."""

    @model_validator(mode="after")
    def _has_its_settings(self) -> "AnchorConfig":
        for kind, name in SETTING_OF.items():
            is_set = getattr(self, name) is not None
            if kind != self.to and is_set:
                raise FlowGRPOError(f"objective.anchors: an anchor to {self.to} does not use {name}; one to {kind} does.")
            if kind == self.to and not is_set:
                raise FlowGRPOError(f"objective.anchors: an anchor to {kind} needs {name}, for example {EXAMPLES[kind]}.")
        return self

    @property
    def reference_key(self) -> tuple:
        """What the reference is: equal for anchors that share one."""
        return self.to, str(self.decay), self.guidance


@dataclass(frozen=True)
class NamedAnchor:
    """An anchor with the names that a run gives it.

    Attributes:
        metric: of its KL: kl/base, kl/ema; a second one to a reference of that kind is kl/ema_2. That of `kl_weight` is kl.
        reference: base, ema, guided; a second, other average is ema_2. The same for anchors that share one.
    """

    config: AnchorConfig
    metric: str
    reference: str

    @property
    def adapter(self) -> str | None:
        """The copy of the LoRA that is the reference; None if the reference is the base model."""
        return f"anchor_{self.reference}" if self.config.to == "ema" else None


def name_anchors(anchors: Iterable[AnchorConfig], existing: Sequence[NamedAnchor] = ()) -> list[NamedAnchor]:
    """The anchors that have names already, and `anchors` with theirs."""
    named = list(existing)
    for anchor in anchors:
        shared = next((known.reference for known in named if known.config.reference_key == anchor.reference_key), None)
        named.append(
            NamedAnchor(
                anchor,
                metric=_numbered(f"kl/{anchor.to}", {known.metric for known in named}),
                reference=shared or _numbered(anchor.to, {known.reference for known in named}),
            )
        )
    return named


def _numbered(name: str, taken: Iterable[str]) -> str:
    count = sum(known == name or known.startswith(f"{name}_") for known in taken)
    return f"{name}_{count + 1}" if count else name
