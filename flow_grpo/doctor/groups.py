"""Are there enough prompts, each of them once, and do they reach the text encoders uncut?

Do the images of a prompt differ in reward, does the noise of the trained steps cause it, and does it spoil the images?

P prompts have G images each; rewards of them are (P, G).
"""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flow_grpo import advantages
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import PromptSet, sampler_of
from flow_grpo.doctor.model import PIXEL_TOLERANCE
from flow_grpo.doctor.result import ERROR, OK, WARNING, CheckResult
from flow_grpo.image_prompt import images_of, with_images
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards.calls import RewardInputs
from flow_grpo.training.group_advantages import explain_small_share
from flow_grpo.training.offline import load_examples
from flow_grpo.training.rollouts import ImageSampler
from flow_grpo.training.setup import HUMAN
from flow_grpo.training.state import Stage
from flow_grpo.types import PromptBatch, Trajectory

MAX_IMAGES = 128  # sampled for the checks, as far as whole groups allow
MIN_GROUP_SIZE = 4  # images: the mean of fewer is mostly noise
MIN_NOISE_SHARE = 0.05  # of the reward variance, that comes from the noise of trained steps
MIN_HELD_OUT = 8  # prompts: with fewer, the reward-hacking monitor can't tell a change from noise
MAX_EPOCHS = 50  # times that a prompt is sampled before the model may memorise its images


@dataclass(frozen=True)
class SampledGroups:
    """Images of a training step, sampled as the step samples them."""

    step: int
    batch: PromptBatch
    trajectory: Trajectory
    images: Tensor
    seconds: float

    @property
    def reward_inputs(self) -> RewardInputs:
        """The images, prompts and metadata as rewards get them."""
        return RewardInputs(self.images, self.batch.prompts, self.batch.columns())


def sample_groups(stage: Stage, step: int, prompts: PromptSet) -> SampledGroups:
    """Sample the first groups of a training step."""
    args = stage.args
    count = max(1, min(args.prompts_per_step, MAX_IMAGES // args.images_per_prompt))
    batch = sampler_of(prompts, args.seed).sample(step, count, args.images_per_prompt)
    return _sample(stage.sampler, step, batch, stage.sampler.window(step))


def _sample(sampler: ImageSampler, step: int, batch: PromptBatch, window: list[int]) -> SampledGroups:
    """Sample the groups; `window` has the stochastic steps. Without any, the ODE is sampled from the same initial noise."""
    started = time.perf_counter()
    trajectory = sampler.trajectory(step, batch, window)
    images = sampler.policy.decode(trajectory.final, sampler.microbatch)
    return SampledGroups(step, batch, trajectory, images, time.perf_counter() - started)


def check_groups(stage: Stage, groups: SampledGroups, values: dict[str, Tensor] | None = None) -> list[CheckResult]:
    """Whether there is a learning signal in the groups, and whether the noise of the trained steps causes it.

    Args:
        values: (B,) by reward, if the images are scored already.
    """
    if HUMAN in stage.sampler.rewards.trained_weights:  # their values are unknown
        return [_check_batch_invariance(stage, groups)]
    if values is None:
        values = stage.sampler.score(groups.batch, groups.images).by_name
    by_reward, weights = stage.groups.trained_rewards(groups.batch, values)
    by_group = advantages.weighted_sum(by_reward, weights).view(-1, stage.args.images_per_prompt)
    scored = by_group.isfinite().all(1)  # without the groups of a reward that was dropped
    results = []
    if stage.critic is None and not stage.args.objective.needs.reward_gradient and scored.any():
        rows = scored.repeat_interleave(stage.args.images_per_prompt)
        of_scored = {name: value[rows] for name, value in values.items()}
        results += _check_signal(stage, groups.batch.take(rows.nonzero()[:, 0]), of_scored, by_group[scored])
    if groups.trajectory.steps:
        results += _check_noise(stage, groups, by_group)
    return [*results, _check_batch_invariance(stage, groups)]


def _check_signal(stage: Stage, batch: PromptBatch, values: dict[str, Tensor], reward: Tensor) -> list[CheckResult]:
    """Check that complete groups have signal, given the values of their rows by reward, and their weighted sum (P, G)."""
    args, results, method = stage.args, [], stage.groups.method
    if args.objective.needs.selection == "all":  # other objectives choose the best of a group, or the best and the worst
        results.append(group_size(args.images_per_prompt))
    compared, _ = stage.groups.compared_rewards(batch, values)
    has_signal = advantages.has_signal(compared, batch.group, method)
    results.append(zero_std_groups(has_signal.view_as(reward)[:, 0], reward, args.objective.stepwise))
    by_reward, weights = stage.groups.trained_rewards(batch, values)
    share, _ = advantages.shares(by_reward, weights, batch.group, method)
    is_called = weights.view(-1, weights.shape[-1]).any(0).tolist()  # by a prompt set of these groups
    names = stage.sampler.rewards.trained_weights
    of_several = {name: value for name, value, called in zip(names, share.tolist(), is_called, strict=True) if called}
    if len(of_several) > 1:
        results.append(reward_shares(of_several, method))
    return results


def _check_noise(stage: Stage, groups: SampledGroups, sde: Tensor) -> list[CheckResult]:
    """Compare the rewards of the groups, sde (P, G), with those of ODE samples from the same initial noise."""
    ode_groups = _sample(stage.sampler, groups.step, groups.batch, window=[])
    ode = stage.sampler.score(ode_groups.batch, ode_groups.images).total.view_as(sde)
    scored = sde.isfinite().all(1) & ode.isfinite().all(1)
    sde, ode = sde[scored], ode[scored]
    if not scored.any() or not (sde.std(1) + ode.std(1)).any():
        return []
    share = noise_share(sde, ode)
    has_win_rates = any(stage.sampler.rewards.is_pair(name) for name in stage.sampler.rewards.trained_weights)
    return [share] if has_win_rates else [share, noise_damage(sde, ode)]  # the mean win rate of a group is always 1/2


def _check_batch_invariance(stage: Stage, groups: SampledGroups) -> CheckResult:
    """Sample two of the images again, with another micro-batch size."""
    rows = torch.arange(2)
    sampler = copy.copy(stage.sampler)
    sampler.microbatch = 2 if stage.microbatch == 1 else 1
    again = _sample(sampler, groups.step, groups.batch.take(rows), groups.trajectory.steps)
    difference = (again.images - groups.images[rows]).abs().max().item()
    return batch_invariance(difference, PIXEL_TOLERANCE[stage.policy.dtype])


# -- evaluating -------------------------------------------------------------------------------------------------------


def group_size(images: int) -> CheckResult:
    """Evaluate the number of images in a group."""
    if images >= MIN_GROUP_SIZE:
        return CheckResult("images per prompt", f"{images}", OK)
    message = f"the mean of so few is mostly noise: set images_per_prompt={MIN_GROUP_SIZE} or more."
    return CheckResult("images per prompt", f"{images}", WARNING, message)


def zero_std_groups(has_signal: Tensor, reward: Tensor, stepwise: bool) -> CheckResult:
    """The share of groups with zero reward std.

    Args:
        has_signal: (P,) bool, the other groups.
        reward: (P, G).
        stepwise: whether the trained steps add noise.
    """
    share = 1 - has_signal.float().mean().item()
    name, value = "groups with zero reward std", f"{share:.0%} of {len(has_signal)}"
    if share < 0.5:
        return CheckResult(name, value, OK)
    return CheckResult(name, value, ERROR if share == 1 else WARNING, _advice_on_zero_std(has_signal, reward, stepwise))


def _advice_on_zero_std(has_signal: Tensor, reward: Tensor, stepwise: bool) -> str:
    """Advice on groups with zero reward std; the arguments are those of `zero_std_groups`."""
    constant = reward[~has_signal].amax(1)
    if reward.min() == reward.max():
        return "all images have the same reward: see its values."
    if (constant == reward.max()).float().mean() > 0.5:
        return "most of them have the highest reward: use harder prompts or a stricter reward."
    if (constant == reward.min()).float().mean() > 0.5:
        return "most of them have the lowest reward: use easier prompts, or fine-tune the model first (`stages`)."
    if not has_signal.any():
        return "the images of each prompt have the same reward: see its std within groups."
    noise = ", or a higher noise_level" if stepwise else ""
    return f"set more images_per_prompt{noise}."


def reward_shares(share: dict[str, float], method: str | Callable[..., Tensor]) -> CheckResult:
    """The share of each reward in the advantage of that method, as `flow_grpo.advantages.shares` has it."""
    name, value = "shares of the advantage", ", ".join(f"{reward} {value:.0%}" for reward, value in share.items())
    message = explain_small_share(share, method)
    if message is None:
        return CheckResult(name, value, OK)
    return CheckResult(name, value, WARNING, message)


def noise_share(sde: Tensor, ode: Tensor) -> CheckResult:
    """The share of the reward variance that is from trained-step noise.

    sde, ode (P, G): rewards of images with and without noise in the trained steps, from the same initial noise.

    The value is the variance within groups that this noise causes, as a share of all: the policy can learn only from this part.
    """
    name = "reward variance from trained-step noise"
    by_noise, *totals = [(values - values.mean(1, keepdim=True)).square().sum().item() for values in (sde - ode, sde, ode)]
    share = min(by_noise / max(sum(totals), 1e-12), 1.0)  # an estimate from few images may be above 1
    if share >= MIN_NOISE_SHARE:
        return CheckResult(name, f"{share:.0%}", OK)
    message = (
        "images of a prompt differ by their initial noise alone, so there is nothing to learn: raise objective.noise_level."
    )
    return CheckResult(name, f"{share:.0%}", ERROR if share < MIN_NOISE_SHARE / 5 else WARNING, message)


def noise_damage(sde: Tensor, ode: Tensor) -> CheckResult:
    """The cost of noise: `sde` and `ode` (P, G) as in `noise_share`. Fine if a group's best image is as good as without noise."""
    name, value = "mean reward, SDE vs ODE sampling", f"{sde.mean():.3g} vs {ode.mean():.3g}"
    lost = ode.mean(1) - sde.mean(1)
    significant = lost.mean() > 3 * lost.std() / len(lost) ** 0.5
    as_good = (sde.amax(1) >= ode.mean(1)).float().mean()
    if not significant or (as_good >= 0.5 and lost.mean() <= ode.std()):
        return CheckResult(name, value, OK)
    message = (
        "noise destroys the images: lower objective.noise_level, end objective.window before the late steps, or set "
        "objective.transition=cps, whose noise_level is at most 1."
    )
    return CheckResult(name, value, ERROR if as_good < 0.25 else WARNING, message)


def batch_invariance(difference: float, tolerance: float) -> CheckResult:
    """The largest difference of a pixel in [0, 1] between two micro-batch sizes; `tolerance` is what rounding may cause."""
    name, value = "batch invariance", f"max difference {difference:.1e}"
    if difference <= tolerance:
        return CheckResult(name, value, OK, "rounding")
    message = "an image depends on the others of its micro-batch: look for batch statistics in the model."
    return CheckResult(name, value, WARNING, message)


def check_prompts(
    stages: list[FlowGRPOConfig],
    policy: Policy,
    train_prompts: list[str],
    num_held_out: int,
) -> list[CheckResult]:
    """Check the prompts of rollouts, and those that come with the images of an offline objective."""
    online = [stage for stage in stages if stage.dataset is None]
    offline = [prompt for stage in stages if stage.dataset is not None for prompt in _offline_prompts(stage)]
    sampled = train_prompts if online else []
    trained, results = [*sampled, *offline], []
    if sampled:
        per_step, steps = max(stage.prompts_per_step for stage in online), sum(stage.steps for stage in online)
        results += [prompt_count(len(sampled), per_step, steps), duplicate_prompts(sampled)]
    results.append(eval_prompt_count(num_held_out))
    longest = max(trained, key=len)
    # with an embedding cache the encoders may be missing
    if stages[0].memory.embedding_cache_dir is None and len(longest.split()) > 1:
        results.append(prompt_truncation(longest, not reads_last_word(policy, longest)))
    return results


def _offline_prompts(stage: FlowGRPOConfig) -> list[str]:
    assert stage.dataset
    return load_examples(stage.dataset, stage.objective.needs.rows_per_pair).prompts


def reads_last_word(policy: Policy, prompt: str) -> bool:
    """Whether the text encoders return something else without the prompt's last word."""
    shorter = with_images(prompt.rsplit(None, 1)[0], images_of(prompt))
    with_word, without_word = policy.encode([prompt, shorter]).encoder_outputs
    pairs = list(zip(_tensors(with_word), _tensors(without_word), strict=False))
    return any(a.shape != b.shape or not torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-3) for a, b in pairs)


def _tensors(structure: Any) -> Iterator[Tensor]:
    if isinstance(structure, Tensor):
        yield structure
    elif isinstance(structure, (list, tuple)):
        for part in structure:
            yield from _tensors(part)


# -- evaluating -------------------------------------------------------------------------------------------------------


def prompt_count(count: int, per_step: int, steps: int) -> CheckResult:
    """Each of `steps` steps samples `per_step` of `count` prompts."""
    name, value, epochs = "training prompts", f"{count}", per_step * steps / count
    if epochs > MAX_EPOCHS:
        message = f"each is sampled {epochs:.0f} times, so the model may memorise them: add prompts, or set fewer steps."
        return CheckResult(name, value, WARNING, message)
    if count < 2 * per_step:
        message = f"a step samples {per_step} of them, so all steps are alike: add prompts, or set a lower prompts_per_step."
        return CheckResult(name, value, WARNING, message)
    if epochs >= 1:
        return CheckResult(name, value, OK, f"each is sampled {epochs:.1f} times")
    return CheckResult(name, value, OK, f"the run samples {per_step * steps} of them once")


def duplicate_prompts(prompts: list[str]) -> CheckResult:
    """Prompts that are equal up to case and spaces, and have the same images."""
    different = {with_images(" ".join(prompt.casefold().split()), images_of(prompt)) for prompt in prompts}
    name, count = "duplicate prompts", len(prompts) - len(different)
    if not count:
        return CheckResult(name, "0", OK)
    return CheckResult(name, f"{count} of {len(prompts)}", WARNING, "remove them: a duplicate is sampled more often.")


def eval_prompt_count(count: int) -> CheckResult:
    """Evaluate the number of held-out prompts."""
    if count >= MIN_HELD_OUT:
        return CheckResult("held-out prompts", f"{count}", OK)
    message = f"set evaluation.prompts to a file of at least {MIN_HELD_OUT}: nothing else detects reward hacking."
    return CheckResult("held-out prompts", f"{count}", WARNING, message)


def prompt_truncation(longest: str, truncated: bool) -> CheckResult:
    """Whether the longest prompt is truncated: `truncated` if its last word makes no difference to what the text encoders return."""
    name, value = "longest prompt", f"{len(longest)} characters"
    if not truncated:
        return CheckResult(name, value, OK, "not truncated")
    message = "truncated: set a higher pipeline_kwargs.max_sequence_length, or shorten the prompts."
    return CheckResult(name, value, WARNING, message)
