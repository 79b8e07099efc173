"""Objectives by the gradient of rewards at the end of an ODE rollout. The formulas are in `flow_grpo/objectives.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from flow_grpo import objectives
from flow_grpo.config.anchor_config import DecayRamp
from flow_grpo.config.objective import OLD_ADAPTER, Needs, Objective
from flow_grpo.types import GradientState, Loss


@dataclass(frozen=True)
class TrainedState:
    """A state of a rollout whose velocity is trained.

    Attributes:
        step: of the schedule; the state is the one before it.
        factor: derivative of the endpoint by the velocity; by Euler's steps below 0.
        predicted: whether the endpoint is the image that the velocity predicts, not the final latents.
        copy_number: for a copy of the final latents that is noised to the sigma of `step`, its number, from 1 on; None for a visited state.
    """

    step: int
    factor: float
    predicted: bool = False
    copy_number: int | None = None


Draw = Callable[[list[float], int], list[int]]


class RewardGradient(Objective):
    """An objective on the gradient of differentiable rewards at the end of an ODE rollout.

    Its loss is linear in the velocity, unless it moves images: `MovedImages` have losses of their own.
    """

    needs: ClassVar[Needs] = Needs(reward_gradient=True, single_update=True)
    EXTRA_DECODES: ClassVar[tuple[int, int]] = (0, 0)  # of moved images: with a gradient, and without

    kl_weight: Annotated[float, Field(ge=0)] = 0.03
    """Weight of the KL to the base model, the squared distance of the velocities at the trained states."""
    smoothing: Annotated[float, Field(ge=0, le=1)] = 0.01
    """The reward's gradient is taken at the lowest point within this distance of the image, by one step (RSA-FT, arXiv 2603.21175): it
    avoids narrow peaks, where rewards are hacked. It costs a further pass of the rewards, and reports S1. 0 turns it off."""

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
        gradients, images = self.EXTRA_DECODES
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

    def num_losses(self, sampling_steps: int) -> int:
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

    def num_losses(self, sampling_steps: int) -> int:
        return 1 + self.NOISED_COPIES

    def trained_states(self, sigmas: list[float], derivatives: list[float], draw: Draw) -> list[TrainedState]:
        last = len(derivatives) - 1
        copies = [TrainedState(last, -sigmas[last], predicted=True, copy_number=j + 1) for j in range(self.NOISED_COPIES)]
        return [TrainedState(last, derivatives[last]), *copies]


class FlowBp(RewardGradient):
    """FlowBP: some steps of the whole rollout, late ones more often, each by its share in the final latents, arXiv 2606.11075.

    The factor of a step is c times its derivative, c = 1 + (sum of all absolute derivatives / sum of the trained ones - 1) / 2; a step i
    is drawn without replacement by a probability that grows as i + 1. The paper has Euler's steps, whose derivatives are their lengths.
    """

    TRAINED_STEPS: ClassVar[int] = 4  # published

    name: Literal["flowbp"] = "flowbp"

    def num_losses(self, sampling_steps: int) -> int:
        return min(self.TRAINED_STEPS, sampling_steps)

    def trained_states(self, sigmas: list[float], derivatives: list[float], draw: Draw) -> list[TrainedState]:
        steps = sorted(draw([float(i + 1) for i in range(len(derivatives))], self.num_losses(len(derivatives))))
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

    def num_losses(self, sampling_steps: int) -> int:
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
    EXTRA_DECODES: ClassVar[tuple[int, int]] = (0, len(MOVES))
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
    EXTRA_DECODES: ClassVar[tuple[int, int]] = (2 * (MOVES - 1), 0)

    name: Literal["opsd"] = "opsd"
    needs: ClassVar[Needs] = Needs(reward_gradient=True, single_update=True, moves="both_ways")

    def loss(self, state: GradientState, advantage: Tensor) -> Loss:
        return objectives.opsd(state, advantage)
