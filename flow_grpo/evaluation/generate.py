"""Images from prompts and seeds, as `sample` and every evaluation generate them, and how held-out ones are scored."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.data.prompts import PromptSet
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError, Interrupted
from flow_grpo.evaluation.image_metrics import NUM_DIVERSITY_PROMPTS, high_frequency_power, rms_difference
from flow_grpo.policy.interception import eager
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.progress import Phase, phase
from flow_grpo.rewards import WeightedSum
from flow_grpo.rewards.images import to_bytes
from flow_grpo.rewards.threads import call_interruptibly
from flow_grpo.run_folder.samples import best_and_worst
from flow_grpo.text import counted
from flow_grpo.types import Evaluation

SEED = 1234  # of all evaluations


def image_seed(seed: int, prompt_index: int, number: int = 0) -> int:
    """The seed of an evaluation's image, with which `sample` generates the same image.

    Args:
        seed: of the evaluation; evaluations with different seeds have different noise.
        prompt_index: of the prompt in its file.
        number: of the image among those of its prompt.
    """
    return sampling.derived_seed(seed, "evaluation", prompt_index, number)


@torch.no_grad()
def generate_images(
    model: FlowPipeline,
    prompts: list[str],
    seeds: list[int],
    steps: int,
    microbatch: int = 64,
    noun: str = "image",
    should_stop: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Generate images (B, 3, H, W) in [0, 1] of B prompts with the ODE sampler; the noise of each depends on its seed only.

    Args:
        noun: what is generated, for the progress line.
        should_stop: if it returns True, `Interrupted` is raised before the next forward pass.
    """
    schedule, shape = model.schedule(steps)
    with phase("encoding prompts"):
        conditioning = model.encode(prompts)
    start = torch.stack([sampling.noise(shape, seed, "sample") for seed in seeds]).to(model.device)
    name = f"generating {counted(len(prompts), noun)}"
    with phase(name, total=len(prompts) * len(schedule), unit="sampling steps") as steps_done:

        def latents(rows: Tensor) -> Tensor:
            velocity = _interruptible(model.velocity_fn(schedule, conditioning, rows), steps_done, should_stop)
            # a compiled model would be compiled once more for the number of images that are left over
            with nullcontext() if len(rows) == microbatch else eager():
                return sampling.rollout(velocity, schedule, start[rows]).final

        return model.decode(torch.cat([latents(rows) for rows in torch.arange(len(start)).split(microbatch)]), microbatch)


def _interruptible(velocity: sampling.Velocity, steps_done: Phase, should_stop: Callable[[], bool]) -> sampling.Velocity:
    """The velocity, each call counted in a phase. `Interrupted` before a call if `should_stop` says so."""

    def counted_velocity(x: Tensor, i: int) -> Tensor:
        if should_stop():
            raise Interrupted
        steps_done.advance(len(x))
        return velocity(x, i)

    return counted_velocity


def evaluate(
    model: FlowPipeline,
    prompts: PromptSet,
    rewards: WeightedSum,
    *,
    base: Callable[[], AbstractContextManager[None]],
    steps: int,
    seed: int,
    microbatch: int = 64,
    processes: Processes | None = None,
    images_per_prompt: int = 1,
    num_kept_images: int = 0,
) -> Evaluation:
    """Generate each prompt's images from the noises of `image_seed(seed, its index, number)` and measure them.

    Processes take turns: the first takes the first prompt, the second the second, and so on. A pair reward compares each image with the
    base model's of the same noise, not with the prompt's other images: their win rates have mean 1/2 whatever the policy has learned.

    Args:
        base: a context in which the model is the base model.
        images_per_prompt: of which the rewards are averaged; all other measures are of the first.
        num_kept_images: the result has the images of the first prompts, up to this number, and of the best and worst by `reward`; only
            in the main process.

    Raises:
        Interrupted: the processes are asked to stop.
    """
    processes = processes or Processes()
    source = _HeldOutImages(model, prompts, steps=steps, seed=seed, microbatch=microbatch, processes=processes)
    by_number = source.by_number(images_per_prompt)
    images, num_pairs = by_number[0], min(NUM_DIVERSITY_PROMPTS, len(prompts))
    if images_per_prompt > 1:
        second_images = by_number[1][: sum(i < num_pairs for i in source.local)]
    else:
        second_images = source.generate(num_pairs, 1) if num_pairs else images[:0]
    of_base = None
    if rewards.has_pairs:
        with base():
            of_base = _by_prompt(source.by_number(images_per_prompt))
    batch = prompts.take(source.local, images_per_prompt)

    def score() -> dict[str, Tensor]:
        if not source.local:  # fewer prompts than processes
            return {}
        scores = partial(rewards.against, of_base, _by_prompt(by_number), batch.prompts, batch.group.tolist())
        total, by_name = call_interruptibly(partial(scores, **batch.columns()), processes.should_stop)
        values = {"reward": total, **by_name}
        return {name: value.view(-1, images_per_prompt).nanmean(1) for name, value in values.items()}

    with phase(f"scoring {counted(len(batch.prompts), 'held-out image')}"):
        by_process = processes.gather_or_raise(score, (FlowGRPOError, Interrupted))
    values = {name: _in_prompt_order([part.get(name, torch.zeros(0)) for part in by_process]) for name in by_process[0]}
    if rewards.row_weights(prompts.repeat(1).metadata_columns()) is not None:  # without rewards that no set names
        values = {name: v for name, v in values.items() if name == "reward" or not v.isnan().all()}
    differences = rms_difference(images[: len(second_images)], second_images)
    image_stats = processes.all_gather((high_frequency_power(images), differences))
    shown = {*range(num_kept_images), *(best_and_worst(values["reward"].tolist()) if num_kept_images else ())}
    kept = {index: images[i].clone() for i, index in enumerate(source.local) if index in shown}
    if processes.world_size > 1:  # as bytes, which is how the main process writes them
        parts = processes.gather_on_main({index: to_bytes(image) for index, image in kept.items()})
        kept = {index: image.float() / 255 for part in parts for index, image in part.items()}
    detail, diversity = (_in_prompt_order(list(parts)) for parts in zip(*image_stats, strict=True))
    return Evaluation(values, detail, diversity, kept)


@dataclass(frozen=True)
class _HeldOutImages:
    """Generates this process's share of the images."""

    model: FlowPipeline
    prompts: PromptSet
    steps: int
    seed: int
    microbatch: int
    processes: Processes

    @property
    def local(self) -> list[int]:
        """The indices of this process's prompts."""
        return list(range(self.processes.rank, len(self.prompts), self.processes.world_size))

    def by_number(self, images_per_prompt: int) -> list[Tensor]:
        """The first images of all prompts, the second ones, and so on."""
        return [self.generate(len(self.prompts), number) for number in range(images_per_prompt)]

    def generate(self, count: int, number: int) -> Tensor:
        """The images of the first `count` prompts. All processes generate equally many, as sharded weights require."""
        indices = [i for i in self.local if i < count]
        padding = (self.local or [0])[:1] * (-(-count // self.processes.world_size) - len(indices))
        images = generate_images(
            self.model,
            self.prompts.take(indices + padding, 1).prompts,
            seeds=[image_seed(self.seed, i, number) for i in indices + padding],
            steps=self.steps,
            microbatch=self.microbatch,
            noun="held-out image",
            should_stop=self.processes.should_stop_alone,
        )
        return images[: len(indices)]


def _by_prompt(by_number: list[Tensor]) -> Tensor:
    """The images of each prompt one after another; given the first of each prompt, the second, and so on."""
    return by_number[0] if len(by_number) == 1 else torch.stack(by_number, 1).flatten(0, 1)


def _in_prompt_order(parts: list[Tensor]) -> Tensor:
    """The values of all processes, of which each has those of every world_size-th prompt, in the order of the prompts."""
    indices = [rank + i * len(parts) for rank, part in enumerate(parts) for i in range(len(part))]
    return torch.cat(parts)[torch.tensor(indices, dtype=torch.long).argsort()]
