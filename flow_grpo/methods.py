"""What each objective, advantage and transition needs of the rest of the program, and which settings it reads.

The formulas are in `objectives.py`, `advantages.py` and `sde.py`. A new one is a function there and a row here.
"""

from dataclasses import dataclass
from typing import Literal

CLIP = ("clip_low", "clip_high")  # the settings of the group `clip`
AUTO_CLIP = ("clip", "clip_quantile")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What training must provide.

    Attributes:
        stepwise: it is computed from the per-step log-probabilities of an SDE rollout; else from noised final latents of an ODE rollout.
        settings: the groups of settings that it reads, in addition to those that all objectives read: keys of `config.objective.SETTINGS`.
        function: the name of its function in `objectives.py`; "" if it has the objective's own name.
        ratio: it compares with the policy that sampled the images.
        zero_at_zero_advantage: a row's loss is 0 where its advantage is 0.
        zero_at_ratio_1: a row's loss is 0 where its advantage is 0 and the ratio is 1, as it is with one update on a rollout.
        gaussian: its formula holds for Gaussian log-probabilities alone.
        single_update: it is right for one update on a rollout alone.
        rows: the images of a group that it trains on.
        reference: it needs the velocity of the base model, also without a KL.
        old_policy: it needs an adapter that slowly follows the trained one.
        critic: its advantages come from a critic.
        group_mean: the function of `objectives.py` whose mean over a group's images it needs; "" if none.
    """

    stepwise: bool
    settings: tuple[str, ...] = ()
    function: str = ""
    ratio: bool = False
    zero_at_zero_advantage: bool = False
    zero_at_ratio_1: bool = False
    gaussian: bool = False
    single_update: bool = False
    rows: Literal["all", "best", "best_and_worst"] = "all"
    reference: bool = False
    old_policy: bool = False
    critic: bool = False
    group_mean: str = ""

    @property
    def offline(self) -> bool:
        """Whether it can train on given images."""
        return "dataset" in self.settings

    @property
    def auto_clip(self) -> bool:
        """Whether its clip range can be taken from the ratios seen at each step."""
        return "clip_quantile" in self.settings

    @property
    def takes_advantage(self) -> bool:
        """Whether it trains on advantages that are made of a group's rewards."""
        return self.rows == "all" and not self.critic

    @property
    def rows_per_pair(self) -> int:
        """The rows that must stay together in one forward pass."""
        return 2 if self.rows == "best_and_worst" else 1


OBJECTIVES = {
    "grpo": Objective(stepwise=True, settings=(*AUTO_CLIP, "step_weight"), ratio=True, zero_at_zero_advantage=True),
    "reinforce": Objective(stepwise=True, settings=("step_weight",), zero_at_zero_advantage=True, single_update=True),
    "grpo_guard": Objective(stepwise=True, settings=AUTO_CLIP, ratio=True, zero_at_zero_advantage=True, gaussian=True),
    "dppo": Objective(
        stepwise=True, settings=("dppo", "step_weight"), ratio=True, zero_at_zero_advantage=True, gaussian=True
    ),
    "ppo": Objective(stepwise=True, settings=(*AUTO_CLIP, "step_weight", "ppo"), function="grpo", ratio=True, critic=True),
    "awm": Objective(
        stepwise=False, settings=("noise_levels", "clip", "awm", "latent_unit"), ratio=True, zero_at_zero_advantage=True
    ),
    "epg": Objective(stepwise=False, settings=("noise_levels", "latent_unit"), ratio=True, zero_at_zero_advantage=True),
    "pepg": Objective(stepwise=False, settings=("noise_levels", "latent_unit"), ratio=True, zero_at_ratio_1=True),
    "par": Objective(stepwise=False, settings=("noise_levels", "latent_unit"), ratio=True, zero_at_ratio_1=True),
    "nft": Objective(stepwise=False, settings=("noise_levels", "nft", "old_policy"), old_policy=True),
    "crd": Objective(
        stepwise=False, settings=("noise_levels", "crd", "old_policy"), old_policy=True, group_mean="crd_residual"
    ),
    "dgpo": Objective(
        stepwise=False,
        settings=("noise_levels", "dgpo"),
        zero_at_zero_advantage=True,
        reference=True,
        group_mean="dgpo_preference",
    ),
    "sft": Objective(stepwise=False, settings=("noise_levels", "dataset"), rows="best"),
    "dpo": Objective(stepwise=False, settings=("noise_levels", "dataset", "dpo"), rows="best_and_worst", reference=True),
}
# settings of advantages that are made of a group's rewards
ADVANTAGE_SETTINGS = ("advantage", "reward_cap", "diversity_weight")
# settings of the config's section `sampling` that objectives on steps read
STEPWISE_SAMPLING = ("noise_level", "window", "log_prob", "shared_initial_noise", "branches", "keep_graphs")
# of a user's own function, on steps or on final latents
CUSTOM_STEPWISE, CUSTOM_FORWARD = ("step_weight",), ("noise_levels",)
CUSTOM_SETTINGS = ("options", *CUSTOM_STEPWISE, *CUSTOM_FORWARD)


@dataclass(frozen=True)
class Advantage:
    """How rewards of a group are compared.

    Attributes:
        over_batch: it compares with the whole batch, so that a group whose rewards are equal still has advantages that are not 0.
        each_reward: it takes several rewards one by one, not their weighted sum.
    """

    over_batch: bool = False
    each_reward: bool = False


ADVANTAGES = {
    "grpo": Advantage(),
    "batch_std": Advantage(),
    "dr_grpo": Advantage(),
    "rloo": Advantage(),
    "reinforce_pp": Advantage(over_batch=True),
    "gdpo": Advantage(each_reward=True),
    "rank": Advantage(),
}


@dataclass(frozen=True)
class Transition:
    """A sampling step.

    Attributes:
        stochastic: it adds noise, so that it has a log-probability.
        noise_at_end: also the step to sigma 0 adds noise.
        noise_level: the default of `noise_level`.
        max_noise_level: the largest that it is defined for.
        infinite_at_1: its noise is infinite at sigma = 1, so that a first step takes the schedule's second sigma.
        has_g: it is an Euler step of an SDE with a diffusion coefficient g.
        between_images: its noise lies on the line to another image of the group; the std is in units of their difference.
    """

    stochastic: bool = True
    noise_at_end: bool = False
    noise_level: float = 0.7
    max_noise_level: float = float("inf")
    infinite_at_1: bool = False
    has_g: bool = False
    between_images: bool = False


TRANSITIONS = {
    "ode": Transition(stochastic=False),
    "flow_sde": Transition(noise_at_end=True, infinite_at_1=True, has_g=True),
    "dance_sde": Transition(noise_at_end=True, has_g=True),
    "cps": Transition(max_noise_level=1.0),
    "exact_sde": Transition(),
    "difference": Transition(noise_at_end=True, noise_level=3.0, between_images=True),
}


def is_custom(name: str) -> bool:
    """Whether an objective or advantage is a user's own function, written as my_module:my_fn or file.py:my_fn."""
    return ":" in name


def objective(name: str, stepwise: bool) -> Objective:
    """Return an objective's row; for a custom function, by import path, a row with defaults.

    Args:
        stepwise: whether the run trains on steps, for a custom function.
    """
    if is_custom(name):
        return Objective(stepwise=stepwise, settings=CUSTOM_SETTINGS, ratio=True)
    return OBJECTIVES[name]


def velocities_per_rollout(solver: str, steps: int) -> int:
    """Number of velocities that an ODE solver evaluates in `steps` sampling steps."""
    return 2 * steps - 1 if solver == "heun" else steps


def reads_sampling(method: Objective, setting: str) -> bool:
    """Whether an objective reads a setting of the config's section `sampling`."""
    return method.stepwise or setting not in STEPWISE_SAMPLING
