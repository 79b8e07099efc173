"""The anchors of an objective: references that hold the policy near them, each with its KL and weight."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from flow_grpo.config.sections import ConfigSection, PathText, PositiveFloat, Share
from flow_grpo.errors import FlowGRPOError

ANCHOR_NEEDS = {
    "ema": "decay",
    "guided": "guidance",
    "teacher": "lora",
}  # the setting that an anchor of a kind can't do without
# the settings that not every kind reads
ANCHOR_READS = {"ema": {"decay"}, "guided": {"guidance"}, "teacher": {"lora", "prompts", "guidance"}}
ANCHOR_EXAMPLES = {"ema": 0.3, "guided": 4.5, "teacher": "edits.safetensors"}


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
    if not isinstance(value, dict):
        return value
    if not {"rate", "max"} <= value.keys() <= DecayRamp.model_fields.keys():
        raise FlowGRPOError(f"{info.field_name} is {value}: give a number, or a ramp such as {{rate: 0.001, max: 0.5}}.")
    has_both_ends = all(isinstance(value.get(name), int | float) for name in ("start", "max"))
    if has_both_ends and value["start"] > value["max"]:
        raise FlowGRPOError(
            f"{info.field_name} starts at {value['start']:g}, above its max of {value['max']:g}: set a smaller start."
        )
    return DecayRamp.model_validate(value)  # whose errors name its setting


Decay = Annotated[Share | DecayRamp, BeforeValidator(_number_or_ramp)]


def decay_at(decay: float | DecayRamp, steps: int) -> float:
    """The decay after `steps` steps."""
    return decay.at(steps) if isinstance(decay, DecayRamp) else decay


class AnchorConfig(ConfigSection):
    """One anchor: a reference, the KL to it and its weight."""

    to: Literal["base", "ema", "guided", "teacher"]
    """The reference: the base model; `ema`, a moving average of the policy (AWM's code, arXiv 2509.25050); `guided`, the base model
    with classifier-free guidance (CRD, arXiv 2603.14128); or `teacher`, the base model with a saved LoRA (arXiv 2605.08063)."""
    weight: PositiveFloat
    """Weight of the KL to it, averaged over all images of a step, including groups with equal rewards."""
    decay: Decay | None = None
    """ema: how slowly the average follows the policy after each training step, 0 at once, 1 never; a number, or a ramp. AWM's code:
    {rate: 0.001, max: 0.3}."""
    guidance: Annotated[float, Field(gt=1)] | None = None
    """guided, and if wanted teacher: the guidance scale. CRD: 4.5."""
    lora: PathText | None = None
    """teacher: its LoRA: a folder, a .safetensors file, a hub id or the folder of a finished run."""
    prompts: str | None = None
    """teacher: the name of the prompt set whose images it teaches; by default all."""

    @model_validator(mode="after")
    def _has_its_settings(self) -> "AnchorConfig":
        for name in ("decay", "guidance", "lora", "prompts"):
            if getattr(self, name) is not None and name not in ANCHOR_READS.get(self.to, ()):
                kinds = " and ".join(kind for kind, names in ANCHOR_READS.items() if name in names)
                raise FlowGRPOError(f"objective.anchors: an anchor to {self.to} does not use {name}; one to {kinds} does.")
        needed = ANCHOR_NEEDS.get(self.to)
        if needed is not None and getattr(self, needed) is None:
            raise FlowGRPOError(
                f"objective.anchors: an anchor to {self.to} needs {needed}, for example {ANCHOR_EXAMPLES[self.to]}."
            )
        return self

    @property
    def reference_key(self) -> tuple:
        """A key of the reference model: equal for anchors that share one."""
        return self.to, str(self.decay), self.guidance, self.lora


@dataclass(frozen=True)
class NamedAnchor:
    """An anchor with the names that a run gives it.

    Attributes:
        metric: of its KL: kl/base, kl/ema; a second one to a reference of that kind is kl/ema_2. That of `kl_weight` is kl.
        reference: base, ema, guided, teacher; a second, other average is ema_2. The same for anchors that share one.
        adapter: that is the reference: a copy of the LoRA or a teacher's LoRA; None if the reference is the base model.
    """

    config: AnchorConfig
    metric: str
    reference: str
    adapter: str | None = None


def name_anchors(anchors: Iterable[AnchorConfig], existing: Sequence[NamedAnchor] = ()) -> list[NamedAnchor]:
    """The anchors that have names already, and `anchors` with theirs."""
    named = list(existing)
    for anchor in anchors:
        shared = next((known.reference for known in named if known.config.reference_key == anchor.reference_key), None)
        reference = shared or _numbered(anchor.to, {known.reference for known in named})
        adapter = f"anchor_{reference}" if anchor.to == "ema" else None
        if anchor.lora is not None:  # by its path, since stages may have different teachers
            adapter = f"teacher_{zlib.crc32(anchor.lora.encode()):08x}"
        named.append(NamedAnchor(anchor, _numbered(f"kl/{anchor.to}", {one.metric for one in named}), reference, adapter))
    return named


def _numbered(name: str, taken: Iterable[str]) -> str:
    count = sum(known == name or known.startswith(f"{name}_") for known in taken)
    return f"{name}_{count + 1}" if count else name
