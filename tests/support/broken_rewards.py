"""Rewards with faults, for the doctor's tests."""

import torch


def random(images, prompts):
    return torch.rand(len(prompts))


def shaky(images, prompts):
    """Brightness with a little noise."""
    return images.mean((1, 2, 3)) + 1e-4 * torch.rand(len(prompts))


def length(images, prompts):
    """Depends on the prompt and not on the image."""
    return [float(len(prompt)) for prompt in prompts]


def rates_prompts(images, prompts):
    """Depends on the prompt and hardly on the image."""
    return torch.tensor([float(len(prompt)) for prompt in prompts]) + 0.1 * images.mean((1, 2, 3))


def dark(images, prompts):
    """Lowest for nearly all images."""
    values = torch.zeros(len(prompts))
    values[0] = 1
    return values


def inverts(images, prompts):
    """Writes into the images that it was given."""
    return images.neg_().add_(1).mean((1, 2, 3))
