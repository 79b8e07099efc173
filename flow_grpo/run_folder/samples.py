"""Keeps for the report and the monitor what the metrics don't hold: small pictures, and every prompt's numbers.

The first process writes, and of the groups its own; flow_grpo/run_folder/reader.py says what lies where. Nothing here draws a
random number, and a run's numbers are the same without it. For each evaluation and the training step before it these are at most
`evaluation.pictures` + 8 pictures of prompts and 32 of groups: some 0.5 MB of photographs, 0.2 MB of the embedded model's signs.
"""

import json
import math
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from flow_grpo import __version__
from flow_grpo.data.grid import to_bytes
from flow_grpo.files import remove, write_atomic, write_errors
from flow_grpo.run_folder import layout, reader
from flow_grpo.types import Evaluation, Experience

if TYPE_CHECKING:
    from flow_grpo.policy.policy import Policy

NUM_EXTREMES = 4  # best and worst prompts, of each
NUM_GROUPS, IMAGES_PER_GROUP = 4, 8  # of a training step, and of a group
PROMPT_IMAGE_WIDTH, GROUP_IMAGE_WIDTH = 512, 256  # pixels of a prompt's and of a group's picture at most
LOSSLESS_UP_TO = 160  # pixels up to which nothing is lost


class SampleRecorder:
    """A run's RUN/pictures.

    Args:
        pictures: held-out prompts, from the first on, whose pictures are kept; 0 keeps no pictures at all, and no groups.
    """

    def __init__(self, folder: Path, pictures: int) -> None:
        self.folder, self.pictures = folder, pictures

    def start(self, policy: "Policy", processes: int) -> None:
        """Drops what a run that came to nothing has left, and notes the machine."""
        self.delete_after(-1)
        cuda = policy.device.type == "cuda"
        content = {
            "device": torch.cuda.get_device_name(policy.device) if cuda else _cpu(),
            "cores": os.cpu_count(),
            "processes": processes,
            "dtype": str(policy.dtype).removeprefix("torch."),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "flow_grpo": __version__,
        }
        write_atomic(self.folder / layout.MACHINE, json.dumps(content))

    def delete_after(self, step: int) -> None:
        """Drops what lies after the checkpoint that the run goes on from."""
        for later, place in layout.step_folders(self.folder / layout.PICTURES):
            if later > step:
                remove(place)

    @property
    def used_other_noise(self) -> bool:
        """Whether an evaluation is here of flow-grpo 0.3 or before, which named no image's seed and drew other noise."""
        return any("seeds" not in evaluation for evaluation in reader.read_all(self.folder, layout.EVALUATION))

    def save_evaluation(
        self, step: int, found: Evaluation, prompts: list[str], seeds: list[int], trained: list[str]
    ) -> list[dict[str, Any]]:
        """Keeps an evaluation, and returns all of them so far."""
        values = {name: value.tolist() for name, value in found.values.items()}
        ends = best_and_worst(values["reward"])
        shown = {*range(self.pictures), *ends} if self.pictures else set()
        for place, picture in found.pictures.items():
            if place in shown:
                self._save(step, layout.prompt_image(place), picture, PROMPT_IMAGE_WIDTH)
        content = {
            "seeds": seeds,
            "trained": trained,
            "prompts": prompts,
            "values": values,
            "sharpness": found.sharpness.tolist(),
            "diversity": found.diversity.tolist(),
            "extremes": ends,
        }
        write_atomic(self._place(step) / layout.EVALUATION, json.dumps(content))
        return reader.read_all(self.folder, layout.EVALUATION)

    def preview_images(self, step: int, prompts: list[str]) -> list[tuple[str, Path]]:
        """The first held-out prompts, which every evaluation draws anew, and the pictures kept of them."""
        first = enumerate(prompts[: self.pictures])
        return [(prompt, self._place(step) / layout.prompt_image(place)) for place, prompt in first]

    def save_groups(self, step: int, experience: Experience, decode: Callable[[Tensor, int], Tensor]) -> None:
        """The groups of a training step whose rewards differ most. Given images have no rewards, and no groups are kept."""
        scores, batch = experience.scores, experience.batch
        if scores is None or not self.pictures:
            return
        advantage = experience.advantage.flatten(1).mean(1) if experience.advantage.ndim > 1 else experience.advantage
        content = []
        for number, rows in enumerate(most_spread_groups(scores.total, batch.group)):
            images = decode(experience.trajectory.final[rows], len(rows))
            for i, image in enumerate(images):
                self._save(step, layout.group_image(number, i), image, GROUP_IMAGE_WIDTH)
            content.append(
                {
                    "prompt": batch.prompts[rows[0]],
                    "images": int((batch.group == batch.group[rows[0]]).sum()),
                    "reward": scores.total[rows].tolist(),
                    "rewards": {name: values[rows].tolist() for name, values in scores.by_name.items()},
                    "advantage": advantage[rows].tolist(),
                }
            )
        write_atomic(self._place(step) / layout.GROUPS, json.dumps({"groups": content}))

    def _place(self, step: int) -> Path:
        return layout.step_folder(self.folder / layout.PICTURES, step)

    def _save(self, step: int, name: str, picture: Tensor, width: int) -> None:
        image = Image.fromarray(to_bytes(picture[None])[0])
        image.thumbnail((width, width), Image.Resampling.LANCZOS)
        file = self._place(step) / name
        with write_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            image.save(file, "WEBP", quality=82, lossless=max(image.size) <= LOSSLESS_UP_TO)


def best_and_worst(reward: list[float]) -> list[int]:
    """The places of the best and the worst prompts, from best to worst; those without a number are neither."""
    order = sorted((i for i, value in enumerate(reward) if math.isfinite(value)), key=lambda i: -reward[i])
    return order if len(order) <= 2 * NUM_EXTREMES else order[:NUM_EXTREMES] + order[-NUM_EXTREMES:]


def most_spread_groups(reward: Tensor, group: Tensor) -> list[Tensor]:
    """The rows of the groups whose rewards differ most; of a large group some from its best to its worst."""
    found = []
    for number in group.unique().tolist():
        rows = (group == number).nonzero()[:, 0]
        spread = float(reward[rows].max() - reward[rows].min())
        if math.isfinite(spread):
            order = rows[reward[rows].argsort(stable=True)]
            places = torch.linspace(0, len(rows) - 1, min(IMAGES_PER_GROUP, len(rows))).round().long()
            found.append((spread, order[places].sort().values))
    return [rows for _, rows in sorted(found, key=lambda pair: -pair[0])[:NUM_GROUPS]]


def _cpu() -> str:
    """What the CPU is called, where the system says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
