"""The section `objective`: what every objective has, with what training must provide for it.

Three families: `Stepwise` objectives train the Gaussian steps of an SDE rollout; `ForwardProcess` objectives the final latents of an ODE
rollout, noised afresh; `RewardGradient` objectives states of an ODE rollout, by the gradient of rewards at its end. Each has a file, with
one class per objective: its settings and its loss. A class with a default `name` is an objective: it is found by that name from then on.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from flow_grpo.advantages import ADVANTAGES
from flow_grpo.config.anchor_config import AnchorConfig, DecayRamp, NamedAnchor, name_anchors
from flow_grpo.config.sections import ConfigSection
from flow_grpo.errors import FlowGRPOError
from flow_grpo.text import suggest

OLD_ADAPTER = "old"  # the adapter that slowly follows the trained one; checkpoints have this name
CUSTOM = "file.py:function"  # stands for a user's own function in lists of names
KL = Literal["gaussian", "k3", "flow_grpo", "velocity"]


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
        reward_gradient: it trains by gradients of rewards. It does not use advantages, unless `moves` is both_ways.
        anchors: it trains towards its anchors alone.
        moves: it trains on images that are moved by the reward's gradient: along it if that is better, or both along and against it,
            weighed by advantages.
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
    """Weight of the KL to the base model, averaged over all images, including groups with equal rewards. That of sft and dpo is summed
    over the images they train on, and divided by the number that all groups would give."""
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

    def num_losses(self, sampling_steps: int) -> int:
        """The number of losses of an image: one for each trained step or noise level.

        Args:
            sampling_steps: of a rollout.
        """
        raise NotImplementedError

    def check_steps(self, sampling_steps: int) -> None:
        """Raise FlowGRPOError if a setting does not fit a rollout of `sampling_steps` steps."""

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


OBJECTIVES: dict[str, type[Objective]] = {}  # by name; config/objective_by_name.py imports those of this package


class CustomFunction(Objective):
    """The settings of a user's own function, which is stepwise or forward-process; none is by the gradient of rewards."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own function."""
    needs: ClassVar[Needs] = Needs(ratio=True)


def is_custom(name: str) -> bool:
    """Whether an objective or advantage is a user's own function, written as my_module:my_fn or file.py:my_fn."""
    return ":" in name
