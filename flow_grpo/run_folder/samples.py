"""Keeps small images and per-prompt scores of a run, which metrics.jsonl does not hold, for the report and the monitor.

The main process writes. Nothing here uses a random number, so a run's metrics are the same without it.
For each evaluation and the training step before it these are at most 16 images of prompts and 32 of groups:
about 0.5 MB of photographs, or 0.2 MB of the embedded model's signs.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor

from flow_grpo.data.grid import STRIP_FRAMES, save_animation, strips, to_bytes
from flow_grpo.files import remove, write_atomic, write_errors
from flow_grpo.image_prompt import images_of
from flow_grpo.run_folder import layout, reader
from flow_grpo.types import Evaluation, Experience

NUM_FIRST = 8  # prompts, from the first on, whose images are kept of each evaluation
NUM_EXTREMES = 4  # best prompts, and as many worst ones
NUM_GROUPS, IMAGES_PER_GROUP = 4, 8  # of a training step, at most
PROMPT_IMAGE_WIDTH, GROUP_IMAGE_WIDTH = 512, 256  # pixels, of the longer side, at most
LOSSLESS_UP_TO = 160  # pixels
QUALITY = 82  # of WebP


def delete_images_after(folder: Path, step: int) -> None:
    """Delete the images and scores of later steps from a run folder: a resumed run writes them again."""
    for later, step_folder in layout.step_folders(folder / layout.PICTURES):
        if later > step:
            remove(step_folder)


@dataclass(frozen=True)
class GroupImage:
    """An image of a training step, as bytes (3, H, W), of a video (F, 3, H, W)."""

    prompt: str
    pixels: Tensor
    reward: float
    rewards: dict[str, float]
    advantage: float


Key = TypeVar("Key")


def group_images(
    experience: Experience, rows: Mapping[Key, int], decode_to_bytes: Callable[[Tensor, int], Tensor]
) -> dict[Key, GroupImage]:
    """Some images of a training step, decoded as many at a time as `most_spread_groups` has of a group."""
    scores, batch = experience.scores, experience.batch
    assert scores is not None
    if not rows:
        return {}
    advantage = experience.advantage.flatten(1).mean(1) if experience.advantage.ndim > 1 else experience.advantage
    pixels = decode_to_bytes(experience.trajectory.final[list(rows.values())], IMAGES_PER_GROUP)
    return {
        key: GroupImage(
            batch.prompts[row],
            pixels[i],
            reward=scores.total[row].item(),
            rewards={name: values[row].item() for name, values in scores.by_name.items()},
            advantage=advantage[row].item(),
        )
        for i, (key, row) in enumerate(rows.items())
    }


class SampleRecorder:
    """Writes RUN/pictures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save_evaluation(
        self, step: int, evaluation: Evaluation, prompts: list[str], seeds: list[int], weights: dict[str, float]
    ) -> list[dict[str, Any]]:
        """Write an evaluation; returns all evaluations so far.

        Args:
            seeds: the seed of each prompt's image.
            weights: of the rewards that the run trains on.
        """
        values = {name: value.tolist() for name, value in evaluation.values.items()}
        extremes = best_and_worst(values["reward"])
        shown = {*range(NUM_FIRST), *extremes}
        for index, image in evaluation.images.items():
            if index in shown:
                self._save_image(self._folder(step) / layout.prompt_image(index), image, PROMPT_IMAGE_WIDTH)
        sources = [self._save_source(prompt) if i in shown else None for i, prompt in enumerate(prompts)]
        content = {
            "seeds": seeds,
            "trained": list(weights),
            "weights": weights,
            "prompts": prompts,
            **({"sources": sources} if any(sources) else {}),
            "values": values,
            "high_frequency_power": evaluation.high_frequency_power.tolist(),
            "diversity": evaluation.diversity.tolist(),
            "extremes": extremes,
        }
        write_atomic(self._folder(step) / layout.EVALUATION, json.dumps(content))
        return reader.read_all(self.folder, layout.EVALUATION)

    def preview_images(self, step: int, prompts: list[str]) -> list[tuple[str, Path]]:
        """The first held-out prompts, each with the path of its image of that step; of a video, with the path of its strip."""
        first = enumerate(prompts[:NUM_FIRST])
        shown = [(prompt, layout.prompt_image(i)) for i, prompt in first]
        return [(prompt, layout.still_image(self._folder(step), name)) for prompt, name in shown]

    def save_groups(self, step: int, groups: list[list[GroupImage]], images_per_prompt: int) -> None:
        """Write images of some groups of a training step."""
        content = []
        for number, images in enumerate(groups):
            for i, image in enumerate(images):
                pixels = image.pixels.float() / 255
                self._save_image(self._folder(step) / layout.group_image(number, i), pixels, GROUP_IMAGE_WIDTH)
            content.append(
                {
                    "prompt": images[0].prompt,
                    "source": self._save_source(images[0].prompt),
                    "images": images_per_prompt,
                    "reward": [image.reward for image in images],
                    "rewards": {name: [image.rewards[name] for image in images] for name in images[0].rewards},
                    "advantage": [image.advantage for image in images],
                }
            )
        write_atomic(self._folder(step) / layout.GROUPS, json.dumps({"groups": content}))

    def _folder(self, step: int) -> Path:
        return layout.step_folder(self.folder / layout.PICTURES, step)

    def _save_source(self, prompt: str) -> str | None:
        """Keep the first image of a prompt; returns its digest, or None if it has none."""
        source = next(iter(images_of(prompt)), None)
        if source is None:
            return None
        file = self.folder / layout.PICTURES / layout.source_image(source.digest)
        if not file.exists():
            self._save_pixels(file, source.open().copy(), PROMPT_IMAGE_WIDTH)
        return source.digest

    def _save_image(self, file: Path, image: Tensor, width: int) -> None:
        """Write an image, or of a video (F, 3, H, W) an animation and a strip."""
        if image.ndim == 4:
            save_animation(file, image, longest_side=width, quality=QUALITY)
            file, width = file.with_name(layout.strip_of(file.name)), STRIP_FRAMES * width
        self._save_pixels(file, Image.fromarray(to_bytes(strips(image[None]))[0]), width)

    def _save_pixels(self, file: Path, pixels: Image.Image, width: int) -> None:
        pixels.thumbnail((width, width), Image.Resampling.LANCZOS)
        with write_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels.save(file, "WEBP", quality=QUALITY, lossless=max(pixels.size) <= LOSSLESS_UP_TO)


def best_and_worst(reward: list[float]) -> list[int]:
    """The indices of the best and the worst rewards, from best to worst. A NaN is neither."""
    order = sorted((i for i, value in enumerate(reward) if math.isfinite(value)), key=lambda i: -reward[i])
    return order if len(order) <= 2 * NUM_EXTREMES else order[:NUM_EXTREMES] + order[-NUM_EXTREMES:]


def most_spread_groups(reward: Tensor, group: Tensor) -> list[Tensor]:
    """The rows of the groups with the largest difference of rewards; of a large group, some from its best to its worst."""
    groups = []
    for number in group.unique().tolist():
        rows = (group == number).nonzero()[:, 0]
        spread = float(reward[rows].max() - reward[rows].min())
        if math.isfinite(spread):
            order = rows[reward[rows].argsort(stable=True)]
            ranks = torch.linspace(0, len(rows) - 1, min(IMAGES_PER_GROUP, len(rows))).round().long()
            groups.append((spread, order[ranks].sort().values))
    return [rows for _, rows in sorted(groups, key=lambda pair: -pair[0])[:NUM_GROUPS]]
