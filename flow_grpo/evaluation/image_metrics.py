"""What is measured of images beside rewards: detail and diversity; and of a model its distance from the base model."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.policy.policy import Policy

BASE_DISTANCE = "distance from base"  # name of a metric in eval.json, .md and .csv
NUM_DIVERSITY_PROMPTS = 16  # first prompts of which two images are generated, to measure their difference
NUM_DISTANCE_PROMPTS = 32  # first prompts, on which the distance from the base model is measured


def high_frequency_power(images: Tensor) -> Tensor:
    """(B, 3, H, W) in [0, 1] -> (B,): the root mean square of what a 3 x 3 mean filter removes; of videos in all their frames."""
    pictures = images.float().flatten(0, -4)
    smooth = torch.nn.functional.avg_pool2d(pictures, 3, 1, 1, count_include_pad=False)
    return _mean((pictures - smooth).square().unflatten(0, images.shape[:-3])).sqrt().cpu()


def rms_difference(first: Tensor, second: Tensor) -> Tensor:
    """Two times (B, 3, H, W) in [0, 1] -> (B,): the root mean square difference of each pair, which is the diversity of two images.

    Of videos, in all their frames.
    """
    return _mean((first.float() - second.float()).square()).sqrt().cpu()


def _mean(values: Tensor) -> Tensor:
    return values.mean(tuple(range(1, values.ndim)))


def diversity(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """(B, 3, H, W) in [0, 1] -> (B,): the mean RMS difference from the other images of the same prompt, NaN if there are none.

    Its mean over a prompt's images is the mean over their pairs.
    """
    distances = torch.full((len(prompts),), math.nan)
    for prompt in dict.fromkeys(prompts):
        rows = [i for i, text in enumerate(prompts) if text == prompt]
        group = images[rows]
        if len(rows) > 1:
            sums = torch.stack([rms_difference(group, image.expand_as(group)).sum() for image in group])
            distances[rows] = sums / (len(rows) - 1)
    return distances


@torch.no_grad()
def distance_from_base(policy: Policy, prompts: list[str], steps: int, microbatch: int) -> list[float]:
    """By prompt, the mean squared difference between the velocities of the policy and of its base model.

    Both are evaluated at the points through which the policy goes from noise to the image.
    """
    schedule, shape = policy.schedule(steps)
    conditioning = policy.encode(prompts)
    distances: list[float] = []
    for rows in torch.arange(len(prompts)).split(microbatch):
        velocity = policy.velocity_fn(schedule, conditioning, rows)
        x, path = torch.stack([sampling.noise(shape, row, "distance") for row in rows.tolist()]), []
        for i in range(len(schedule)):
            path.append((x, velocity(x, i)))
            x = x + (schedule.sigmas[i + 1] - schedule.sigmas[i]) * path[-1][1]
        with policy.base_model():  # once for all steps: after full fine-tuning it swaps all weights
            errors = [(v - velocity(x, i)).square().flatten(1).mean(1) for i, (x, v) in enumerate(path)]
        distances += torch.stack(errors).mean(0).tolist()
    return distances
