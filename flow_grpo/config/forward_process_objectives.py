"""Objectives on the final latents of an ODE rollout, noised afresh. The formulas are in `flow_grpo/objectives.py`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor

from flow_grpo import objectives
from flow_grpo.config.anchor_config import AnchorConfig, Decay, DecayRamp
from flow_grpo.config.objective import OLD_ADAPTER, CustomFunction, Needs, Objective
from flow_grpo.config.sections import PathText, PositiveFloat, Share
from flow_grpo.errors import FlowGRPOError
from flow_grpo.types import Loss, NoisedImage


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

    def num_losses(self, sampling_steps: int) -> int:
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


class Awm(LatentUnit, ForwardProcess):
    """Advantage Weighted Matching: PPO's clip on the error of the velocity, arXiv 2509.25050."""

    name: Literal["awm"] = "awm"
    clip_low: PositiveFloat = 1e-4
    """The ratio is clipped at 1 - clip_low. Log-probabilities are means over the latent, so the range is small."""
    clip_high: PositiveFloat = 1e-4
    """The ratio is clipped at 1 + clip_high."""
    loss_weight: Literal["uniform", "ghuber", "adaptive"] = "uniform"
    """Weight of the matching loss; `adaptive` divides it by its mean absolute error, as pepg does (arXiv 2602.04663)."""
    needs: ClassVar[Needs] = Needs(ratio=True, zero_at_zero_advantage=True)

    def loss(self, image: NoisedImage, advantage: Tensor) -> Loss:
        low, high = self.clip_low, self.clip_high
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


class CustomForwardProcess(CustomFunction, ForwardProcess):
    """A user's own function on noised final latents: (NoisedImage, advantage (n,)) -> Loss."""

    family: Literal["forward_process"]
    """The input of your own function: noised final latents, or with stepwise sampling steps."""
