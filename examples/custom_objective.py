r"""Train with an objective and an advantage of your own.

Run this command from the root of the repository. It trains the embedded model, in some seconds on a CPU:

    flow-grpo train tiny_grpo objective.name=examples/custom_objective.py:soft_ratio objective.options.sharpness=2 \
        objective.advantage=examples/custom_objective.py:better_than_average \
        steps=2 prompts_per_step=4 evaluation.max_prompts=4 evaluation.every=2 output_dir=runs/soft_ratio
"""

import torch


def soft_ratio(step, advantage, sharpness=1.0):
    """A sigmoid of the log-ratio instead of GRPO's clipped ratio. Returns one loss for each row, (n,).

    step: a `flow_grpo.types.TrainedStep` with log_prob and old_log_prob (n,). advantage: (n,). sharpness: from objective.options.
    """
    return -advantage * torch.sigmoid(sharpness * (step.log_prob - step.old_log_prob))


def better_than_average(reward, group):
    """1 for images above their group's mean, -1 for those below. reward: (B,). group: (B,), the number of each image's prompt."""
    same_group = (group[:, None] == group).to(reward.dtype)  # (B, B)
    return torch.sign(reward - same_group @ reward / same_group.sum(1))
