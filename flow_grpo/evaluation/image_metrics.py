"""Metrics that need no reward: detail and diversity of images, and how far a model is from its base model."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.policy.policy import Policy


def high_frequency_power(images: Tensor) -> Tensor:
    """(B, 3, H, W) in [0, 1] -> (B,): high-frequency power, the root mean square of what a 3 x 3 mean takes away."""
    smooth = torch.nn.functional.avg_pool2d(images.float(), 3, 1, 1, count_include_pad=False)
    return (images.float() - smooth).square().mean((1, 2, 3)).sqrt().cpu()


def rms_difference(images: Tensor, others: Tensor) -> Tensor:
    """Two times (B, 3, H, W) in [0, 1] -> (B,): root mean square difference of each pair, the diversity of two pictures."""
    return (images.float() - others.float()).square().mean((1, 2, 3)).sqrt().cpu()


def diversity(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """(B, 3, H, W) in [0, 1] -> (B,): mean root mean square difference from the other pictures of the prompt, NaN where there are
    none. Its mean over a prompt's pictures is that over their pairs."""
    found = torch.full((len(prompts),), math.nan)
    for prompt in dict.fromkeys(prompts):
        places = [i for i, other in enumerate(prompts) if other == prompt]
        group = images[places]
        if len(places) > 1:
            apart = torch.stack([rms_difference(group, image.expand_as(group)).sum() for image in group])
            found[places] = apart / (len(places) - 1)
    return found


@torch.no_grad()
def distance_from_base(policy: Policy, prompts: list[str], steps: int, microbatch: int) -> list[float]:
    """For each prompt the mean squared distance of the policy's velocity from the base model's, on the policy's own way from noise
    to image."""
    schedule, shape = policy.schedule(steps)
    conditioning = policy.encode(prompts)
    velocity = policy.velocity_fn(schedule, conditioning)
    found: list[float] = []
    for rows in torch.arange(len(prompts)).split(microbatch):
        x, way = torch.stack([sampling.noise(shape, place, "distance") for place in rows.tolist()]), []
        for i in range(len(schedule)):
            way.append((x, velocity(x, i, rows)))
            x = x + (schedule.sigmas[i + 1] - schedule.sigmas[i]) * way[-1][1]
        with policy.reference():  # once: of a whole transformer, all weights change places
            apart = [(v - velocity(x, i, rows)).square().flatten(1).mean(1) for i, (x, v) in enumerate(way)]
        found += torch.stack(apart).mean(0).tolist()
    return found
