"""Images from a dataset in place of rollouts: supervised fine-tuning on image-caption pairs, DPO on preference pairs."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data import image_sets
from flow_grpo.data.grid import from_bytes, to_bytes
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.data.votes import NO_COLUMN, image_of, load_votes
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards.images import read_image
from flow_grpo.types import Experience, PromptBatch, Trajectory


@dataclass(frozen=True)
class OfflineExamples:
    """Prompts and the images of each: one to imitate, or the better and the worse one."""

    prompts: list[str]
    images: list[tuple[Path | bytes | Tensor, ...]]


class GivenImages:
    """Assigns the dataset's images to training steps: `prompts_per_step` x `images_per_prompt` of them (for dpo half as many pairs).

    `dataset` is a table (.jsonl, .csv, .parquet) with the columns prompt and image, paths relative to the file; for dpo one of votes, as
    `load_votes` reads it; or, for sft, a folder of images or a grid written by `sample`, which hold their prompts.
    """

    def __init__(self, policy: Policy, args: FlowGRPOConfig, processes: Processes) -> None:
        assert args.dataset
        self.policy, self.args, self.processes = policy, args, processes
        self.rows_per_pair = args.objective.needs.rows_per_pair
        self.examples = load_examples(args.dataset, self.rows_per_pair)
        self.schedule, _ = policy.schedule(args.sampling.steps)
        self.size = image_size(policy, args.sampling.steps)

    def experience(self, step: int, microbatch: int) -> Experience:
        """The dataset's images of a training step, encoded `microbatch` at a time, with advantages of 0."""
        count = self.args.prompts_per_step * self.args.images_per_prompt // self.rows_per_pair
        groups = torch.arange(count)
        local_groups = groups[self.processes.owns(groups, self.args.updates)]
        indices = self._example_indices(step, count)
        local_indices = [indices[group] for group in local_groups.tolist()]
        images = [self._load_image(image) for index in local_indices for image in self.examples.images[index]]
        prompts = [self.examples.prompts[index] for index in local_indices for _ in range(self.rows_per_pair)]
        rows = torch.arange(len(prompts))
        batch = PromptBatch(
            prompts, [{} for _ in prompts], local_groups[rows // self.rows_per_pair], rows % self.rows_per_pair
        )
        with self.policy.meter.timed("encode"):
            final = self.policy.encode_images(torch.stack(images), microbatch)
        return Experience(
            batch,
            Trajectory.from_records(self.schedule, None, [], final),
            advantage=torch.zeros(len(rows)),
            rows=rows,
            rows_per_group=self.rows_per_pair,
            groups=groups,
            metrics={"images": 0.0},
        )

    def _example_indices(self, step: int, count: int) -> list[int]:
        """`count` indices of the endless sequence of shuffled epochs, from position step * count on."""
        indices: list[int] = []
        position = step * count
        while len(indices) < count:
            epoch, first = divmod(position + len(indices), len(self.examples.prompts))
            order = torch.randperm(len(self.examples.prompts), generator=sampling.generator(self.args.seed, "data", epoch))
            indices += order[first : first + count - len(indices)].tolist()
        return indices

    def _load_image(self, source: Path | bytes | Tensor) -> Tensor:
        """(3, H, W) in [0, 1], cropped and resized to the policy's size."""
        image = Image.fromarray(to_bytes(source[None])[0]) if isinstance(source, Tensor) else read_image(source)
        return from_bytes(np.asarray(ImageOps.fit(image, self.size, Image.Resampling.LANCZOS))[None])[0]


def image_size(policy: Policy, steps: int) -> tuple[int, int]:
    """Width and height of the policy's images in pixels, as PIL has them. FlowGRPOError if the pipeline can't encode images."""
    _, shape = policy.schedule(steps)
    blank = policy.decode(torch.zeros(1, *shape))
    policy.encode_images(blank)
    return blank.shape[3], blank.shape[2]


def load_examples(data: str, rows_per_pair: int) -> OfflineExamples:
    """Load the dataset. FlowGRPOError if the file, a column or an image is missing."""
    source = Path(data)
    if source.is_dir() or source.suffix.lower() in image_sets.SUFFIXES:
        if rows_per_pair == 2:
            raise FlowGRPOError(
                f"objective.dataset={data}: dpo needs a table of votes, with the columns prompt, chosen and rejected."
            )
        image_set = image_sets.read(source)
        return OfflineExamples(image_set.prompts, [(image,) for image in image_set.images()])
    if rows_per_pair == 2:
        votes = load_votes(data)
        return OfflineExamples([vote.prompt for vote in votes], [(vote.better, vote.worse) for vote in votes])
    table = load_prompts(data, image_column=NO_COLUMN)
    if "image" not in table.metadata[0]:
        raise FlowGRPOError(f"{data} has no column `image`: give prompt and image.")
    return OfflineExamples(table.prompts, [(image_of(table, row, "image", data),) for row in range(len(table))])
