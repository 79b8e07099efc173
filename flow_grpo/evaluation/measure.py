"""Measures models and images for `eval`: each image's rewards, detail and diversity, and each model's distance from its base model."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from flow_grpo.config.sections import EvaluationConfig
from flow_grpo.data.image_sets import ImageRecords
from flow_grpo.data.prompt_sources import load_run_prompts
from flow_grpo.data.prompts import PromptSet
from flow_grpo.errors import FlowGRPOError
from flow_grpo.evaluation.generate import SEED, generate_images, image_seed
from flow_grpo.evaluation.hacking import DIVERSITY, HIGH_FREQUENCY_POWER
from flow_grpo.evaluation.image_metrics import (
    BASE_DISTANCE,
    NUM_DISTANCE_PROMPTS,
    NUM_DIVERSITY_PROMPTS,
    distance_from_base,
    diversity,
    high_frequency_power,
    rms_difference,
)
from flow_grpo.evaluation.scorecard import TargetResult
from flow_grpo.evaluation.targets import ModelTarget, Target
from flow_grpo.policy.loading import load_policy
from flow_grpo.policy.policy import Policy
from flow_grpo.progress import phase
from flow_grpo.rewards import WeightedSum
from flow_grpo.run_folder.weights import load_trained_weights
from flow_grpo.text import counted

IMAGES_PER_BATCH = 64  # of an image set that are scored together; more if one prompt has more


def images_to_generate(prompts: PromptSet, seeds: int) -> ImageRecords:
    """`seeds` images of each prompt for models to generate; the first is that of training's evaluations."""
    numbers: list[int | None] = [image_seed(SEED, i, n) for i in range(len(prompts)) for n in range(seeds)]
    batch = prompts.repeat(seeds)
    return ImageRecords([f"seed {number}" for number in numbers], batch.prompts, numbers, batch.metadata)


def rows_to_generate(
    known: PromptSet | ImageRecords | None, settings: EvaluationConfig, seeds: int, limit: int | None
) -> ImageRecords:
    """The images that models generate: those prompts, with their seeds if they have any; by default the config's held-out prompts."""
    if isinstance(known, ImageRecords):
        if seeds > 1:
            raise FlowGRPOError("the images of --prompts have seeds of their own: leave --seeds out.")
        if None in known.seeds:
            raise FlowGRPOError("some images of --prompts have no seeds: give images written by flow-grpo sample.")
        if known.lacks_sources:
            raise FlowGRPOError(
                "the images of --prompts are edits, and the images that they were made of are not stored in them: give the file of their "
                "prompts by --prompts."
            )
        return known.head(limit)
    if known is None:
        if settings.prompts is None:
            raise FlowGRPOError(
                "there are no prompts to measure on: give --prompts, or set evaluation.prompts in the config."
            )
        known = load_run_prompts(settings.prompts).head(settings.max_prompts)
    return images_to_generate(known, seeds).head(limit)


def measure(
    targets: list[Target],
    rows: ImageRecords | None,
    rewards: WeightedSum,
    total: bool,
    steps: int | None = None,
    kept: dict[int, Tensor] | None = None,
) -> Iterator[TargetResult]:
    """Measure each target; models generate the images of `rows`. A base model is loaded once for consecutive LoRAs of it.

    Args:
        total: whether the rewards' weighted sum is a metric too, named reward.
        steps: sampling steps of all models, so that no difference comes from the sampler; by default those of the first.
        kept: gets images of the first model by row, of some prompts that have one image each.
    """
    policy, loaded = None, None
    steps = steps or next((t.args.evaluation.steps for t in targets if isinstance(t, ModelTarget)), None)
    for target in targets:
        if not isinstance(target, ModelTarget):
            values = score(
                target.image_set,
                target.image_set.images,
                rewards,
                batch_size=IMAGES_PER_BATCH,
                total=total,
                name=target.name,
            )
            yield TargetResult(target.name, target.description, target.image_set, values)
            continue
        assert rows is not None
        assert steps is not None
        if policy is None or loaded != target.pipeline:
            policy = None  # free its memory before another one is loaded
            policy = load_policy(
                target.args.model,
                target.args.device,
                target.args.dtype,
                memory=target.args.memory,
                **target.args.evaluation_call_kwargs(),
            )
            loaded = target.pipeline
        load_target_weights(policy, target)
        values = _measure_model(policy, target, rows, rewards, total=total, steps=steps, kept=kept)
        yield TargetResult(target.name, target.description, rows, values)
        kept = None


def load_target_weights(policy: Policy, model: ModelTarget) -> None:
    """Replace the trained weights of the policy, if any, by those of the target."""
    policy.reset_to_base()
    source = model.lora or model.checkpoint
    if source is not None:
        load_trained_weights(policy, str(source))


def _measure_model(
    policy: Policy,
    model: ModelTarget,
    rows: ImageRecords,
    rewards: WeightedSum,
    *,
    total: bool,
    steps: int,
    kept: dict[int, Tensor] | None,
) -> dict[str, list[float]]:
    microbatch = model.args.microbatch
    diversity_rows = _single_images(rows)[:NUM_DIVERSITY_PROMPTS]
    first_images = {} if kept is None else kept

    def generate_with_seeds(indices: Sequence[int], seeds: list[int]) -> Tensor:
        return generate_images(policy, [rows.prompts[i] for i in indices], seeds, steps, microbatch)

    def generate_own(indices: Sequence[int]) -> Tensor:
        seeds = [seed for i in indices if (seed := rows.seeds[i]) is not None]
        assert len(seeds) == len(indices), "images that are generated have seeds"
        return generate_with_seeds(indices, seeds)

    def generate(indices: Sequence[int]) -> Tensor:
        images = generate_own(indices)
        first_images.update({i: images[n].clone() for n, i in enumerate(indices) if i in diversity_rows})
        return images

    def generate_by_base(indices: Sequence[int]) -> Tensor:
        with policy.base_model():
            return generate_own(indices)

    values = score(rows, generate, rewards, microbatch, total, of_base=generate_by_base, name=model.name)
    if diversity_rows:
        second_images = generate_with_seeds(diversity_rows, [image_seed(rows.seeds[i] or 0, 0, 1) for i in diversity_rows])
        differences = rms_difference(torch.stack([first_images[i] for i in diversity_rows]), second_images).tolist()
        column = values.setdefault(DIVERSITY, [math.nan] * len(rows))
        for i, difference in zip(diversity_rows, differences, strict=True):
            column[i] = difference
    if not model.is_base:
        prompts = list(dict.fromkeys(rows.prompts))[:NUM_DISTANCE_PROMPTS]
        distances = dict(zip(prompts, distance_from_base(policy, prompts, steps, microbatch), strict=True))
        values[BASE_DISTANCE] = [distances.get(prompt, math.nan) for prompt in rows.prompts]
    return values


def _single_images(rows: ImageRecords) -> list[int]:
    """The rows that are the only image of their prompt, for which diversity needs a second one."""
    counts = Counter(rows.prompts)
    return [i for i, prompt in enumerate(rows.prompts) if counts[prompt] == 1]


def score(
    rows: ImageRecords,
    images_of: Callable[[Sequence[int]], Tensor],
    rewards: WeightedSum,
    batch_size: int,
    total: bool = False,
    *,
    of_base: Callable[[Sequence[int]], Tensor] | None = None,
    name: str = "images",
) -> dict[str, list[float]]:
    """B values by metric. Images are loaded or generated in batches; those of a prompt are in one batch.

    Args:
        images_of: returns the images (n, 3, H, W) in [0, 1] of n rows.
        of_base: the same of the base model, with which pair rewards compare.
        name: of what is measured, for the progress.
    """
    values: dict[str, Tensor] = {}
    with phase(f"measuring {name}", total=len(rows), unit="images") as measuring:
        for indices in prompt_batches(rows.prompts, batch_size):
            images, prompts = images_of(indices), [rows.prompts[i] for i in indices]
            base = of_base(indices) if of_base is not None and rewards.has_pairs else None
            with phase(f"scoring {counted(len(prompts), 'image')} by {', '.join(rewards.rewards)}"):
                total_reward, by_name = rewards.against(base, images, prompts, **rows.columns(indices))
            metrics = {"reward": total_reward, **by_name, HIGH_FREQUENCY_POWER: high_frequency_power(images)}
            metrics[DIVERSITY] = diversity(images, prompts)
            for metric, numbers in metrics.items():
                column = values.setdefault(metric, torch.full((len(rows),), math.nan, dtype=torch.float64))
                column[indices] = numbers.double().cpu()
            measuring.advance(len(indices))
    if not total:
        values.pop("reward", None)
    return {metric: column.tolist() for metric, column in values.items() if column.isfinite().any()}


def prompt_batches(prompts: Sequence[str], batch_size: int) -> Iterator[list[int]]:
    """All rows in batches of about `batch_size`, prompts in the order of their first rows. A prompt's rows are in one batch."""
    of_prompt: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        of_prompt.setdefault(prompt, []).append(row)
    batch: list[int] = []
    for rows in of_prompt.values():
        if batch and len(batch) + len(rows) > batch_size:
            yield batch
            batch = []
        batch = batch + rows
    if batch:
        yield batch
