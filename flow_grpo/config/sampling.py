"""Settings of the section `sampling`: how rollouts sample, and which of their steps are trained."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from flow_grpo.config.sections import ConfigSection, PositiveInt
from flow_grpo.errors import FlowGRPOError
from flow_grpo.text import suggest

if TYPE_CHECKING:
    from flow_grpo.sde import Transition


# what objectives on steps alone read
STEPWISE_SETTINGS = ("noise_level", "window", "shared_initial_noise", "keep_graphs")


def transitions() -> "dict[str, Transition]":
    """The rows of `sde.TRANSITIONS`, imported when they are needed, since they load torch."""
    from flow_grpo.sde import TRANSITIONS

    return TRANSITIONS


def _with_names(schema: dict[str, Any]) -> None:
    schema["enum"] = list(transitions())


class WindowConfig(ConfigSection):
    schedule: Literal["all", "fixed", "random"] = "all"
    """Which steps are stochastic and trained. `all`: first_step to last_step. Otherwise `size` adjacent steps: `fixed`, from
    first_step, or `random`, drawn for each training step. `flow-grpo doctor --step-variance` measures which steps move the reward."""
    size: PositiveInt = 3
    """Steps in the window; `all` ignores it."""
    first_step: Annotated[int, Field(ge=0)] = 0
    """The first step that may be trained."""
    last_step: int | None = None
    """The last step that may be trained; by default the last but one, since the step to sigma 0 may have no noise to learn from."""


class SamplingConfig(ConfigSection):
    steps: Annotated[int, Field(ge=2, le=10_000)] = 10
    """Sampling steps in training."""
    transition: Annotated[str, Field(json_schema_extra=_with_names)] = "flow_sde"
    """The transition of the trained steps: one that adds noise, or `ode`, which forward-process objectives need."""
    noise_level: Annotated[float, Field(ge=0)] = 0.7
    """How much noise a trained step adds."""
    window: WindowConfig = WindowConfig()
    shared_initial_noise: bool = False
    """Whether the images of a group start from the same noise and differ from the window's first step on. Earlier steps are
    computed once per group. With a window of one step, rewards differ only by its noise (TempFlow, arXiv 2508.04324)."""
    keep_graphs: bool = False
    """Whether the update uses the rollout's own graphs of the trained steps in place of replaying them (LeanGRPO, arXiv 2609.03528):
    faster, same gradient, for one update on a rollout. All graphs of a step are in memory at once, see `flow-grpo plan`."""
    solver: Literal["euler", "dpm_2m"] = "euler"
    """How rollouts solve the ODE, all of their steps or those outside the window (MixGRPO-Flash, arXiv 2507.21802). `dpm_2m`
    (DPM-Solver++ 2M, arXiv 2211.01095) has order 2 with one velocity a step."""

    @property
    def last_trainable_step(self) -> int:
        """`window.last_step`, or its default: the last step but one."""
        return self.steps - 2 if self.window.last_step is None else self.window.last_step

    @property
    def num_trained_steps(self) -> int:
        """The length of the window."""
        return self.last_trainable_step - self.window.first_step + 1 if self.window.schedule == "all" else self.window.size

    @field_validator("transition")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in (known := transitions()):
            close = suggest(name, list(known))
            raise FlowGRPOError(f"sampling.transition={name} is no transition.{close} Choose one of {', '.join(known)}.")
        return name
