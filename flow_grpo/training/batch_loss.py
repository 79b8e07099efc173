"""The loss of a run on the images of a training step."""

from collections.abc import Iterator
from typing import Protocol

from jaxtyping import Bool, Int
from torch import Tensor

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.policy.conditioning import Conditioning
from flow_grpo.policy.policy import Policy
from flow_grpo.training.forward_process_loss import ForwardProcessLoss
from flow_grpo.training.noise_levels import draw_noise_levels
from flow_grpo.training.step_loss import ClipRange, StepLoss
from flow_grpo.types import Experience, Loss


class BatchLoss(Protocol):
    """What `PolicyUpdate` needs of a loss on the images of a training step.

    `StepLoss` replays the trained transitions, `ForwardProcessLoss` adds new noise to the final latents.

    Attributes:
        count: the losses of a row, of which the update takes the mean: one for each trained step or noise level.
        fixed_positions: whether rows must keep the chunk and position that they had in the rollout, since the loss compares with numbers
            that were computed there, and a kernel's last bits may depend on the position.
    """

    count: int
    fixed_positions: bool

    def before_update(self, chunks: list[tuple[Tensor, Tensor]]) -> None:
        """Compute what the losses need of all rows of an optimizer step. The update calls it before it asks for their losses.

        Args:
            chunks: the rows (n,) and weights (n,) of each chunk; rows that only fill it up weigh 0.
        """

    def losses(self, rows: Int[Tensor, " n"], is_real: Bool[Tensor, " n"]) -> Iterator[Loss]:
        """Yield the `count` losses of `rows`. The update calls it for each chunk.

        It weighs the rows and runs backward on each loss before it takes the next one, so only one graph is in memory.

        Args:
            is_real: false for rows that only fill up the chunk.
        """


def loss_of_batch(
    policy: Policy, args: FlowGRPOConfig, experience: Experience, conditioning: Conditioning, *, step: int, clip: ClipRange
) -> BatchLoss:
    """The loss of a run with these settings on the images of training step `step`."""
    if args.stepwise:
        return StepLoss(
            policy,
            experience,
            conditioning,
            objective=args.objective,
            clip=clip,
        )
    return ForwardProcessLoss(
        policy,
        experience,
        conditioning,
        objective=args.objective,
        noise_levels=draw_noise_levels(experience, args.objective, seed=args.seed, step=step),
        microbatch=args.microbatch,
        several_updates=args.updates * args.epochs > 1,
    )
