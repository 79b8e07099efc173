"""Rewards for images: `rewards.load("ocr")(images, prompts)`.

A reward is a callable `reward(images, prompts, **metadata)`: images are float32 RGB (B, 3, H, W) in [0, 1], prompts are B
strings, metadata are lists of B values by name. It returns B numbers, as a tensor or a list; higher is better.

A reward with `differentiable = True` is called with images that may require a gradient, and then returns a tensor (B,) with a graph:
`WeightedSum.gradients` takes the gradient of each value with respect to its image.

The package's own name is `flow_grpo.rewards`, which a user's rewards.py can't hide; the folder flow_grpo/rewards is a link to this one.
`import rewards` gives the same modules.
"""

from flow_grpo.rewards.calls import Reward, call_reward, score
from flow_grpo.rewards.gradients import ValueAndGradient, check_differentiable, value_and_gradient
from flow_grpo.rewards.images import takes_pil
from flow_grpo.rewards.loading import REGISTRY, check_options, docstring, load, locate, metric_names, reads_prompts
from flow_grpo.rewards.scopes import scope_of
from flow_grpo.rewards.scoring import WeightedSum, row_weights

__all__ = [
    "REGISTRY",
    "Reward",
    "ValueAndGradient",
    "WeightedSum",
    "call_reward",
    "check_differentiable",
    "check_options",
    "docstring",
    "load",
    "locate",
    "metric_names",
    "reads_prompts",
    "row_weights",
    "scope_of",
    "score",
    "takes_pil",
    "value_and_gradient",
]

if __name__ == "rewards":
    from flow_grpo.rewards_alias import alias_rewards

    alias_rewards()
