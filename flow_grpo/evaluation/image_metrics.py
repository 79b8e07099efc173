"""What is measured of images: rewards, detail and diversity; and of a model its distance from the base model."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.evaluation.hacking import DIVERSITY, HIGH_FREQUENCY_POWER
from flow_grpo.policy.policy import Policy
from flow_grpo.progress import phase
from flow_grpo.rewards import WeightedSum
from flow_grpo.text import counted

BASE_DISTANCE = "distance from base"  # name of a metric in eval.json, .md and .csv
NUM_DIVERSITY_PROMPTS = 16  # first prompts of which two images are generated, to measure their difference
NUM_DISTANCE_PROMPTS = 32  # first prompts, on which the distance from the base model is measured


def score_images(
    rewards: WeightedSum,
    images: Tensor,
    prompts: list[str],
    metadata: dict[str, list],
    *,
    group: list[int] | None = None,
    of_base: Tensor | None = None,
) -> dict[str, Tensor]:
    """(B, 3, H, W) in [0, 1] -> (B,) by reward; `reward` is their weighted sum.

    Args:
        group: as of `rewards.score`.
        of_base: the base model's images (B, 3, H, W) of the same prompts and noises, with which pair rewards compare.
    """
    total, by_name = rewards.against(of_base, images, prompts, group, **metadata)
    return {"reward": total, **by_name}


def measure_images(
    rewards: WeightedSum, images: Tensor, prompts: list[str], metadata: dict[str, list], of_base: Tensor | None = None
) -> dict[str, Tensor]:
    """(B, 3, H, W) in [0, 1] -> (B,) by metric: those of `score_images`, the high-frequency power and the diversity."""
    with phase(f"scoring {counted(len(prompts), 'image')} by {', '.join(rewards.rewards)}"):
        scores = score_images(rewards, images, prompts, metadata, of_base=of_base)
    return {**scores, HIGH_FREQUENCY_POWER: high_frequency_power(images), DIVERSITY: diversity(images, prompts)}


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
