"""Rewards for pictures, usable without flow_grpo: `rewards.load("ocr")(images, prompts)`.

A reward is a callable `reward(images, prompts, **metadata)`: images are float32 RGB (B, 3, H, W) in [0, 1], prompts B
strings, metadata lists of B values by name. It returns B floats, a tensor or a list; higher is better.
"""

from rewards.images import takes_pil
from rewards.loading import NAMES, check, docstring, load, locate, metric_names, reads_prompts
from rewards.scoring import Reward, WeightedSum, raw_score, score

__all__ = [
    "NAMES",
    "Reward",
    "WeightedSum",
    "check",
    "docstring",
    "load",
    "locate",
    "metric_names",
    "raw_score",
    "reads_prompts",
    "score",
    "takes_pil",
]
