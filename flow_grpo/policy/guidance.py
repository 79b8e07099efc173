"""A check that a pipeline has guidance."""

import torch

from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.policy.policy import Policy


def check_guidance(policy: Policy, guidance: float, hint: str) -> None:
    """Raise FlowGRPOError if the pipeline has no guidance: its velocity is the same with that scale and with none.

    It also tries whether a call with that scale can have a timestep per row. Where weights are sharded, it comes before that.

    Args:
        hint: what to do then, the end of the message.
    """
    if _same_velocity(policy.with_guidance(guidance), policy.with_guidance(1.0)) and guidance > 1:
        raise FlowGRPOError(f"{type(policy.pipe).__name__} has no guidance: {hint}")


@torch.no_grad()
def _same_velocity(guided: FlowPipeline, unguided: FlowPipeline) -> bool:
    schedule, shape = guided.schedule(2)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    rows, velocities = torch.arange(2), []
    for model in (guided, unguided):
        conditioning = model.encode([model.probe_prompts[1]] * 2)
        model.accepts_per_sample_timesteps(x, schedule.timesteps, conditioning, rows)  # while all processes compute alike
        velocities.append(model.velocity(x, schedule.timesteps[0], conditioning, rows))
    return torch.equal(*velocities)
