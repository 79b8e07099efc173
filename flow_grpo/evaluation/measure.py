"""Numbers of pictures, one for each: rewards, high-frequency power, diversity within a prompt, distance from the base model."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from flow_grpo.config.sections import EvaluationConfig
from flow_grpo.data.image_sets import ImageRecords
from flow_grpo.data.prompts import PromptSet, load_prompts
from flow_grpo.evaluation.generate import generate_images, image_seed
from flow_grpo.evaluation.image_metrics import distance_from_base, diversity, high_frequency_power
from flow_grpo.evaluation.scorecard import DISTANCE, DIVERSITY, FREQUENCIES, Measured
from flow_grpo.evaluation.targets import Model, Target
from flow_grpo.policy.loading import load_policy
from flow_grpo.policy.policy import Policy
from flow_grpo.run_folder.weights import load_trained_weights
from rewards import WeightedSum

AT_ONCE = 64  # pictures of a gallery that are scored together, more where one prompt has more
Progress = Callable[[Target, int, int], None]
PROBED = 32  # prompts, from the first on, whose distance from the base model is measured


def asked(prompts: PromptSet, seeds: int, seed: int) -> ImageRecords:
    """What models are to draw: `seeds` images of each prompt, the first of them as training's evaluations with that seed."""
    numbers: list[int | None] = [image_seed(seed, i, n) for i in range(len(prompts)) for n in range(seeds)]
    batch = prompts.repeat(seeds)
    return ImageRecords([f"seed {number}" for number in numbers], batch.prompts, numbers, batch.metadata)


def rows_to_generate(
    known: PromptSet | ImageRecords | None, settings: EvaluationConfig, seeds: int, limit: int | None
) -> ImageRecords:
    """The images that models generate: those prompts, with their seeds if they have any; by default the config's held-out prompts."""
    if isinstance(known, ImageRecords):
        if seeds > 1:
            raise ValueError("the images of --prompts have seeds of their own: leave --seeds out.")
        if None in known.seeds:
            raise ValueError("some images of --prompts have no seeds: give images written by flow-grpo sample.")
        return known.head(limit)
    if known is None:
        if settings.prompts is None:
            raise ValueError("there are no prompts to measure on: give --prompts, or set evaluation.prompts in the config.")
        known = load_prompts(settings.prompts).head(settings.limit)
    return asked(known, seeds, settings.seed).head(limit)


def measure(
    targets: list[Target],
    rows: ImageRecords | None,
    rewards: WeightedSum,
    total: bool,
    steps: int | None = None,
    progress: Progress = lambda target, done, all: None,
) -> Iterator[Measured]:
    """Each target measured, a model on `rows`. A base model is loaded once for all its LoRAs that follow each other.

    Args:
        total: whether the rewards' weighted sum is a measure, by the name reward.
        steps: of every model's sampling, by default those of the first: a difference must not be the sampler's.
        progress: is told the target, how many of its pictures are done, and how many there are.
    """
    policy, loaded = None, None
    steps = steps or next((t.args.evaluation.steps for t in targets if isinstance(t, Model)), None)
    for target in targets:
        counted = partial(progress, target)
        if not isinstance(target, Model):
            values = score(target.gallery, target.gallery.images, rewards, AT_ONCE, total, counted)
            yield Measured(target.name, target.what, target.gallery, values)
            continue
        assert rows is not None
        assert steps is not None
        if policy is None or loaded != target.pipeline:
            policy = None  # its memory is free before another one is loaded
            policy = load_policy(
                target.args.model,
                target.args.device,
                target.args.dtype,
                memory=target.args.memory,
                **target.args.pipeline_call_kwargs(),
            )
            loaded = target.pipeline
        dress(policy, target)
        values = _of_model(policy, target, rows, rewards, total, steps, counted)
        yield Measured(target.name, target.what, rows, values)


def dress(policy: Policy, model: Model) -> None:
    """Puts on what the model was trained to, in place of what was there."""
    policy.reset_to_base()
    place = model.lora or model.checkpoint
    if place is not None:
        load_trained_weights(policy, str(place))


def _of_model(
    policy: Policy,
    model: Model,
    rows: ImageRecords,
    rewards: WeightedSum,
    total: bool,
    steps: int,
    counted: Callable[[int, int], None],
) -> dict[str, list[float]]:
    microbatch = model.args.microbatch

    def drawn(places: Sequence[int]) -> Tensor:
        seeds = [seed for i in places if (seed := rows.seeds[i]) is not None]
        return generate_images(policy, [rows.prompts[i] for i in places], seeds, steps, microbatch)

    values = score(rows, drawn, rewards, microbatch, total, counted)
    if not model.is_base:
        probed = list(dict.fromkeys(rows.prompts))[:PROBED]
        found = dict(zip(probed, distance_from_base(policy, probed, steps, microbatch), strict=True))
        values[DISTANCE] = [found.get(prompt, math.nan) for prompt in rows.prompts]
    return values


def score(
    rows: ImageRecords,
    images_of: Callable[[Sequence[int]], Tensor],
    rewards: WeightedSum,
    at_once: int,
    total: bool = False,
    counted: Callable[[int, int], None] = lambda done, all: None,
) -> dict[str, list[float]]:
    """B values by measure. Pictures are asked for a few at a time, those of a prompt together.

    Args:
        images_of: (n, 3, H, W) in [0, 1] of these n rows.
    """
    values: dict[str, list[float]] = {}
    done = 0
    for places in chunks(rows.prompts, at_once):
        images, prompts = images_of(places), [rows.prompts[i] for i in places]
        whole, by_name = rewards(images, prompts, **rows.columns(places))
        looks = {FREQUENCIES: high_frequency_power(images), DIVERSITY: diversity(images, prompts)}
        for name, found in {**({"reward": whole} if total else {}), **by_name, **looks}.items():
            column = values.setdefault(name, [math.nan] * len(rows))
            for place, value in zip(places, found.tolist(), strict=True):
                column[place] = value
        done += len(places)
        counted(done, len(rows))
    return {name: column for name, column in values.items() if any(math.isfinite(value) for value in column)}


def chunks(prompts: Sequence[str], at_once: int) -> Iterator[list[int]]:
    """All rows, about `at_once` at a time: those of a prompt are together, and the prompts in the order of their first rows."""
    of_prompt: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        of_prompt.setdefault(prompt, []).append(place)
    held: list[int] = []
    for places in of_prompt.values():
        if held and len(held) + len(places) > at_once:
            yield held
            held = []
        held = held + places
    if held:
        yield held
