"""An objective and an advantage of one's own, as the README shows them."""

import torch


def sigmoid(seen, advantage, sharpness=1.0):
    """A soft ratio in place of the clipped one. `seen` is a flow_grpo.types.TrainedStep, advantage (n,)."""
    return -advantage * torch.sigmoid(sharpness * (seen.log_prob - seen.old_log_prob))


def matching(seen, advantage):
    """On final latents: `seen` is a flow_grpo.types.NoisedImage."""
    return advantage * seen.error(seen.v)


def towards_the_sample(seen, advantage):
    """A loss that is not 0 where the advantage is."""
    return -(1 + advantage) * seen.log_prob


def sign(reward, group):
    """1 for images better than their group's mean, -1 for the others."""
    means = torch.stack([reward[group == g].mean() for g in group])
    return torch.sign(reward - means)


def raises(seen, advantage):
    return {}["loss"]


def without_gradient(seen, advantage):
    return advantage
