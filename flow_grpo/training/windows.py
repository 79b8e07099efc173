"""Which sampling steps are trained: the window of each training step, and how much each step's noise varies the reward."""

from dataclasses import dataclass
from functools import partial

import torch

from flow_grpo import sampling
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sampling import SamplingConfig
from flow_grpo.data.prompt_mixture import sampler_of
from flow_grpo.data.prompts import PromptSet
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards import WeightedSum
from flow_grpo.training.interrupt import call_interruptibly
from flow_grpo.training.rollouts import RolloutSource


def trained_steps(settings: SamplingConfig, training_step: int, seed: int) -> list[int]:
    """The sampling steps that are stochastic and trained in a training step; the others are the ODE's.

    Args:
        training_step: what a random window depends on, with the seed. `random` windows are Flow-GRPO-Fast's.
    """
    window, last = settings.window, min(settings.last_trainable_step, settings.steps - 1)
    if window.schedule == "all":
        return list(range(window.first_step, last + 1))
    num_positions = last - window.first_step - window.size + 2
    if num_positions < 1:
        raise FlowGRPOError(f"a window of {window.size} steps does not fit into steps {window.first_step} to {last}.")
    start = window.first_step
    if window.schedule == "random":
        generator = sampling.generator(seed, "window", training_step)
        start += int(torch.randint(num_positions, (1,), generator=generator))
    return list(range(start, start + window.size))


@dataclass(frozen=True)
class StepVariance:
    """Reward variance from the noise of one sampling step, all else being the same for the images of a prompt."""

    transition: str
    noise_level: float
    step: int
    sigma: float
    variance: float  # of the reward within a group, mean over the prompts


def step_reward_variance(
    policy: Policy,
    args: FlowGRPOConfig,
    prompts: PromptSet,
    rewards: WeightedSum,
    *,
    transition: str,
    noise_level: float,
    processes: Processes | None = None,
) -> list[StepVariance]:
    """Measure each trainable step: the images of a prompt share all noise but that step's.

    Uses prompts_per_step prompts with images_per_prompt images, the same for all steps, transitions and noise levels.

    Args:
        processes: as of `RolloutSource`.

    Raises:
        FlowGRPOError: no prompt's images could all be scored.
    """
    settings = args.sampling.model_copy(
        update={
            "shared_initial_noise": True,
            "transition": transition,
            "noise_level": noise_level,
        }
    )
    prompt_sampler = sampler_of(prompts, args.seed)
    source = RolloutSource(
        policy,
        args.model_copy(update={"sampling": settings}),
        prompt_sampler,
        rewards,
        window=lambda step: [],
        processes=processes,
    )
    batch = prompt_sampler.sample(0, args.prompts_per_step, args.images_per_prompt)
    variances = []
    for step in range(args.sampling.window.first_step, args.sampling.last_trainable_step + 1):
        images = policy.decode(source.image_sampler.trajectory(0, batch, [step]).final, args.microbatch)
        scores = call_interruptibly(partial(source.image_sampler.score, batch, images), source.processes.should_stop)
        reward = scores.total.view(args.prompts_per_step, -1)
        reward = reward[reward.isfinite().all(1)]  # without groups of a reward that was dropped
        if not len(reward):
            raise FlowGRPOError("the rewards gave no finite number for any prompt, so no step's share can be measured.")
        sigma = source.image_sampler.schedule.sigmas[step].item()
        variances.append(StepVariance(transition, noise_level, step, sigma=sigma, variance=reward.var(1).mean().item()))
    return variances


def most_variable_window(measured: list[StepVariance], size: int) -> int:
    """The first of the `size` adjacent steps whose noise varies the reward most."""
    variance = torch.tensor([step.variance for step in measured])
    return measured[int(variance.unfold(0, min(size, len(measured)), 1).sum(1).argmax())].step
