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


def rank(images, prompts):
    """1 for the brightest image of each prompt, 0 for the others, so that an image alone has nothing to be compared with."""
    bright = images.mean((1, 2, 3))
    return [float(sum(p == prompt for p in prompts) > 1 and bright[i] == bright[[p == prompt for p in prompts]].max())
            for i, prompt in enumerate(prompts)]  # fmt: skip


def z_score(images, prompts):
    """Brightness against all images of a call."""
    bright = images.mean((1, 2, 3))
    return (bright - bright.mean()) / (bright.std(correction=0) + 1e-6)


def brighter(first, second, prompts):
    """Of two images of a prompt: the chance that the first is preferred, from their brightness."""
    return torch.sigmoid(50 * (first - second).mean((1, 2, 3)))


def spread(images, prompts):
    """Of the images of a prompt: how far the brightness of each is from their mean, and how many they are."""
    bright = images.mean((1, 2, 3))
    return (bright - bright.mean()).abs() + len(prompts)


brighter.scope, spread.scope = "pair", "group"


def in_bf16(images, prompts):
    """Brightness as a network in 16 bits has it: rounded, and by another order of sums in each size of a batch."""
    weights = torch.linspace(0.5, 1.5, images[0].numel(), dtype=torch.bfloat16)
    return 0.8 + (images.flatten(1).bfloat16() @ weights) / images[0].numel() * (1 + 2**-8 * (len(prompts) % 2))


def asked_edit(images, prompts, source):
    """How close an image is to its source with the right half brightened, which is what the tests' prompts ask for."""
    asked = source.clone()
    asked[..., images.shape[-1] // 2 :] = (asked[..., images.shape[-1] // 2 :] + 0.4).clamp(max=1)
    return -(images - asked).square().flatten(1).mean(1)
