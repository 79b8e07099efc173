"""Rewards that give every image an advantage, so that all of them are trained on."""

import time

import torch

LATENCY = 0.2  # seconds


def alternating(images: torch.Tensor, prompts: list[str]) -> list[float]:
    """0 and 1 in turns."""
    return [float(number % 2) for number in range(len(prompts))]


def slow(images: torch.Tensor, prompts: list[str]) -> list[float]:
    """The same after `LATENCY`."""
    time.sleep(LATENCY)
    return alternating(images, prompts)
