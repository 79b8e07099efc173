"""The section `objective`: one class per objective, with its settings, what training must provide for it, and its loss.

A class with a default `name` is an objective: it is found by that name from then on. The formulas are in `flow_grpo/objectives.py`.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from flow_grpo.config.anchors import KL, AnchorConfig, Decay, DecayRamp, NamedAnchor, name_anchors
from flow_grpo.config.sections import ConfigSection, PathText, PositiveFloat, PositiveInt, Share
from flow_grpo.errors import FlowGRPOError
from flow_grpo.text import suggest

if TYPE_CHECKING:
    from torch import Tensor

    from flow_grpo.types import Loss, NoisedImage, TrainedStep

OLD_ADAPTER = "old"  # the adapter that slowly follows the trained one; checkpoints have this name
CUSTOM = "file.py:function"  # stands for a user's own function in lists of names


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What training must provide for an objective.

    Attributes:
        ratio: it compares with the policy that sampled the images.
        zero_at_zero_advantage: a row's loss is 0 where its advantage is 0.
        zero_at_ratio_1: a row's loss is 0 where its advantage is 0 and the ratio is 1, as it is with one update on a rollout.
        single_update: it is right for one update on a rollout alone.
        rows: the images of a group that it trains on.
        reference: it needs the velocity of the base model, also without a KL.
        old_policy: it needs an adapter that slowly follows the trained one.
        critic: its advantages come from a critic.
        group_mean: it needs the mean over a group's images of its `group_statistic`.
    """

    ratio: bool = False
    zero_at_zero_advantage: bool = False
    zero_at_ratio_1: bool = False
    single_update: bool = False
    rows: Literal["all", "best", "best_and_worst"] = "all"
    reference: bool = False
    old_policy: bool = False
    critic: bool = False
    group_mean: bool = False

    @property
    def takes_advantage(self) -> bool:
        """Whether it trains on advantages that are made of a group's rewards."""
        return self.rows == "all" and not self.critic

    @property
    def rows_per_pair(self) -> int:
        """The rows that must stay together in one forward pass."""
        return 2 if self.rows == "best_and_worst" else 1


class Objective(ConfigSection):
    """What every objective reads."""

    needs: ClassVar[Needs] = Needs()
    stepwise: ClassVar[bool | None] = None  # on the log-probabilities of sampling steps; None: the transition decides

    name: str
    """The objective: grpo, reinforce, grpo_guard, dppo or ppo on per-step log-probabilities; awm, pepg, nft, crd, dgpo, sft or dpo on
    final latents noised afresh. Your own: my_module:my_fn or file.py:my_fn. With `sampling.transition: ode` it receives noised latents,
    otherwise sampling steps."""
    advantage: str = "grpo"
    """How rewards become advantages: grpo, batch_std, dr_grpo, rloo, reinforce_pp, gdpo, rank, or your own function
    (reward (B,), group (B,)) -> (B,) as my_module:my_fn or file.py:my_fn. Their formulas are in flow_grpo/advantages.py."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the base model, averaged over all images, including groups with equal rewards (for sft and dpo over the images
    they train on)."""
    kl: KL | None = None
    """Which KL: of the transitions (`gaussian`, the default on steps), DeepSeekMath's estimator from log-probabilities (`k3`), the
    published code's, without the step's length (`flow_grpo`), or the distance of the velocities (`velocity`, the only one on final
    latents)."""
    anchors: list[AnchorConfig] = Field(default_factory=list)
    """Further references to hold the policy near, each with its weight, such as [{to: ema, weight: 1, decay: 0.3}]; each reports its KL
    as kl/ema. `kl_weight` is the short form of one to the base model, and is added to them."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The settings of one objective, which its class alone has."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.model_fields["name"].description = Objective.model_fields["name"].description
        if not cls.model_fields["name"].is_required():
            OBJECTIVES[cls.model_fields["name"].default] = cls

    @property
    def named_anchors(self) -> list[NamedAnchor]:
        """All anchors with their names, that of `kl_weight` first."""
        short = AnchorConfig(to="base", weight=self.kl_weight, kl=self.kl) if self.kl_weight else None
        return name_anchors(self.anchors, [NamedAnchor(short, "kl", "base")] if short else [])

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

    @property
    def has_auto_clip(self) -> bool:
        """Whether the clip range is to be calibrated on the ratios of each step."""
        return False

    @property
    def auto_clip_quantile(self) -> float | None:
        """The share of ratios inside a calibrated clip range; None if the objective calibrates none."""
        return None

    @property
    def weighs_by_std(self) -> bool:
        """Whether each step's loss is weighed by the transition's std."""
        return False


OBJECTIVES: dict[str, type[Objective]] = {}  # by name, in the order of this file


# -- settings that several objectives share ---------------------------------------------------------------------------


class Clip(Objective):
    clip_low: PositiveFloat | Literal["auto"] = 1e-4
    """The ratio is clipped at 1 - clip_low. Log-probabilities are means over the latent, so the range is small. `auto` takes it from the
    ratios seen at each step."""
    clip_high: PositiveFloat | Literal["auto"] = 1e-4
    """The ratio is clipped at 1 + clip_high; above clip_low it is DAPO's clip-higher."""

    @property
    def has_auto_clip(self) -> bool:
        return "auto" in (self.clip_low, self.clip_high)

    def clip_range(self, observed: float = math.inf) -> tuple[float, float]:
        """clip_low and clip_high, with the observed range in place of `auto`."""
        low, high = (observed if value == "auto" else value for value in (self.clip_low, self.clip_high))
        return low, high


class AutoClip(Clip):
    clip_quantile: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """With clip_low or clip_high `auto`: the share of ratios inside the clip range."""

    @property
    def auto_clip_quantile(self) -> float | None:
        return self.clip_quantile


class StepWeight(Objective):
    step_weight: Literal["uniform", "std"] = "uniform"
    """Weight of a step's loss; `std` weighs by the transition's std (TempFlow, arXiv 2508.04324), which makes up for the 1 / std in the
    gradient of a log-probability."""

    @property
    def weighs_by_std(self) -> bool:
        return self.step_weight == "std"


class NoiseLevels(Objective):
    """The noise levels at which a forward-process objective noises final latents."""

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

    def steps_in_range(self, steps: int) -> list[int]:
        """The steps i of a schedule of this length whose 1 - i / steps is in sigma_range."""
        low, high = self.sigma_range
        return [i for i in range(steps) if low - 1e-9 <= 1 - i / steps <= high + 1e-9]


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
    """Which policy samples a step's images: the trained one, or the old one, as nft was published."""

    @property
    def policy_copies(self) -> dict[str, float | DecayRamp]:
        return {OLD_ADAPTER: self.old_policy_decay}

    @property
    def sampling_adapter(self) -> str | None:
        return OLD_ADAPTER if self.rollout_policy == "old" else None


# -- objectives on the log-probabilities of sampling steps ------------------------------------------------------------


class Stepwise(Objective):
    """An objective on the per-step log-probabilities of an SDE rollout."""

    stepwise: ClassVar[bool | None] = True

    def loss(self, step: "TrainedStep", advantage: "Tensor", observed_clip: float = math.inf) -> "Loss":
        """The loss of n rows at one trained step.

        Args:
            observed_clip: the clip range that was seen at this step, for `clip_low: auto`.
        """
        raise NotImplementedError


class Grpo(AutoClip, StepWeight, Stepwise):
    """PPO's clipped ratio on per-step log-probabilities, arXiv 2402.03300 and 2505.05470."""

    name: Literal["grpo"] = "grpo"
    needs: ClassVar[Needs] = Needs(ratio=True, zero_at_zero_advantage=True)

    def loss(self, step: "TrainedStep", advantage: "Tensor", observed_clip: float = math.inf) -> "Loss":
        from flow_grpo import objectives

        low, high = self.clip_range(observed_clip)
        return objectives.grpo(step, advantage, low, high)


class Reinforce(StepWeight, Stepwise):
    """Advantage times log-probability, for one update on a rollout."""

    name: Literal["reinforce"] = "reinforce"
    needs: ClassVar[Needs] = Needs(zero_at_zero_advantage=True, single_update=True)

    def loss(self, step: "TrainedStep", advantage: "Tensor", observed_clip: float = math.inf) -> "Loss":
        from flow_grpo import objectives

        return objectives.reinforce(step, advantage)


class GrpoGuard(AutoClip, Stepwise):
    """GRPO with a centred ratio of one scale at every step, arXiv 2510.22319."""

    name: Literal["grpo_guard"] = "grpo_guard"
    needs: ClassVar[Needs] = Needs(ratio=True, zero_at_zero_advantage=True)

    def loss(self, step: "TrainedStep", advantage: "Tensor", observed_clip: float = math.inf) -> "Loss":
        from flow_grpo import objectives

        low, high = self.clip_range(observed_clip)
        return objectives.grpo_guard(step, advantage, low, high)


class Dppo(StepWeight, Stepwise):
    """A divergence mask in place of the clip, arXiv 2606.11025."""

    name: Literal["dppo"] = "dppo"
    threshold: Annotated[float, Field(ge=0)] = 1e-5
    """The divergence of new and old step from which on an update may not push further. Published: 1e-5 and 1e-6, for means over the
    latent."""
    needs: ClassVar[Needs] = Needs(ratio=True, zero_at_zero_advantage=True)

    def loss(self, step: "TrainedStep", advantage: "Tensor", observed_clip: float = math.inf) -> "Loss":
        from flow_grpo import objectives

        return objectives.dppo(step, advantage, self.threshold)


class CriticConfig(ConfigSection):
    lr: PositiveFloat = 1e-3
    """Learning rate of the critic's AdamW."""
    width: PositiveInt = 128
    """Channels of the critic."""
    gae_lambda: Share = 0.95
    """Generalised advantage estimation: 1 uses the reward only, 0 the critic's next value only."""


class Ppo(AutoClip, StepWeight, Stepwise):
    """GRPO's clipped ratio with advantages of a critic, arXiv 1707.06347 and 1506.02438."""

    name: Literal["ppo"] = "ppo"
    critic: CriticConfig = CriticConfig()
    """The critic, which estimates advantages."""
    needs: ClassVar[Needs] = Needs(ratio=True, critic=True)

    def loss(self, step: "TrainedStep", advantage: "Tensor", observed_clip: float = math.inf) -> "Loss":
        from flow_grpo import objectives

        low, high = self.clip_range(observed_clip)
        return objectives.grpo(step, advantage, low, high)


# -- objectives on final latents, noised afresh -----------------------------------------------------------------------


class ForwardProcess(NoiseLevels):
    """An objective on the final latents of an ODE rollout, or of given images."""

    stepwise: ClassVar[bool | None] = False

    def loss(self, image: "NoisedImage", advantage: "Tensor") -> "Loss":
        """The loss of n rows at one noise level."""
        raise NotImplementedError

    def group_statistic(self, image: "NoisedImage", advantage: "Tensor") -> "Tensor":
        """A number of each row (n,) whose mean over a group the loss needs, in `image.group_mean`."""
        raise NotImplementedError


class Awm(Clip, LatentUnit, ForwardProcess):
    """Advantage Weighted Matching: PPO's clip on the error of the velocity, arXiv 2509.25050."""

    name: Literal["awm"] = "awm"
    loss_weight: Literal["uniform", "ghuber", "adaptive"] = "uniform"
    """Weight of the matching loss; `adaptive` divides it by its mean absolute error, as pepg does (arXiv 2602.04663)."""
    needs: ClassVar[Needs] = Needs(ratio=True, zero_at_zero_advantage=True)

    def loss(self, image: "NoisedImage", advantage: "Tensor") -> "Loss":
        from flow_grpo import objectives

        low, high = self.clip_range()
        return objectives.awm(
            image, advantage, low, high, loss_weight=self.loss_weight, sum_over_latents=self.sum_over_latents
        )


class Pepg(LatentUnit, ForwardProcess):
    """The policy gradient of an adaptively weighted matching error with a proximal term, arXiv 2602.04663."""

    name: Literal["pepg"] = "pepg"
    needs: ClassVar[Needs] = Needs(ratio=True, zero_at_ratio_1=True)

    def loss(self, image: "NoisedImage", advantage: "Tensor") -> "Loss":
        from flow_grpo import objectives

        return objectives.pepg(image, advantage, self.sum_over_latents)


class Nft(OldPolicy, ForwardProcess):
    """DiffusionNFT: towards good images and away from bad ones, relative to a slow copy of the policy, arXiv 2509.16117."""

    name: Literal["nft"] = "nft"
    beta: PositiveFloat = 1.0
    """How far the implicit policies are from the old one."""
    advantage_max: PositiveFloat = 5.0
    """Advantages are clipped to ±advantage_max and mapped to [0, 1]. It also scales the loss."""
    needs: ClassVar[Needs] = Needs(old_policy=True)

    def loss(self, image: "NoisedImage", advantage: "Tensor") -> "Loss":
        from flow_grpo import objectives

        return objectives.nft(image, advantage, self.beta, self.advantage_max)


class Crd(OldPolicy, ForwardProcess):
    """Centered Reward Distillation: the implicit reward regressed on the advantage, arXiv 2603.14128."""

    name: Literal["crd"] = "crd"
    beta: PositiveFloat = 1.0
    """Scale of the implicit reward: the larger, the less the policy moves from the old one for the same advantage."""
    advantage_max: PositiveFloat = 5.0
    """Advantages are clipped to ±advantage_max and mapped to [0, 1]. It also scales the loss."""
    needs: ClassVar[Needs] = Needs(old_policy=True, group_mean=True)

    def loss(self, image: "NoisedImage", advantage: "Tensor") -> "Loss":
        from flow_grpo import objectives

        return objectives.crd(image, advantage, self.beta, self.advantage_max)

    def group_statistic(self, image: "NoisedImage", advantage: "Tensor") -> "Tensor":
        from flow_grpo import objectives

        return objectives.crd_residual(image, advantage, self.beta, self.advantage_max)


class Dgpo(ForwardProcess):
    """Direct Group Preference Optimization: groups that are learned weigh less, arXiv 2510.08425."""

    name: Literal["dgpo"] = "dgpo"
    beta: PositiveFloat = 100.0
    """How sharply a group's mean preference decides its weight."""
    needs: ClassVar[Needs] = Needs(zero_at_zero_advantage=True, reference=True, group_mean=True)

    def loss(self, image: "NoisedImage", advantage: "Tensor") -> "Loss":
        from flow_grpo import objectives

        return objectives.dgpo(image, advantage)

    def group_statistic(self, image: "NoisedImage", advantage: "Tensor") -> "Tensor":
        from flow_grpo import objectives

        return objectives.dgpo_preference(image, advantage, self.beta)


class Sft(Dataset, ForwardProcess):
    """The best image of each group, or given images, as targets, arXiv 2210.02747."""

    name: Literal["sft"] = "sft"
    needs: ClassVar[Needs] = Needs(rows="best")

    def loss(self, image: "NoisedImage", advantage: "Tensor") -> "Loss":
        from flow_grpo import objectives

        return objectives.sft(image)


class Dpo(Dataset, ForwardProcess):
    """The best image of each group against the worst, or given pairs, arXiv 2311.12908."""

    name: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 500.0
    """How sharply the difference of two matching errors decides."""
    needs: ClassVar[Needs] = Needs(rows="best_and_worst", reference=True)

    def loss(self, image: "NoisedImage", advantage: "Tensor") -> "Loss":
        from flow_grpo import objectives

        return objectives.dpo(image, self.beta)


# -- a user's own -----------------------------------------------------------------------------------------------------


class Custom(StepWeight, NoiseLevels):
    """A user's own function, on sampling steps or, with `sampling.transition: ode`, on noised final latents."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own function."""
    needs: ClassVar[Needs] = Needs(ratio=True)


def is_custom(name: str) -> bool:
    """Whether an objective or advantage is a user's own function, written as my_module:my_fn or file.py:my_fn."""
    return ":" in name


def section_type(name: str) -> type[Objective]:
    """The class of an objective.

    Raises:
        FlowGRPOError: there is no such objective.
    """
    if is_custom(name):
        return Custom
    if name not in OBJECTIVES:
        known = list(OBJECTIVES)
        raise FlowGRPOError(f"there is no objective {name}.{suggest(name, known)} Choose one of {', '.join(known)}.")
    return OBJECTIVES[name]


def section_types() -> dict[str, type[Objective]]:
    """The class of each objective by its name, that of your own function last, as `file.py:function`."""
    return {**OBJECTIVES, CUSTOM: Custom}


def readers(setting: str) -> list[str]:
    """The objectives that read a setting of this section."""
    names = [name for name, section in section_types().items() if setting in section.model_fields]
    return ["your own function" if is_custom(name) else name for name in names]


def read_objective(values: Any) -> Any:
    """The objective that is named in a mapping. What is no mapping is returned as it is, for pydantic to judge.

    Raises:
        FlowGRPOError: the objective does not read one of the settings, or has no such setting, or there is no such objective.
    """
    if not isinstance(values, dict) or not isinstance(name := values.get("name", "grpo"), str):
        return values
    section = section_type(name)
    unread = next((key for key in values if key not in section.model_fields and readers(key)), None)
    if unread is not None:
        names = readers(unread)
        do = f"{names[0]} does" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} do"
        raise FlowGRPOError(f"objective {name} does not use {unread}; {do}: remove it.")
    return section.model_validate(values)
