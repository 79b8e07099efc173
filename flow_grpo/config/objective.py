"""The section `objective`: one class per objective, with its settings, what training must provide for it, and its loss.

Three families: `Stepwise` objectives train the Gaussian steps of an SDE rollout; `ForwardProcess` objectives the final latents of an ODE
rollout, noised afresh; `RewardGradient` objectives states of an ODE rollout, by the gradient of rewards at its end. A class with a
default `name` is an objective: it is found by that name from then on. The formulas are in `flow_grpo/objectives.py`.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from torch import Tensor

from flow_grpo import objectives
from flow_grpo.advantages import ADVANTAGES
from flow_grpo.config.sections import ConfigSection, PathText, PositiveFloat, PositiveInt, Share
from flow_grpo.errors import FlowGRPOError
from flow_grpo.sde import TRANSITIONS, Transition
from flow_grpo.text import suggest
from flow_grpo.types import GradientState, Loss, NoisedImage, TrainedStep

OLD_ADAPTER = "old"  # the adapter that slowly follows the trained one; checkpoints have this name
CUSTOM = "file.py:function"  # stands for a user's own function in lists of names
KL = Literal["gaussian", "k3", "flow_grpo", "velocity"]
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
    """

    config: AnchorConfig
    metric: str
    reference: str

    @property
    def adapter(self) -> str | None:
        """The adapter that is the reference: a copy of the LoRA or a teacher's LoRA; None if the reference is the base model."""
        if self.config.lora is not None:  # by its path, since stages may have different teachers
            return f"teacher_{zlib.crc32(self.config.lora.encode()):08x}"
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


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The inputs that training must provide for an objective.

    Attributes:
        ratio: it compares with the policy that sampled the images.
        zero_at_zero_advantage: a row's loss is 0 where its advantage is 0.
        zero_at_ratio_1: a row's loss is 0 where its advantage is 0 and the ratio is 1, as it is with one update on a rollout.
        single_update: it is right for one update on a rollout alone.
        selection: the images of a group that it trains on.
        reference: it needs the velocity of the base model, also without a KL.
        old_policy: it needs an adapter that slowly follows the trained one.
        critic: its advantages come from a critic.
        group_mean: it needs the mean over a group's images of its `group_statistic`.
        reward_gradient: it trains by gradients of rewards, and not by advantages.
        anchors: it trains towards its anchors alone.
        moves: it trains on images that are moved by the reward's gradient, and not by the gradient itself: along it if that is better,
            or both along and against it, weighed by advantages.
    """

    ratio: bool = False
    zero_at_zero_advantage: bool = False
    zero_at_ratio_1: bool = False
    single_update: bool = False
    selection: Literal["all", "best", "best_and_worst"] = "all"
    reference: bool = False
    old_policy: bool = False
    critic: bool = False
    group_mean: bool = False
    reward_gradient: bool = False
    anchors: bool = False
    moves: Literal["if_better", "both_ways"] | None = None

    @property
    def takes_advantage(self) -> bool:
        """Whether it trains on advantages that are made of a group's rewards."""
        weighs = not (self.critic or self.reward_gradient or self.anchors) or self.moves == "both_ways"
        return self.selection == "all" and weighs

    @property
    def whole_groups(self) -> bool:
        """Whether all images of a prompt must be on one process."""
        return self.group_mean or self.moves is not None or self.rows_per_pair == 2

    @property
    def rows_per_pair(self) -> int:
        """The rows that must stay together in one forward pass."""
        return 2 if self.selection == "best_and_worst" else 1


class Objective(ConfigSection):
    """The settings of every objective."""

    needs: ClassVar[Needs] = Needs()
    stepwise: ClassVar[bool] = False  # of the family `Stepwise`

    name: str
    """The objective: grpo, reinforce, grpo_guard, dppo or ppo on per-step log-probabilities; awm, pepg, nft, crd, dgpo, sft, dpo or distill
    on final latents noised afresh; refl, draft, flowbp, mend or opsd by the gradient of rewards. Your own: my_module:my_fn or
    file.py:my_fn, on sampling steps or, with family: forward_process, on noised latents."""
    advantage: str = "grpo"
    """How rewards become advantages: grpo, batch_std, dr_grpo, rloo, reinforce_pp, gdpo, rank, or your own function
    (reward (B,), group (B,)) -> (B,) as my_module:my_fn or file.py:my_fn. Their formulas are in flow_grpo/advantages.py."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the base model, averaged over all images, including groups with equal rewards (for sft and dpo over the images
    they train on)."""
    kl: KL | None = None
    """The KL to the base model and to anchors: of the transitions (`gaussian`, the default on steps), DeepSeekMath's estimator from
    log-probabilities (`k3`), the published code's, without the step's length (`flow_grpo`), or the distance of the velocities
    (`velocity`, the only one on final latents)."""
    anchors: list[AnchorConfig] = Field(default_factory=list)
    """Further references to hold the policy near, each with its weight, such as [{to: ema, weight: 1, decay: 0.3}]; each reports its KL
    as kl/ema. `kl_weight` is the short form of one to the base model, and is added to them."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.model_fields["name"].description = Objective.model_fields["name"].description
        if not cls.model_fields["name"].is_required():
            OBJECTIVES[cls.model_fields["name"].default] = cls

    @property
    def named_anchors(self) -> list[NamedAnchor]:
        """All anchors with their names, that of `kl_weight` first."""
        if not self.kl_weight:
            return name_anchors(self.anchors)
        short = AnchorConfig.model_construct(to="base", weight=self.kl_weight)  # the weight is checked already
        return name_anchors(self.anchors, [NamedAnchor(short, "kl", "base")])

    @property
    def references(self) -> list[str]:
        """Names of the references to evaluate: those of the anchors, and base if the objective needs it."""
        base = ["base"] if self.needs.reference else []
        return list(dict.fromkeys([*(anchor.reference for anchor in self.named_anchors), *base]))

    @property
    def is_anchored(self) -> bool:
        """Whether images without an advantage have a loss too, since the policy is held near a reference."""
        return bool(self.kl_weight or self.anchors)

    @property
    def policy_copies(self) -> dict[str, float | DecayRamp]:
        """Adapters that slowly follow the trained policy, with their decay after each training step."""
        return {}

    @property
    def sampling_adapter(self) -> str | None:
        """The adapter that samples a step's images; None is the trained one."""
        return None

    def given(self) -> dict[str, Any]:
        """The settings that were given or have another value than their default, and the name, as plain values."""
        return {"name": self.name, **super().given()}

    def losses_per_image(self, sampling_steps: int) -> int:
        """The losses of an image: one for each trained step or noise level.

        Args:
            sampling_steps: of a rollout.
        """
        raise NotImplementedError

    def check_steps(self, sampling_steps: int) -> None:
        """Raise FlowGRPOError if a setting does not fit a rollout of so many sampling steps."""

    @property
    def has_auto_clip(self) -> bool:
        """Whether the clip range is to be calibrated on the ratios of each step."""
        return False

    @property
    def weighs_by_std(self) -> bool:
        """Whether each step's loss is weighed by the transition's std."""
        return False

    @field_validator("advantage")
    @classmethod
    def _advantage_is_known(cls, name: str) -> str:
        if not is_custom(name) and name not in ADVANTAGES:
            close = suggest(name, list(ADVANTAGES))
            raise FlowGRPOError(
                f"objective.advantage: there is no advantage {name!r}.{close} Choose one of {', '.join(ADVANTAGES)}."
            )
        return name

    @model_validator(mode="after")
    def _advantage_is_read(self) -> "Objective":
        if not self.needs.takes_advantage and "advantage" in self.changed():
            instead = "it trains on the best of a group, without advantages"
            if self.needs.critic:
                instead = "its critic makes the advantages"
            elif self.needs.reward_gradient or self.needs.anchors:
                instead = f"it trains by {'the gradient of the rewards' if self.needs.reward_gradient else 'its anchors'}"
            raise FlowGRPOError(f"objective {self.name} does not use advantage: {instead}. Remove it.")
        return self

    @model_validator(mode="after")
    def _kl_fits(self) -> "Objective":
        if self.kl not in (None, "velocity") and not self.stepwise:
            raise FlowGRPOError(
                f"objective.kl={self.kl} needs trained steps, {self.name} has none: set objective.kl=velocity."
            )
        return self


OBJECTIVES: dict[str, type[Objective]] = {}  # by name, in the order of this file


# -- settings that several objectives share ---------------------------------------------------------------------------


class Clip(Objective):
    clip_low: PositiveFloat | Literal["auto"] = 1e-4
    """The ratio is clipped at 1 - clip_low. Log-probabilities are means over the latent, so the range is small. `auto` takes it from the
    ratios seen at each step: 0.9 of them are inside."""
    clip_high: PositiveFloat | Literal["auto"] = 1e-4
    """The ratio is clipped at 1 + clip_high; above clip_low it is DAPO's clip-higher."""

    @property
    def has_auto_clip(self) -> bool:
        return "auto" in (self.clip_low, self.clip_high)

    @model_validator(mode="after")
    def _auto_is_calibrated(self) -> "Clip":
        if self.has_auto_clip and not self.stepwise:
            names = ", ".join(name for name, section in OBJECTIVES.items() if section.stepwise and issubclass(section, Clip))
            raise FlowGRPOError(f"objective.clip_low=auto is calibrated at each trained step, for {names}, not {self.name}.")
        return self

    def clip_range(self, observed: float = math.inf) -> tuple[float, float]:
        """clip_low and clip_high, with the observed range in place of `auto`."""
        low, high = (observed if value == "auto" else value for value in (self.clip_low, self.clip_high))
        return low, high


class StepWeight(Objective):
    step_weight: Literal["uniform", "std"] = "uniform"
    """Weight of a step's loss; `std` weighs by the transition's std (TempFlow, arXiv 2508.04324), which makes up for the 1 / std in the
    gradient of a log-probability."""

    @property
    def weighs_by_std(self) -> bool:
        return self.step_weight == "std"


class Dataset(Objective):
    dataset: PathText | None = None
    """Images to train on instead of rollouts: a table with the columns prompt and image (for dpo prompt, chosen and rejected), or, for sft,
    images that `flow-grpo sample` wrote."""


class LatentUnit(Objective):
    sum_over_latents: bool = False
    """Whether the forward process's log-probability is a sum over the latent elements, as arXiv 2602.04663 publishes it, not their mean.
    Ratios, clip ranges and the weight of a KL are in that unit."""


class OldPolicy(Objective):
    """The settings of objectives with a slowly moving copy of the policy."""

    old_policy_decay: Decay = 0.5
    """How slowly the old policy follows the trained one after each training step: 0 at once, 1 never. Or a ramp: for nft the published
    one is {rate: 0.001, max: 0.5}, for OCR {after: 75, rate: 0.0075, max: 0.999}; for crd {start: 0.25, rate: 0.005, max: 0.999}."""
    rollout_policy: Literal["trained", "old"] = "trained"
    """The policy that samples a step's images: the trained one, or the old one, as nft was published."""

    @property
    def policy_copies(self) -> dict[str, float | DecayRamp]:
        return {OLD_ADAPTER: self.old_policy_decay}

    @property
    def sampling_adapter(self) -> str | None:
        return OLD_ADAPTER if self.rollout_policy == "old" else None


# -- objectives on the log-probabilities of sampling steps ------------------------------------------------------------


def stochastic_transitions() -> dict[str, Transition]:
    """The rows of `sde.TRANSITIONS` that add noise, with those that a user has added."""
    return {name: row for name, row in TRANSITIONS.items() if row.stochastic}


def _with_names(schema: dict[str, Any]) -> None:
    schema["enum"] = list(stochastic_transitions())


class WindowConfig(ConfigSection):
    schedule: Literal["all", "fixed", "random"] = "all"
    """The steps that are stochastic and trained. `all`: first_step to last_step. Otherwise `size` adjacent steps: `fixed`, from
    first_step, or `random`, drawn for each training step. `flow-grpo doctor --step-variance` measures which steps move the reward."""
    size: PositiveInt = 3
    """Steps in the window; `all` ignores it."""
    first_step: Annotated[int, Field(ge=0)] = 0
    """The first step that may be trained."""
    last_step: int | None = None
    """The last step that may be trained; by default the last but one, since the step to sigma 0 may have no noise to learn from."""

    def last_of(self, sampling_steps: int) -> int:
        """The last step that may be trained, of so many sampling steps."""
        return sampling_steps - 2 if self.last_step is None else self.last_step


class Stepwise(Objective):
    """An objective on the per-step log-probabilities of an SDE rollout."""

    stepwise: ClassVar[bool] = True

    transition: Annotated[str, Field(json_schema_extra=_with_names)] = "flow_sde"
    """The transition of the trained steps: how they add noise."""
    noise_level: PositiveFloat = 0.7
    """How much noise a trained step adds."""
    window: WindowConfig = WindowConfig()
    shared_initial_noise: bool = False
    """Whether the images of a group start from the same noise and differ from the window's first step on. Earlier steps are
    computed once per group. With a window of one step, rewards differ only by its noise (TempFlow, arXiv 2508.04324)."""
    keep_graphs: bool = False
    """Whether the update uses the rollout's own graphs of the trained steps in place of replaying them (LeanGRPO, arXiv 2609.03528):
    faster, same gradient, for one update on a rollout. All graphs of a step are in memory at once, see `flow-grpo plan`."""

    def loss(self, step: TrainedStep, advantage: Tensor) -> Loss:
        """The loss of n rows at one trained step. One with `clip_low: auto` also takes the clip range that was seen at this step."""
        raise NotImplementedError

    def losses_per_image(self, sampling_steps: int) -> int:
        window = self.window
        return window.last_of(sampling_steps) - window.first_step + 1 if window.schedule == "all" else window.size

    def check_steps(self, sampling_steps: int) -> None:
        window, last = self.window, self.window.last_of(sampling_steps)
        latest = sampling_steps - 1 if stochastic_transitions()[self.transition].noise_at_end else sampling_steps - 2
        if not window.first_step <= last <= latest:
            raise FlowGRPOError(
                f"objective.window trains steps {window.first_step} to {last}, but with {sampling_steps} sampling steps of "
                f"{self.transition} the trainable ones are 0 to {latest}."
            )
        if window.schedule != "all" and window.first_step + window.size - 1 > last:
            raise FlowGRPOError(
                f"objective.window.size={window.size} does not fit into steps {window.first_step} to {last}."
            )

    @field_validator("transition")
    @classmethod
    def _transition_is_known(cls, name: str) -> str:
        if name not in (known := stochastic_transitions()):
            close = suggest(name, list(known))
            raise FlowGRPOError(
                f"objective.transition={name} is no transition that adds noise.{close} Choose one of {', '.join(known)}."
            )
        return name

    @model_validator(mode="after")
    def _noise_fits(self) -> "Stepwise":
        row = stochastic_transitions()[self.transition]
        if self.noise_level > row.max_noise_level:
            raise FlowGRPOError(
                f"objective.noise_level={self.noise_level}, but for {self.transition} it is at most {row.max_noise_level:g}."
            )
        if self.kl == "flow_grpo" and not row.has_g:
            with_g = " or ".join(name for name, one in stochastic_transitions().items() if one.has_g)
            raise FlowGRPOError(f"objective.kl=flow_grpo divides by the g of {with_g}; {self.transition} has none.")
        return self


class Grpo(Clip, StepWeight, Stepwise):
    """PPO's clipped ratio on per-step log-probabilities, arXiv 2402.03300 and 2505.05470."""

    name: Literal["grpo"] = "grpo"
    needs: ClassVar[Needs] = Needs(ratio=True, zero_at_zero_advantage=True)

    def loss(self, step: TrainedStep, advantage: Tensor, observed_clip: float = math.inf) -> Loss:
        low, high = self.clip_range(observed_clip)
        return objectives.grpo(step, advantage, low, high)


class Reinforce(StepWeight, Stepwise):
    """Advantage times log-probability, for one update on a rollout."""

    name: Literal["reinforce"] = "reinforce"
    needs: ClassVar[Needs] = Needs(zero_at_zero_advantage=True, single_update=True)

    def loss(self, step: TrainedStep, advantage: Tensor) -> Loss:
        return objectives.reinforce(step, advantage)


class GrpoGuard(Clip, Stepwise):
    """GRPO with a centred ratio of one scale at every step, arXiv 2510.22319."""

    name: Literal["grpo_guard"] = "grpo_guard"
    needs: ClassVar[Needs] = Needs(ratio=True, zero_at_zero_advantage=True)

    def loss(self, step: TrainedStep, advantage: Tensor, observed_clip: float = math.inf) -> Loss:
        low, high = self.clip_range(observed_clip)
        return objectives.grpo_guard(step, advantage, low, high)


class Dppo(StepWeight, Stepwise):
    """A divergence mask in place of the clip, arXiv 2606.11025."""

    name: Literal["dppo"] = "dppo"
    threshold: Annotated[float, Field(ge=0)] = 1e-5
    """The divergence of new and old step from which on an update may not push further. Published: 1e-5 and 1e-6, for means over the
    latent."""
    needs: ClassVar[Needs] = Needs(ratio=True, zero_at_zero_advantage=True)

    def loss(self, step: TrainedStep, advantage: Tensor) -> Loss:
        return objectives.dppo(step, advantage, self.threshold)


class Ppo(Clip, StepWeight, Stepwise):
    """GRPO's clipped ratio with advantages of a critic, arXiv 1707.06347 and 1506.02438."""

    name: Literal["ppo"] = "ppo"
    needs: ClassVar[Needs] = Needs(ratio=True, critic=True)

    def loss(self, step: TrainedStep, advantage: Tensor, observed_clip: float = math.inf) -> Loss:
        low, high = self.clip_range(observed_clip)
        return objectives.grpo(step, advantage, low, high)


# -- objectives on final latents, noised afresh -----------------------------------------------------------------------


class ForwardProcess(Objective):
    """An objective on the final latents of an ODE rollout, or of given images, noised afresh."""

    num_noise_levels: Annotated[int, Field(gt=0, le=10_000)] = 1
    """Noise levels drawn for each prompt of a step; all its images (see shared_noise) and all epochs have the same."""
    sigma_range: tuple[Share, Share] = (0.0, 1.0)
    """The range those noise levels are drawn from, before the scheduler's shift."""
    sigma_distribution: Literal["uniform", "schedule"] = "uniform"
    """How the noise levels are drawn from the range: `uniform`, or `schedule`, which takes sampling steps: those i of T whose 1 - i / T is
    in the range. With schedule, several noise levels are different ones, as nft, crd and dgpo were published."""
    shared_noise: bool = True
    """Whether the images of a prompt have the same noise levels and the same noise. false draws them for each image, as nft and crd were
    published; then differences of the images' losses are noisier."""

    def loss(self, image: NoisedImage, advantage: Tensor) -> Loss:
        """The loss of n rows at one noise level."""
        raise NotImplementedError

    def group_statistic(self, image: NoisedImage, advantage: Tensor) -> Tensor:
        """A number of each row (n,) whose mean over a group the loss needs, in `image.group_mean`."""
        raise NotImplementedError

    def steps_in_range(self, steps: int) -> list[int]:
        """The steps i of a schedule of this length whose 1 - i / steps is in sigma_range."""
        low, high = self.sigma_range
        return [i for i in range(steps) if low - 1e-9 <= 1 - i / steps <= high + 1e-9]

    def losses_per_image(self, sampling_steps: int) -> int:
        return self.num_noise_levels

    def check_steps(self, sampling_steps: int) -> None:
        num_in_range = len(self.steps_in_range(sampling_steps))
        if self.sigma_distribution == "schedule" and num_in_range < self.num_noise_levels:
            raise FlowGRPOError(
                f"objective.num_noise_levels={self.num_noise_levels} with sigma_distribution=schedule, but sigma_range has "
                f"{num_in_range} of the {sampling_steps} sampling steps: set a wider sigma_range"
                f"{', or fewer noise levels' if num_in_range else ''}."
            )

    @model_validator(mode="after")
    def _fits_final_latents(self) -> "ForwardProcess":
        if self.sigma_range[0] >= self.sigma_range[1]:
            raise FlowGRPOError("objective.sigma_range must rise, for example [0, 1].")
        if self.needs.rows_per_pair == 2 and not self.shared_noise:
            raise FlowGRPOError(f"objective {self.name} compares a pair at the same noise: set objective.shared_noise=true.")
        return self


class Awm(Clip, LatentUnit, ForwardProcess):
    """Advantage Weighted Matching: PPO's clip on the error of the velocity, arXiv 2509.25050."""

    name: Literal["awm"] = "awm"
    loss_weight: Literal["uniform", "ghuber", "adaptive"] = "uniform"
    """Weight of the matching loss; `adaptive` divides it by its mean absolute error, as pepg does (arXiv 2602.04663)."""
    needs: ClassVar[Needs] = Needs(ratio=True, zero_at_zero_advantage=True)

    def loss(self, image: NoisedImage, advantage: Tensor) -> Loss:
        low, high = self.clip_range()
        return objectives.awm(
            image, advantage, low, high, loss_weight=self.loss_weight, sum_over_latents=self.sum_over_latents
        )


class Pepg(LatentUnit, ForwardProcess):
    """The policy gradient of an adaptively weighted matching error with a proximal term, arXiv 2602.04663."""

    name: Literal["pepg"] = "pepg"
    needs: ClassVar[Needs] = Needs(ratio=True, zero_at_ratio_1=True)

    def loss(self, image: NoisedImage, advantage: Tensor) -> Loss:
        return objectives.pepg(image, advantage, self.sum_over_latents)


class Nft(OldPolicy, ForwardProcess):
    """DiffusionNFT: towards good images and away from bad ones, relative to a slow copy of the policy, arXiv 2509.16117."""

    name: Literal["nft"] = "nft"
    beta: PositiveFloat = 1.0
    """How far the implicit policies are from the old one."""
    advantage_max: PositiveFloat = 5.0
    """Advantages are clipped to ±advantage_max and mapped to [0, 1]. It also scales the loss."""
    needs: ClassVar[Needs] = Needs(old_policy=True)

    def loss(self, image: NoisedImage, advantage: Tensor) -> Loss:
        return objectives.nft(image, advantage, self.beta, self.advantage_max)


class Crd(OldPolicy, ForwardProcess):
    """Centered Reward Distillation: the implicit reward regressed on the advantage, arXiv 2603.14128."""

    name: Literal["crd"] = "crd"
    beta: PositiveFloat = 1.0
    """Scale of the implicit reward: the larger, the less the policy moves from the old one for the same advantage."""
    advantage_max: PositiveFloat = 5.0
    """Advantages are clipped to ±advantage_max and mapped to [0, 1]. It also scales the loss."""
    needs: ClassVar[Needs] = Needs(old_policy=True, group_mean=True)

    def loss(self, image: NoisedImage, advantage: Tensor) -> Loss:
        return objectives.crd(image, advantage, self.beta, self.advantage_max)

    def group_statistic(self, image: NoisedImage, advantage: Tensor) -> Tensor:
        return objectives.crd_residual(image, advantage, self.beta, self.advantage_max)


class Dgpo(ForwardProcess):
    """Direct Group Preference Optimization: groups that are learned weigh less, arXiv 2510.08425."""

    name: Literal["dgpo"] = "dgpo"
    beta: PositiveFloat = 100.0
    """How sharply a group's mean preference decides its weight."""
    needs: ClassVar[Needs] = Needs(zero_at_zero_advantage=True, reference=True, group_mean=True)

    def loss(self, image: NoisedImage, advantage: Tensor) -> Loss:
        return objectives.dgpo(image, advantage)

    def group_statistic(self, image: NoisedImage, advantage: Tensor) -> Tensor:
        return objectives.dgpo_preference(image, advantage, self.beta)


class Sft(Dataset, ForwardProcess):
    """The best image of each group, or given images, as targets, arXiv 2210.02747."""

    name: Literal["sft"] = "sft"
    needs: ClassVar[Needs] = Needs(selection="best")

    def loss(self, image: NoisedImage, advantage: Tensor) -> Loss:
        return objectives.sft(image)


class Dpo(Dataset, ForwardProcess):
    """The best image of each group against the worst, or given pairs, arXiv 2311.12908."""

    name: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 500.0
    """How sharply the difference of two matching errors decides."""
    needs: ClassVar[Needs] = Needs(selection="best_and_worst", reference=True)

    def loss(self, image: NoisedImage, advantage: Tensor) -> Loss:
        return objectives.dpo(image, self.beta)


class Distill(ForwardProcess):
    """Distillation on the policy's own images: towards teachers, its anchors, by the distance of the velocities, arXiv 2605.08063.

    The papers compare at the states that a rollout visits; here its final latents are noised afresh, as for the other objectives of this
    family, which have the same distribution if the policy's flow is that of its images. By default the teacher is the base model with
    guidance: the policy learns to sample without.
    """

    name: Literal["distill"] = "distill"
    anchors: list[AnchorConfig] = Field(default_factory=lambda: [AnchorConfig(to="guided", guidance=4.5, weight=1.0)])
    """The teachers, by `to: teacher` or `to: guided`, and further references, each with its weight; each reports its distance as
    kl/teacher."""
    needs: ClassVar[Needs] = Needs(anchors=True)

    def loss(self, image: NoisedImage, advantage: Tensor) -> Loss:
        return objectives.distill(image)


# -- objectives by the gradient of rewards ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedState:
    """A state of a rollout whose velocity is trained.

    Attributes:
        step: of the schedule; the state is the one before it.
        factor: derivative of the endpoint by the velocity; by Euler's steps below 0.
        predicted: whether the endpoint is the image that the velocity predicts, not the final latents.
        noised_copy: whether the state is the final latents noised afresh to the step's sigma; the number of the copy, from 1 on.
    """

    step: int
    factor: float
    predicted: bool = False
    noised_copy: int = 0


Draw = Callable[[list[float], int], list[int]]


class RewardGradient(Objective):
    """An objective on the gradient of differentiable rewards at the end of an ODE rollout, of which the loss is linear in the velocity."""

    needs: ClassVar[Needs] = Needs(reward_gradient=True, single_update=True)
    FURTHER_DECODES: ClassVar[tuple[int, int]] = (0, 0)  # of moved images: with a gradient, and without

    kl_weight: Annotated[float, Field(ge=0)] = 0.03
    """Weight of the KL to the base model, the squared distance of the velocities at the trained states."""
    smoothing: Annotated[float, Field(ge=0, le=1)] = 0.01
    """The reward's gradient is taken at the lowest point within this distance of the image, by one step (RSA-FT, arXiv 2603.21175): it
    follows no narrow peak, which rewards are hacked by. It costs a further pass of the rewards, and reports S1. 0 is none."""

    def trained_states(self, sigmas: list[float], derivatives: list[float], draw: Draw) -> list[TrainedState]:
        """The states that a training step trains, the same for all its images.

        Args:
            sigmas: T + 1 noise levels of the schedule.
            derivatives: T derivatives of the final latents by the velocity of each step.
            draw: draws a number of different indices in proportion to weights.
        """
        raise NotImplementedError

    def decoded_images(self, sampling_steps: int) -> tuple[int, int]:
        """How many latents are decoded for an image of a rollout: with a gradient, and without."""
        sigmas = [1 - i / sampling_steps for i in range(sampling_steps + 1)]
        states = self.trained_states(
            sigmas, [-1 / sampling_steps] * sampling_steps, lambda weights, count: list(range(count))
        )
        predicted = sum(state.predicted for state in states)
        trains_final = predicted < len(states)
        gradients, images = self.FURTHER_DECODES
        return predicted + trains_final + gradients, images + (0 if trains_final else 1)

    def loss(self, state: GradientState, advantage: Tensor) -> Loss:
        """The loss of n rows at a trained state."""
        return objectives.reward_gradient(state)


class Refl(RewardGradient):
    """ReFL: the image that the velocity of one late step predicts, arXiv 2304.05977.

    The step is drawn from the last `LATE_SHARE` of the schedule. Published: 10 of 40 steps, FlowBP's baseline 11 of 25.
    """

    LATE_SHARE: ClassVar[float] = 0.4

    name: Literal["refl"] = "refl"

    def losses_per_image(self, sampling_steps: int) -> int:
        return 1

    def trained_states(self, sigmas: list[float], derivatives: list[float], draw: Draw) -> list[TrainedState]:
        count = len(derivatives)
        late = max(1, round(self.LATE_SHARE * count))
        [drawn] = draw([1.0] * late, 1)
        step = count - late + drawn
        return [TrainedState(step, -sigmas[step], predicted=True)]


class Draft(RewardGradient):
    """DRaFT-LV: the last step, and copies of the image that are noised to its sigma and predicted again, arXiv 2309.17400."""

    NOISED_COPIES: ClassVar[int] = 2  # published

    name: Literal["draft"] = "draft"

    def losses_per_image(self, sampling_steps: int) -> int:
        return 1 + self.NOISED_COPIES

    def trained_states(self, sigmas: list[float], derivatives: list[float], draw: Draw) -> list[TrainedState]:
        last = len(derivatives) - 1
        copies = [TrainedState(last, -sigmas[last], predicted=True, noised_copy=j + 1) for j in range(self.NOISED_COPIES)]
        return [TrainedState(last, derivatives[last]), *copies]


class FlowBp(RewardGradient):
    """FlowBP: some steps of the whole rollout, late ones more often, each by its share in the final latents, arXiv 2606.11075.

    The factor of a step is c times its derivative, c = 1 + (sum of all absolute derivatives / sum of the trained ones - 1) / 2; a step i
    is drawn without replacement by a probability that grows as i + 1. The paper has Euler's steps, whose derivatives are their lengths.
    """

    TRAINED_STEPS: ClassVar[int] = 4  # published

    name: Literal["flowbp"] = "flowbp"

    def losses_per_image(self, sampling_steps: int) -> int:
        return min(self.TRAINED_STEPS, sampling_steps)

    def trained_states(self, sigmas: list[float], derivatives: list[float], draw: Draw) -> list[TrainedState]:
        steps = sorted(draw([float(i + 1) for i in range(len(derivatives))], self.losses_per_image(len(derivatives))))
        correction = 1 + 0.5 * (sum(map(abs, derivatives)) / sum(abs(derivatives[i]) for i in steps) - 1)
        return [TrainedState(i, correction * derivatives[i]) for i in steps]


class MovedImages(RewardGradient):
    """An objective on images of a slow copy of the policy that are moved by the reward's gradient; it predicts them from a late state."""

    SIGMA: ClassVar[float] = 0.28  # the trained state is the one before the step that is nearest to it
    MOVES_PREDICTION: ClassVar[bool] = False  # whether what is moved is the image predicted there, not the final one

    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the base model, the squared distance of the velocities at the trained states. Published: none."""
    smoothing: Annotated[float, Field(ge=0, le=1)] = 0.0
    """As for `flowbp`. Published: none."""

    @property
    def policy_copies(self) -> dict[str, float | DecayRamp]:
        return {OLD_ADAPTER: DecayRamp(rate=0.001, max=0.5)}

    @property
    def sampling_adapter(self) -> str | None:
        return OLD_ADAPTER

    def losses_per_image(self, sampling_steps: int) -> int:
        return 1

    def trained_states(self, sigmas: list[float], derivatives: list[float], draw: Draw) -> list[TrainedState]:
        step = min(range(len(derivatives)), key=lambda i: abs(sigmas[i] - self.SIGMA))
        return [TrainedState(step, -sigmas[step], predicted=self.MOVES_PREDICTION)]


class Mend(MovedImages):
    """MEND: images are moved along the reward's gradient where that raises it, and the policy learns to predict them, arXiv 2610.05954.

    An image is moved if its reward is below `REWARD_QUANTILE` of its group's, or below a ceiling that follows the median of all images.
    Of `MOVES`, in the rms of the latents, it takes the one that gains most reward, capped there, less the squared length over twice tau,
    or none. Tau adapts so that 30 to 60 % of the tried images move. All numbers are published.
    """

    MOVES: ClassVar[tuple[float, ...]] = (0.1, 0.2, 0.4)
    FURTHER_DECODES: ClassVar[tuple[int, int]] = (0, len(MOVES))
    KEPT_WEIGHT: ClassVar[float] = 10.0
    REWARD_QUANTILE: ClassVar[float] = 0.75

    name: Literal["mend"] = "mend"
    needs: ClassVar[Needs] = Needs(reward_gradient=True, single_update=True, moves="if_better")

    def loss(self, state: GradientState, advantage: Tensor) -> Loss:
        return objectives.mend(state, advantage)


class Opsd(MovedImages):
    """DiffusionOPSD: nft whose targets are an image moved up and down the reward's gradient, arXiv 2608.24646.

    What is moved is the image that the copy predicts at the trained state: by `BUDGET` of its norm, in `MOVES` equal steps, each along
    the gradient where it is. Advantages weigh the two targets. The copy's decay and the implicit policies' beta of 1 are those of nft:
    an assumption of ours.
    """

    MOVES_PREDICTION: ClassVar[bool] = True
    BUDGET: ClassVar[float] = 0.1
    MOVES: ClassVar[int] = 2
    FURTHER_DECODES: ClassVar[tuple[int, int]] = (2 * (MOVES - 1), 0)

    name: Literal["opsd"] = "opsd"
    needs: ClassVar[Needs] = Needs(reward_gradient=True, single_update=True, moves="both_ways")

    def loss(self, state: GradientState, advantage: Tensor) -> Loss:
        return objectives.opsd(state, advantage)


# -- a user's own -----------------------------------------------------------------------------------------------------


class OwnFunction(Objective):
    """The settings of a user's own function of either family."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own function."""
    needs: ClassVar[Needs] = Needs(ratio=True)


class CustomStepwise(OwnFunction, StepWeight, Stepwise):
    """A user's own function on sampling steps: (TrainedStep, advantage (n,)) -> Loss."""

    family: Literal["stepwise"] = "stepwise"
    """The input of your own function: sampling steps, or with forward_process noised final latents."""


class CustomForwardProcess(OwnFunction, ForwardProcess):
    """A user's own function on noised final latents: (NoisedImage, advantage (n,)) -> Loss."""

    family: Literal["forward_process"]
    """The input of your own function: noised final latents, or with stepwise sampling steps."""


def is_custom(name: str) -> bool:
    """Whether an objective or advantage is a user's own function, written as my_module:my_fn or file.py:my_fn."""
    return ":" in name
