"""Are there enough prompts, each of them once, and do they reach the text encoders uncut?"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.doctor.result import OK, WARNING, CheckResult
from flow_grpo.image_prompt import images_of, with_images
from flow_grpo.policy.policy import Policy
from flow_grpo.training.offline import load_examples

MIN_HELD_OUT = 8  # prompts: with fewer, the reward-hacking monitor can't tell a change from noise
MAX_EPOCHS = 50  # times that a prompt is sampled before the model may memorise its images


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
