"""Rewards of scenes by rules, in the manner of GenEval (arXiv 2310.11513): what was asked for, found by `rewards.shapes.detection`."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.images import to_pil
from flow_grpo.rewards.shapes.detection import DetectedShape, find_shapes
from flow_grpo.rewards.shapes.drawing import SIDE, distance_along
from flow_grpo.rewards.shapes.prompts import Edit, Group, Scene, parse_edit, parse_scene

# pixels of 64: a small shape is below, a large one above. The model draws large triangles 1 pixel too small
SMALL, LARGE = 16.5, 21.5
MOST_FOUND = 8  # shapes of an image that are compared with what was asked
MOVED = 5.0  # pixels of 64 by which a shape that stays may be off
RESIZED = 1.3  # factor in size by which a shape that stays may be off


@dataclass(frozen=True)
class Requirements:
    """Which requirements of a prompt an image meets, each with a name."""

    met: dict[str, bool]

    @property
    def share(self) -> float:
        """The share of requirements that are met."""
        return sum(self.met.values()) / len(self.met)

    @property
    def is_exact(self) -> bool:
        """Whether all are met."""
        return all(self.met.values())


def check_scene(scene: Scene, found: Sequence[DetectedShape]) -> Requirements:
    """What an image with these shapes meets of a scene, with the assignment of shapes that meets most.

    Each shape that is asked for has to be there, in its colour and size if they are named; the relation has to hold for every pair; and
    nothing else may be there.
    """
    slots = [(group, f"{number}.{i + 1}") for number, group in enumerate(scene.groups, 1) for i in range(group.count)]
    candidates: list[DetectedShape | None] = [*list(found)[:MOST_FOUND], *([None] * max(0, len(slots) - len(found)))]
    best = max(
        (_met(scene, slots, chosen) for chosen in itertools.permutations(candidates, len(slots))),
        key=lambda met: sum(met.values()),
    )
    return Requirements({**best, "nothing else": len(found) <= len(slots)})


def _met(scene: Scene, slots: list[tuple[Group, str]], chosen: Sequence[DetectedShape | None]) -> dict[str, bool]:
    met: dict[str, bool] = {}
    for (group, name), shape in zip(slots, chosen, strict=True):
        # without a colour that is asked for any of the palette is right, but not a mixture
        met[f"shape {name}"] = shape is not None and shape.shape == group.shape and bool(group.color or shape.color)
        if group.color:
            met[f"colour {name}"] = met[f"shape {name}"] and shape is not None and shape.color == group.color
        if group.size:
            met[f"size {name}"] = met[f"shape {name}"] and shape is not None and _size(shape) == group.size
    if scene.relation:
        first = [shape for (group, _), shape in zip(slots, chosen, strict=True) if group is scene.groups[0]]
        second = [shape for (group, _), shape in zip(slots, chosen, strict=True) if group is scene.groups[1]]
        pairs = list(itertools.product(first, second))
        all_right = all(value for name, value in met.items() if name.startswith("shape"))
        met["relation"] = all_right and all(a and b and is_related(scene.relation, a, b) for a, b in pairs)
    return met


def _size(shape: DetectedShape) -> str | None:
    return "small" if shape.extent < SMALL else "large" if shape.extent > LARGE else None


def is_related(relation: str, first: DetectedShape, second: DetectedShape) -> bool:
    """Whether the centres lie apart along the relation's axis by more than half of the mean size of the two."""
    return distance_along(relation, first, second) > (first.extent + second.extent) / 4


def check_edit(edit: Edit, before: Sequence[DetectedShape], after: Sequence[DetectedShape]) -> Requirements:
    """Whether the asked change happened, and each other shape is where and as it was.

    FlowGRPOError if the image before has not exactly one shape that the edit can mean.
    """
    meant = [shape for shape in before if shape.shape == edit.shape and edit.color in (None, shape.color)]
    if len(meant) != 1:
        raise FlowGRPOError(
            f"the edit {str(edit)!r} means one shape of the source, and {len(meant)} fit: edit another image."
        )
    stay = [shape for shape in before if shape is not meant[0]]
    if edit.kind == "add":
        stay.append(meant[0])
    elif edit.kind == "make":
        changed = replace(meant[0], color=edit.new_color or "")
    remaining, met = list(after), {}
    for number, expected in enumerate(stay, 1):
        match = next((shape for shape in remaining if _is_same(expected, shape)), None)
        met[f"shape {number} stays"] = match is not None
        if match is not None:
            remaining.remove(match)
    if edit.kind == "remove":
        met["it is gone"] = not any(_is_near(meant[0], shape) for shape in remaining)
        remaining = [shape for shape in remaining if not _is_near(meant[0], shape)]
    elif edit.kind == "make":
        made = next((shape for shape in remaining if _is_same(changed, shape)), None)
        met["its new colour"] = made is not None
        remaining = [shape for shape in remaining if not _is_near(meant[0], shape)]
    else:
        fitting = [shape for shape in remaining if (shape.shape, shape.color) == (edit.new_shape, edit.new_color)]
        added = next((shape for shape in fitting if is_related(edit.relation or "", shape, meant[0])), None)
        met["the new shape"], met["its position"] = bool(fitting), added is not None
        remaining = [shape for shape in remaining if shape is not (added or next(iter(fitting), None))]
    return Requirements({**met, "nothing else": not remaining})


def _is_near(first: DetectedShape, second: DetectedShape) -> bool:
    return max(abs(first.x - second.x), abs(first.y - second.y)) <= MOVED


def _is_same(first: DetectedShape, second: DetectedShape) -> bool:
    larger, smaller = max(first.extent, second.extent), max(min(first.extent, second.extent), 1e-6)
    return (
        (first.shape, first.color) == (second.shape, second.color)
        and _is_near(first, second)
        and larger / smaller <= RESIZED
    )


def _found(image: Image.Image) -> list[DetectedShape]:
    """The shapes of an image, in pixels of a square of 64."""
    return find_shapes(image if image.size == (SIDE, SIDE) else image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


class Shapes:
    """The share of a prompt's requirements that an image of shapes meets: shapes, their number, colours, sizes and relation.

    Prompts are those of the embedded model of shapes, such as `two red circles left of a blue square`, or edits of a source, such as
    `make the square green`. Range 0 to 1. No weights: OpenCV finds the shapes. Gamed by blurred or doubled shapes whose kind the
    detector takes for another.
    """

    exact = False

    def __call__(
        self, images: torch.Tensor, prompts: list[str], sources: list | None = None, **metadata: Any
    ) -> torch.Tensor:
        """images (B, 3, H, W) in [0, 1] -> (B,). ValueError for other prompts, or an edit without a source."""
        checked = [
            self._check(image, prompt, None if sources is None else sources[row])
            for row, (image, prompt) in enumerate(zip(to_pil(images), prompts, strict=True))
        ]
        return torch.tensor([float(requirements.is_exact) if self.exact else requirements.share for requirements in checked])

    def _check(self, image: Image.Image, prompt: str, sources: list[Image.Image] | None) -> Requirements:
        if not sources:
            return check_scene(parse_scene(str(prompt)), _found(image))
        return check_edit(parse_edit(str(prompt)), _found(sources[0]), _found(image))


class ExactShapes(Shapes):
    """Whether an image of shapes meets all requirements of its prompt, as `shapes` counts them.

    Range 0 or 1. No weights. Gamed as `shapes`.
    """

    exact = True


class ShapesEdit(Shapes):
    """Whether the asked change of an image of shapes happened and nothing else changed: the share of both, or with exact=true all.

    Prompts are edits such as `make the square green`, with a source. Range 0 to 1. No weights. Gamed as `shapes`.

    Args:
        exact: 1 if all is right, else 0.
    """

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact

    def _check(self, image: Image.Image, prompt: str, sources: list[Image.Image] | None) -> Requirements:
        if not sources:
            raise FlowGRPOError(f"the prompt {str(prompt)!r} has no source to edit: give prompts a column `image`.")
        return super()._check(image, prompt, sources)
