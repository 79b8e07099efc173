"""Anchors: references that the policy is held near, against reward hacking; and decay schedules of moving averages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from flow_grpo.config.sections import ConfigSection, PositiveFloat, PositiveInt, Share
from flow_grpo.errors import FlowGRPOError

KL = Literal["gaussian", "k3", "flow_grpo", "velocity"]
SETTINGS_OF = {"ema": ("decay",), "reset": ("every", "threshold"), "guided": ("guidance",)}  # that one kind alone reads
EXAMPLES = {"ema": "decay, for example 0.3", "reset": "every or threshold", "guided": "guidance, for example 4.5"}
COPIES = ("ema", "reset")  # copies of the LoRA


class DecayRamp(ConfigSection):
    """A decay that grows: with the optimizer steps of a stage (`old_policy_decay`, `rollout_policy_decay`) or with its training steps (an
    anchor to `ema`)."""

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


CRDS_RAMP = DecayRamp(after=75, rate=0.0075, max=0.999)  # of the policy that samples its images, arXiv 2603.14128


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
    """One anchor: a reference, the KL to it, its weight and its gate."""

    to: Literal["base", "ema", "guided", "reset"]
    """The reference: the base model; `ema`, a moving average of the policy (AWM's code, arXiv 2509.25050); `guided`, the base model with
    classifier-free guidance (CRD, arXiv 2603.14128); `reset`, a copy of the policy that is renewed at times (GARDO, arXiv 2512.24138)."""
    weight: PositiveFloat
    """Weight of the KL to it, whose mean is over all images of a step."""
    kl: KL | None = None
    """Which KL, as of `objective.kl`."""
    gate: Literal["none", "advantage", "disagreement"] = "none"
    """Which images the KL is of. `advantage`: all, more for good ones (CRD). `disagreement`: only those that the trained reward ranks far
    higher than the rewards of weight 0 do (GARDO)."""
    decay: Decay | None = None
    """ema: how slowly the average follows the policy after each training step, 0 at once, 1 never; a number, or a ramp. AWM's code:
    {rate: 0.001, max: 0.3}."""
    every: PositiveInt | None = None
    """reset: training steps after which the copy is renewed."""
    threshold: PositiveFloat | None = None
    """reset: the KL, measured over all images of a training step, above which the copy is renewed."""
    guidance: Annotated[float, Field(gt=1)] | None = None
    """guided: the guidance scale. CRD: 4.5."""

    @model_validator(mode="after")
    def _has_its_settings(self) -> "AnchorConfig":
        for kind, names in SETTINGS_OF.items():
            set_names = [name for name in names if getattr(self, name) is not None]
            if kind != self.to and set_names:
                raise FlowGRPOError(
                    f"objective.anchors: an anchor to {self.to} does not use {set_names[0]}; one to {kind} does."
                )
            if kind == self.to and not set_names:
                raise FlowGRPOError(f"objective.anchors: an anchor to {kind} needs {EXAMPLES[kind]}.")
        return self

    @property
    def reference_key(self) -> tuple:
        """What the reference is: equal for anchors that share one."""
        return self.to, str(self.decay), self.every, self.threshold, self.guidance


@dataclass(frozen=True)
class NamedAnchor:
    """An anchor with the names that a run gives it.

    Attributes:
        metric: of its KL: kl/base, kl/ema; a second one to a reference of that kind is kl/ema_2. That of `kl_weight` is kl.
        reference: base, ema, reset; a second, other average is ema_2. The same for anchors that share one.
    """

    config: AnchorConfig
    metric: str
    reference: str

    @property
    def adapter(self) -> str | None:
        """The copy of the LoRA that is the reference; None if the reference is the base model."""
        return f"anchor_{self.reference}" if self.config.to in COPIES else None


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
