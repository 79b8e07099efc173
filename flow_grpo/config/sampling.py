"""Settings of the section `sampling`: how rollouts sample, and which of their steps are trained."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from flow_grpo.config.sections import ConfigSection, PositiveInt
from flow_grpo.errors import FlowGRPOError
from flow_grpo.methods import TRANSITIONS
from flow_grpo.text import suggest


class WindowConfig(ConfigSection):
    schedule: Literal["all", "fixed", "random", "sliding", "auto"] = "all"
    """Which steps are stochastic and trained. `all`: first_step to last_step. Otherwise `size` adjacent steps: `fixed`, from
    first_step; `random`, drawn for each training step; `sliding`, moved by one every `shift_every` training steps; `auto`,
    the adjacent steps with the largest reward variance, measured before training."""
    size: PositiveInt = 3
    """Steps in the window; `all` ignores it."""
    first_step: Annotated[int, Field(ge=0)] = 0
    """The first step that may be trained."""
    last_step: int | None = None
    """The last step that may be trained; by default the last but one, since the step to sigma 0 may have no noise to learn from."""
    shift_every: PositiveInt = 25
    """Training steps after which a sliding window moves on by one."""


class SamplingConfig(ConfigSection):
    steps: Annotated[int, Field(ge=2)] = 10
    """Sampling steps in training."""
    transition: Annotated[str, Field(json_schema_extra={"enum": list(TRANSITIONS)})] = "flow_sde"
    """The transition of the trained steps: one that adds noise, or `ode`, which forward-process objectives need."""
    noise_level: Annotated[float, Field(ge=0)] = 0.7
    """How much noise a trained step adds. Of `difference`, in units of the difference of two predicted images: 3 if not given."""
    window: WindowConfig = WindowConfig()
    log_prob: Literal["gaussian", "unnormalized"] = "gaussian"
    """The log-probability of a step; `unnormalized` is what Flow-CPS published."""
    shared_initial_noise: bool = False
    """Whether the images of a group start from the same noise and differ from the window's first step on. Earlier steps are
    computed once per group. With a window of one step, rewards differ only by its noise (TempFlow, arXiv 2508.04324)."""
    branches: list[Annotated[int, Field(ge=2)]] = Field(default_factory=list)
    """Samples a group as a tree (BranchGRPO, arXiv 2509.06040): its images start from the same noise, and at step i
    of the window every state splits into branches[i] branches; [2, 2, 2] makes 8 images. Shared steps are computed once, and
    a step has the advantage of its branch: the mean reward of the branch's images against the group's other branches."""
    keep_graphs: bool = False
    """Whether the update uses the rollout's own graphs of the trained steps in place of replaying them (LeanGRPO, arXiv 2609.03528):
    faster, same gradient, for one update on a rollout. All graphs of a step are in memory at once, see `flow-grpo plan`."""
    solver: Literal["euler", "heun", "dpm_2m", "ab2"] = "euler"
    """How rollouts solve the ODE, all of their steps or those outside the window (MixGRPO-Flash, arXiv 2507.21802). Of order 2: `dpm_2m`
    (DPM-Solver++ 2M, arXiv 2211.01095), `ab2` (Adams-Bashforth) and, with two velocities a step and without a window, `heun`."""

    @property
    def last_trainable_step(self) -> int:
        """`window.last_step`, or its default: the last step but one."""
        return self.steps - 2 if self.window.last_step is None else self.window.last_step

    @property
    def num_trained_steps(self) -> int:
        """The length of the window."""
        return self.last_trainable_step - self.window.first_step + 1 if self.window.schedule == "all" else self.window.size

    def tree(self, images: int) -> list[int]:
        """The branches of a group of `images` images; [] if each image starts from its own noise."""
        return self.branches or ([images] if self.shared_initial_noise else [])

    @model_validator(mode="before")
    @classmethod
    def _noise_level_of_the_transition(cls, values: Any) -> Any:
        transition = TRANSITIONS.get(str(values.get("transition"))) if isinstance(values, dict) else None
        return values if transition is None else {"noise_level": transition.noise_level, **values}

    @field_validator("transition")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in TRANSITIONS:
            close = suggest(name, list(TRANSITIONS))
            raise FlowGRPOError(
                f"sampling.transition={name} is no transition.{close} Choose one of {', '.join(TRANSITIONS)}."
            )
        return name
