"""Objectives on the per-step log-probabilities of an SDE rollout. The formulas are in `flow_grpo/objectives.py`."""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from torch import Tensor

from flow_grpo import objectives
from flow_grpo.config.objective import CustomFunction, Needs, Objective
from flow_grpo.config.sections import ConfigSection, PositiveFloat, PositiveInt
from flow_grpo.errors import FlowGRPOError
from flow_grpo.sde import TRANSITIONS, Transition
from flow_grpo.text import suggest
from flow_grpo.types import Loss, TrainedStep


class Clip(Objective):
    clip_low: PositiveFloat | Literal["auto"] = 1e-4
    """The ratio is clipped at 1 - clip_low. Log-probabilities are means over the latent, so the range is small. `auto` takes it from the
    ratios seen at each step: 0.9 of them are inside."""
    clip_high: PositiveFloat | Literal["auto"] = 1e-4
    """The ratio is clipped at 1 + clip_high; above clip_low it is DAPO's clip-higher."""

    @property
    def has_auto_clip(self) -> bool:
        return "auto" in (self.clip_low, self.clip_high)

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
        """The last step that may be trained, of `sampling_steps`."""
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

    def num_losses(self, sampling_steps: int) -> int:
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


class CustomStepwise(CustomFunction, StepWeight, Stepwise):
    """A user's own function on sampling steps: (TrainedStep, advantage (n,)) -> Loss."""

    family: Literal["stepwise"] = "stepwise"
    """The input of your own function: sampling steps, or with forward_process noised final latents."""
