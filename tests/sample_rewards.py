"""Rewards as a user writes them, good and bad, for the tests."""

import torch


def brightness(images, prompts):
    return images.mean((1, 2, 3))


def scaled(images, prompts, factor=1.0):
    return factor * images.mean((1, 2, 3))


def flat(images, prompts):
    return [0.5] * len(prompts)


def raises(images, prompts):
    raise RuntimeError("the camera is off")


def nan(images, prompts):
    return torch.tensor([float("nan")] * len(prompts))


def wrong_shape(images, prompts):
    return images.mean((2, 3))


def uses_metadata(images, prompts, answer):
    return [float(a) for a in answer]


def sometimes_nan(images, prompts):
    """Brightness, but not a number for the first image of every prompt with a U."""
    values = images.mean((1, 2, 3))
    for i, prompt in enumerate(prompts):
        if "U" in prompt and prompt not in prompts[:i]:
            values[i] = float("nan")
    return values
