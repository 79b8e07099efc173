"""Whether a reward depends on the other images of its batch, as a rank within the group does: then its held-out values mean nothing."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.data.prompts import PromptSet
from flow_grpo.errors import FlowGRPOError
from flow_grpo.progress import phase
from flow_grpo.rewards.calls import RewardInputs
from flow_grpo.rewards.scopes import IMAGE, scope_of
from flow_grpo.rewards.threads import call_interruptibly
from flow_grpo.text import counted
from flow_grpo.training.setup import reason_not_to_call

NUM_IMAGES = 4  # scored together, and each alone
NOISE_FACTOR = 5  # a difference counts from this many times the reward's own noise on
STD_TOLERANCE = 0.25  # smaller differences, in standard deviations of the reward, are rounding
ROUNDING_TOLERANCE = 2**-7  # the same as a share of the largest value: bf16 has 8 bits
GROUP_DEPENDENT = (
    "an image's value depends on the other images of its prompt, but an evaluation has one image of each prompt, so that its "
    "held-out values mean nothing. You can train on it; add another reward to evaluation.rewards to measure progress."
)


def depends_on_group(name: str, reward: rewards.Reward, inputs: RewardInputs) -> bool | str:
    """Return whether the first images get other values when scored as one prompt's group than when scored alone.

    The error, if it can't score them so. False without calling the reward if it is costly or its scope is several images, and where
    it gives no finite values. Its own noise and batch-size rounding are tolerated.
    """
    if reason_not_to_call(name, reward) or len(inputs.prompts) < 2 or scope_of(reward) != IMAGE:
        return False
    rows = list(range(min(NUM_IMAGES, len(inputs.prompts))))
    first = inputs.take([0] * len(rows))
    group = replace(first, images=inputs.images[rows])

    def score(part: RewardInputs) -> Tensor:
        return rewards.call_reward(name, reward, part.images, part.prompts, part.metadata)

    # each call gets its own copy of the images, since a reward may write into them
    try:
        together, again = (score(group.take(rows)) for _ in range(2))
        alone = torch.cat([score(group.take([i])) for i in rows])
    except FlowGRPOError as error:
        return str(error)
    both = torch.cat([together, alone])
    noise, std, largest = (together - again).square().mean().sqrt(), both.std(correction=0), both.abs().max()
    tolerance = NOISE_FACTOR * noise + STD_TOLERANCE * std + ROUNDING_TOLERANCE * largest
    return bool((together - alone).square().mean().sqrt() > tolerance)


def group_dependence_warnings(
    reward_funcs: dict[str, rewards.Reward],
    prompts: PromptSet,
    images: dict[int, Tensor],
    should_stop: Callable[[], bool] = lambda: False,
) -> list[str]:
    """A sentence for each reward that depends on the other images of its batch, or fails in the calls that would show it.

    Args:
        images: held-out images by their prompt's index in `prompts`.
        should_stop: the check raises `Interrupted` once it returns True.
    """
    indices = list(images)[:NUM_IMAGES]
    batch = prompts.take(indices, 1)
    inputs = RewardInputs(torch.stack([images[i] for i in indices]), batch.prompts, batch.columns())
    with phase(f"scoring {counted(len(inputs.prompts), 'held-out image')} together and alone"):
        found = {
            name: call_interruptibly(partial(depends_on_group, name, reward, inputs), should_stop)
            for name, reward in reward_funcs.items()
        }
    return [one if isinstance(one, str) else f"reward {name}: {GROUP_DEPENDENT}" for name, one in found.items() if one]
