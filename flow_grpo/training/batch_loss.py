"""The loss of a run on the images of a training step."""

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.policy.conditioning import Conditioning
from flow_grpo.policy.policy import Policy
from flow_grpo.training.forward_process_loss import ForwardProcessLoss
from flow_grpo.training.step_loss import ClipRange, StepLoss
from flow_grpo.types import Experience

BatchLoss = StepLoss | ForwardProcessLoss


def loss_of_batch(
    policy: Policy, args: FlowGRPOConfig, experience: Experience, conditioning: Conditioning, *, step: int, clip: ClipRange
) -> BatchLoss:
    """The loss of a run with these settings on the images of training step `step`."""
    if args.method.stepwise:
        return StepLoss(
            policy,
            experience,
            conditioning,
            objective=args.objective,
            method=args.method,
            clip=clip,
        )
    return ForwardProcessLoss(
        policy,
        experience,
        conditioning,
        objective=args.objective,
        method=args.method,
        microbatch=args.microbatch,
        seed=args.seed,
        step=step,
        several_updates=args.updates * args.epochs > 1,
    )
