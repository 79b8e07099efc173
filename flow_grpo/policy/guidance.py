"""A pipeline called with another guidance scale than its own."""

import torch

from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.policy.policy import Policy


def guided(policy: Policy, guidance: float) -> FlowPipeline:
    """The same pipeline and weights, called with that guidance scale; within `policy.reference`, the base model with guidance.

    Its prompts are encoded anew, since guidance needs the negative ones. Where weights are sharded, the first call for a scale
    comes before that.

    Raises:
        ValueError: the pipeline has no guidance: its velocity is the same with that scale and with none.
    """
    if guidance not in policy.guided:
        policy.guided[guidance] = _with_guidance(policy, guidance)
    policy.guided[guidance].synced_call_count = policy.synced_call_count
    return policy.guided[guidance]


def _with_guidance(model: FlowPipeline, guidance: float) -> FlowPipeline:
    own = model.family.call_kwargs
    call = {
        name: value
        for name, value in model.call.items()
        if name != model.family.guidance and not (name in own and own[name] == value)
    }
    guided_model, plain = (
        FlowPipeline(model.pipe, model.dtype, scale, offload=model.encoder.offload, **call) for scale in (guidance, 1.0)
    )
    if _same_velocity(guided_model, plain):
        raise ValueError(
            f"objective.anchors: {type(model.pipe).__name__} has no guidance, so an anchor to guided would be one to base: set to: base."
        )
    return guided_model


@torch.no_grad()
def _same_velocity(one: FlowPipeline, other: FlowPipeline) -> bool:
    schedule, shape = one.schedule(2)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    rows, velocities = torch.arange(2), []
    for model in (one, other):
        conditioning = model.encode([model.probe_prompts[1]] * 2)
        model.accepts_per_sample_timesteps(x, schedule.timesteps, conditioning, rows)  # while all processes compute alike
        velocities.append(model.velocity(x, schedule.timesteps[0], conditioning, rows))
    return torch.equal(*velocities)
