"""The settings of the section `objective`: what all objectives read, and groups of settings, of which each objective reads some."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from flow_grpo import methods
from flow_grpo.config.anchors import CRDS_RAMP, KL, AnchorConfig, Decay, DecayRamp, NamedAnchor, name_anchors
from flow_grpo.config.sections import ConfigSection, PathText, PositiveFloat, PositiveInt, Share
from flow_grpo.errors import FlowGRPOError

# Adapters that slowly follow the trained one; checkpoints have these names.
OLD_ADAPTER, ROLLOUT_ADAPTER = "old", "rollout"


class ObjectiveConfig(ConfigSection):
    """What every objective reads. `section_type` adds the settings of one objective."""

    name: str = "grpo"
    """The objective: grpo, reinforce, grpo_guard, dppo or ppo on per-step log-probabilities; awm, epg, pepg, par, nft, crd, dgpo, sft or
    dpo on final latents noised afresh; or your own function. It is written as my_module:my_fn or file.py:my_fn, and is computed on steps
    if the transition is stochastic, else on final latents."""
    advantage: str = "grpo"
    """How rewards become advantages: grpo, batch_std, dr_grpo, rloo, reinforce_pp, gdpo, rank, or your own function
    (reward (B,), group (B,)) -> (B,) as my_module:my_fn or file.py:my_fn. Their formulas are in flow_grpo/advantages.py."""
    reward_cap: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Rewards are capped at this quantile of their group before they become advantages (MEND, arXiv 2610.05954: 0.75),
    against images that exploit the reward; null is none."""
    diversity_weight: str | None = None
    """A reward of weight 0, such as least_distance, that measures how different an image is from the others of its group.
    Positive advantages are multiplied by it, divided by its group mean (GARDO, arXiv 2512.24138, with advantage dr_grpo);
    null is none."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the base model, whose mean is over all images of a step, also of groups whose rewards are all equal (for sft
    and dpo over the images they train on)."""
    kl: KL | None = None
    """Which KL: of the transitions (`gaussian`, the default on steps), DeepSeekMath's estimator from log-probabilities (`k3`), the
    published code's, without the step's length (`flow_grpo`), or the distance of the velocities (`velocity`, the only one on final
    latents)."""
    anchors: list[AnchorConfig] = Field(default_factory=list)
    """Further references to hold the policy near, each with its weight, such as [{to: ema, weight: 1, decay: 0.3}]; each reports its KL
    as kl/ema. `kl_weight` is the short form of one to the base model, and is added to them."""
    norm_guard: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a penalty on velocities that are longer than the base model's (NormGuard, arXiv 2606.27771); 0 is none. Reported as
    velocity_norm/ratio."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The settings of one objective, which its section alone has."""

    @property
    def named_anchors(self) -> list[NamedAnchor]:
        """All anchors with their names, that of `kl_weight` first."""
        short = AnchorConfig(to="base", weight=self.kl_weight, kl=self.kl) if self.kl_weight else None
        return name_anchors(self.anchors, [NamedAnchor(short, "kl", "base")] if short else [])

    @property
    def references(self) -> list[str]:
        """Names of the references to evaluate: those of the anchors, and base if the objective or the norm guard needs it."""
        needed = not methods.is_custom(self.name) and methods.OBJECTIVES[self.name].reference
        base = ["base"] if needed or self.norm_guard else []
        return list(dict.fromkeys([*(anchor.reference for anchor in self.named_anchors), *base]))

    @property
    def is_anchored(self) -> bool:
        """Whether images without an advantage have a loss too, since the policy is held near a reference."""
        return bool(self.kl_weight or self.anchors or self.norm_guard)

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

    @property
    def gate_advantage_max(self) -> float:
        """The advantage at which an anchor's gate `advantage` is 1: that of objectives which map advantages to [0, 1] too, else CRD's."""
        return 5.0


class Clip(ObjectiveConfig):
    clip_low: PositiveFloat | Literal["auto"] = 1e-4
    """The ratio is clipped at 1 - clip_low. Log-probabilities are means over the latent, so the range is small; with the transition
    `difference` they are of one number, and it is larger. `auto` takes it from the ratios seen at each step."""
    clip_high: PositiveFloat | Literal["auto"] = 1e-4
    """The ratio is clipped at 1 + clip_high; above clip_low it is DAPO's clip-higher."""

    @property
    def has_auto_clip(self) -> bool:
        return "auto" in (self.clip_low, self.clip_high)


class ClipQuantile(ObjectiveConfig):
    clip_quantile: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """With clip_low or clip_high `auto`: the share of ratios inside the clip range."""

    @property
    def auto_clip_quantile(self) -> float | None:
        return self.clip_quantile


class StepWeight(ObjectiveConfig):
    step_weight: Literal["uniform", "std"] = "uniform"
    """Weight of a step's loss; `std` weighs by the transition's std (TempFlow, arXiv 2508.04324), which makes up for the 1 / std in the
    gradient of a log-probability."""

    @property
    def weighs_by_std(self) -> bool:
        return self.step_weight == "std"


class Dppo(ObjectiveConfig):
    threshold: Annotated[float, Field(ge=0)] = 1e-5
    """The divergence of new and old step from which on an update may not push further. Published: 1e-5 and 1e-6, for means over the
    latent; the divergence of `difference` is of one number, and larger."""


class CriticConfig(ConfigSection):
    lr: PositiveFloat = 1e-3
    """Learning rate of the critic's AdamW."""
    width: PositiveInt = 128
    """Channels of the critic."""
    gae_lambda: Share = 0.95
    """Generalised advantage estimation: 1 uses the reward only, 0 the critic's next value only."""


class Ppo(ObjectiveConfig):
    critic: CriticConfig = CriticConfig()
    """The critic, which estimates advantages."""


class NoiseLevels(ObjectiveConfig):
    """The noise levels at which a forward-process objective noises final latents."""

    num_noise_levels: PositiveInt = 1
    """Noise levels drawn for each prompt of a step; all its images (see shared_noise) and all epochs have the same."""
    sigma_range: tuple[Share, Share] = (0.0, 1.0)
    """The range those noise levels are drawn from, before the scheduler's shift."""
    sigma_distribution: Literal["uniform", "logit_normal", "schedule"] = "uniform"
    """How the noise levels are drawn from the range: `uniform`, `logit_normal`, or `schedule`, which takes sampling steps: those i of T
    whose 1 - i / T is in the range.
    logit_normal is low + (high - low) sigmoid(logit_location + logit_scale normal), as Stable Diffusion 3 was trained (arXiv 2403.03206).
    With schedule, several noise levels are different ones, as nft, crd and dgpo were published."""
    logit_location: float = 0.0
    """With logit_normal: where the noise levels are; above 0 noisier ones."""
    logit_scale: PositiveFloat = 1.0
    """With logit_normal: how far they spread."""
    shared_noise: bool = True
    """Whether the images of a prompt have the same noise levels and the same noise. false draws them for each image, as nft and crd were
    published; then differences of the images' losses are noisier."""

    def steps_in_range(self, steps: int) -> list[int]:
        """The steps i of a schedule of this length whose 1 - i / steps is in sigma_range."""
        low, high = self.sigma_range
        return [i for i in range(steps) if low - 1e-9 <= 1 - i / steps <= high + 1e-9]


class Dataset(ObjectiveConfig):
    dataset: PathText | None = None
    """Images to train on instead of rollouts: a table with the columns prompt and image (for dpo prompt, chosen and rejected), or, for sft,
    images that `flow-grpo sample` wrote."""


class Awm(ObjectiveConfig):
    """The settings of `awm` (arXiv 2509.25050)."""

    loss_weight: Literal["uniform", "ghuber", "adaptive"] = "uniform"
    """Weight of the matching loss; `adaptive` divides it by its mean absolute error, as epg does (arXiv 2602.04663)."""


class LatentUnit(ObjectiveConfig):
    sum_over_latents: bool = False
    """Whether the forward process's log-probability is a sum over the latent elements, as arXiv 2602.04663 publishes it, not their mean.
    Ratios, clip ranges and the weight of a KL are in that unit."""


class Nft(ObjectiveConfig):
    """The settings of `nft` (arXiv 2509.16117)."""

    beta: PositiveFloat = 1.0
    """How far the implicit policies are from the old one."""
    advantage_max: PositiveFloat = 5.0
    """Advantages are clipped to ±advantage_max and mapped to [0, 1]. It also scales the loss."""

    @property
    def gate_advantage_max(self) -> float:
        return self.advantage_max


class Crd(ObjectiveConfig):
    """The settings of `crd` (arXiv 2603.14128)."""

    beta: PositiveFloat = 1.0
    """Scale of the implicit reward: the larger, the less the policy moves from the old one for the same advantage."""
    advantage_max: PositiveFloat = 5.0
    """Advantages are clipped to ±advantage_max and mapped to [0, 1]. It also scales the loss."""

    @property
    def gate_advantage_max(self) -> float:
        return self.advantage_max


class OldPolicy(ObjectiveConfig):
    """The settings of objectives with a slowly moving copy of the policy."""

    old_policy_decay: Decay = 0.5
    """How slowly the old policy follows the trained one after each training step: 0 at once, 1 never. Or a ramp: for nft the published
    one is {rate: 0.001, max: 0.5}, for OCR {after: 75, rate: 0.0075, max: 0.999}; for crd {start: 0.25, rate: 0.005, max: 0.999}."""
    rollout_policy: Literal["trained", "old", "average"] = "trained"
    """Which policy samples a step's images: the trained one; the old one, as nft was published; or a second moving average, as crd was."""
    rollout_policy_decay: Decay = CRDS_RAMP
    """With rollout_policy average: how slowly it follows the trained policy, as of old_policy_decay; by default crd's published ramp."""

    @property
    def policy_copies(self) -> dict[str, float | DecayRamp]:
        copies = {OLD_ADAPTER: self.old_policy_decay, ROLLOUT_ADAPTER: self.rollout_policy_decay}
        return copies if self.rollout_policy == "average" else {OLD_ADAPTER: self.old_policy_decay}

    @property
    def sampling_adapter(self) -> str | None:
        return {"trained": None, "old": OLD_ADAPTER, "average": ROLLOUT_ADAPTER}[self.rollout_policy]

    @model_validator(mode="after")
    def _has_its_average(self) -> "OldPolicy":
        if self.rollout_policy_decay != CRDS_RAMP and self.rollout_policy != "average":
            raise FlowGRPOError(
                "objective.rollout_policy_decay is of an average that samples the images: set rollout_policy=average."
            )
        return self


class Dgpo(ObjectiveConfig):
    """The settings of `dgpo` (arXiv 2510.08425)."""

    beta: PositiveFloat = 100.0
    """How sharply a group's mean preference decides its weight."""


class Dpo(ObjectiveConfig):
    """The settings of `dpo` (arXiv 2311.12908)."""

    beta: PositiveFloat = 500.0
    """How sharply the difference of two matching errors decides."""


class Options(ObjectiveConfig):
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own function."""


SETTINGS: dict[str, type[ObjectiveConfig]] = {  # the groups of settings that rows of methods.py name
    "clip": Clip,
    "clip_quantile": ClipQuantile,
    "step_weight": StepWeight,
    "dppo": Dppo,
    "ppo": Ppo,
    "noise_levels": NoiseLevels,
    "dataset": Dataset,
    "awm": Awm,
    "latent_unit": LatentUnit,
    "nft": Nft,
    "crd": Crd,
    "old_policy": OldPolicy,
    "dgpo": Dgpo,
    "dpo": Dpo,
    "options": Options,
}
