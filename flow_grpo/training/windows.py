"""Which step explores: how much the reward varies when one step alone is stochastic, and the window that follows from it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import PromptSampler, PromptSet
from flow_grpo.distributed.processes import Processes
from flow_grpo.policy.policy import Policy
from flow_grpo.training.interrupt import call
from flow_grpo.training.rollouts import Rollouts
from rewards import WeightedSum


@dataclass(frozen=True)
class Owned:
    """What the noise of one step does to the reward, all else being the same for the images of a prompt."""

    transition: str
    noise_level: float
    step: int
    sigma: float
    variance: float  # of the reward within a group, mean over the prompts


def owned_variance(
    policy: Policy,
    args: FlowGRPOConfig,
    prompts: PromptSet,
    rewards: WeightedSum,
    transition: str,
    noise_level: float,
    stopping: Callable[[], bool] = lambda: False,
    processes: Processes | None = None,
) -> list[Owned]:
    """One `Owned` for each trainable step: the images of a prompt start from one noise and part at that step alone.

    Uses prompts_per_step prompts with images_per_prompt images, the very same for all steps, transitions and noise levels.
    `stopping` and `processes` are those of `Rollouts`. ValueError if no prompt's images could all be scored.
    """
    sampling = args.sampling.model_copy(
        update={"shared_start": True, "transition": transition, "noise_level": noise_level, "solver": "euler"}
    )
    settings = args.model_copy(update={"sampling": sampling})
    prompt_sampler = PromptSampler(prompts, args.seed)
    source = Rollouts(policy, settings, prompt_sampler, rewards, None, lambda step: [], stopping, processes)
    batch = prompt_sampler.sample(0, args.prompts_per_step, args.images_per_prompt)
    window = args.sampling.window
    last = args.sampling.steps - 2 if window.last is None else window.last
    found = []
    for step in range(window.first, last + 1):
        images = policy.decode(source.trajectory(0, batch, [step]).final, settings.microbatch)
        total = call(partial(source.score, batch, images), stopping).total.view(args.prompts_per_step, -1)
        total = total[total.isfinite().all(1)]  # without groups of a reward that was dropped
        if not len(total):
            raise ValueError("the rewards gave no finite number for any prompt, so no step's share can be measured.")
        found.append(Owned(transition, noise_level, step, source.schedule.sigmas[step].item(), total.var(1).mean().item()))
    return found


def best_window(owned: list[Owned], size: int) -> int:
    """The first of the `size` steps in a row that own the most variance between them."""
    variance = torch.tensor([one.variance for one in owned])
    return owned[int(variance.unfold(0, min(size, len(owned)), 1).sum(1).argmax())].step
