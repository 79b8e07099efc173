"""Examples of scenes and edits with their captions, true ones and wrong ones: what the recipe of the model of shapes trains on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flow_grpo.rewards.shapes import drawing
from flow_grpo.rewards.shapes.prompts import CATEGORIES, COLORS, RELATIONS, SHAPES, Edit, Group, Scene

HARD = ("counting", "position", "attribute binding")
# the categories of the scenes that the model learns from
TAUGHT = (*CATEGORIES, *HARD, *HARD, "position", "attribute binding", "attribute binding")
NO_CAPTION = 0.1  # probability of an empty caption: the unconditional half of guidance


def tensor_of(images: list[Image.Image]) -> Tensor:
    """The images, (B, 3, 64, 64) in [-1, 1], the range of diffusers' autoencoders."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2).float() / 127.5 - 1


@dataclass(frozen=True)
class Examples:
    """Scenes or edits with images that show them, (N, C, H, W), and the source of each if they are edits.

    The images are pixels in [-1, 1], or the latents of such.
    """

    described: list[Scene] | list[Edit]
    images: Tensor
    sources: Tensor | None = None

    def batch(self, rng: np.random.Generator, size: int, wrong: float) -> "tuple[list[str], Examples]":
        """Random ones of them with captions, of which each attribute is wrong with that probability."""
        rows = rng.integers(len(self.described), size=size)
        described = [self.described[row] for row in rows]
        captions = [str(_misdescribed(item, rng, wrong)) if rng.random() > NO_CAPTION else "" for item in described]
        sources = None if self.sources is None else self.sources[rows]
        return captions, Examples(described, self.images[rows], sources)


def _misdescribed(item: Scene | Edit, rng: np.random.Generator, wrong: float) -> Scene | Edit:
    return misdescribe(item, rng, wrong) if isinstance(item, Scene) else misdescribe_edit(item, rng, wrong)


def scenes(rng: np.random.Generator, size: int, categories: Sequence[str]) -> Examples:
    """Random scenes of these categories as pixels."""
    made = [drawing.random_example(rng, categories) for _ in range(size)]
    return Examples([scene for scene, _ in made], tensor_of([drawing.draw(shapes) for _, shapes in made]))


def edits(rng: np.random.Generator, size: int) -> Examples:
    """Random edits as pixels."""
    made = [drawing.random_edit(rng) for _ in range(size)]
    sources, results = (
        [drawing.draw(shapes) for shapes in side] for side in zip(*((a, b) for a, _, b in made), strict=True)
    )
    return Examples([edit for _, edit, _ in made], tensor_of(results), tensor_of(sources))


def misdescribe(scene: Scene, rng: np.random.Generator, wrong: float) -> Scene:
    """The scene with each named attribute replaced, with that probability, by another value. At most four shapes stay."""

    def changed(value: str | None, values: tuple[str, ...]) -> str | None:
        return _replaced(value, values, rng, wrong)

    groups = []
    for group in scene.groups:
        count = group.count
        if len(scene.groups) == 1 and count > 1 and rng.random() < wrong:
            count = int(rng.choice([number for number in (2, 3, 4) if number != count]))
        groups.append(Group(changed(group.shape, SHAPES) or "", count, changed(group.color, COLORS), group.size))
    return Scene(tuple(groups), changed(scene.relation, RELATIONS))


def misdescribe_edit(edit: Edit, rng: np.random.Generator, wrong: float) -> Edit:
    """The edit with each attribute of what is new replaced, with that probability, by another value.

    With half of it, the caption of a removal asks for another colour, and that of another colour for a removal.
    """

    def changed(value: str | None, values: tuple[str, ...]) -> str | None:
        return _replaced(value, values, rng, wrong)

    if edit.kind != "add" and rng.random() < wrong / 2:
        kind, color = ("make", str(rng.choice(COLORS))) if edit.kind == "remove" else ("remove", None)
        return replace(edit, kind=kind, new_color=color)
    return replace(
        edit,
        new_color=changed(edit.new_color, COLORS),
        new_shape=changed(edit.new_shape, SHAPES),
        relation=changed(edit.relation, RELATIONS),
    )


def _replaced(value: str | None, values: tuple[str, ...], rng: np.random.Generator, probability: float) -> str | None:
    """With that probability another one of the values; None stays."""
    if value is None or rng.random() >= probability:
        return value
    return str(rng.choice([candidate for candidate in values if candidate != value]))


def other_example(scene: Scene, rng: np.random.Generator) -> tuple[Scene, list[drawing.Shape]]:
    """A scene with some other attributes, and shapes that show it."""
    while True:
        other_scene = misdescribe(scene, rng, 0.4)
        shapes = drawing.place_shapes(other_scene, rng)
        if shapes is not None:
            return other_scene, shapes


def described_example(rng: np.random.Generator) -> tuple[Scene, list[drawing.Shape]]:
    """A random scene and shapes that show it, or, one time in three, an edited image's shapes and their caption."""
    if rng.random() < 2 / 3:
        return drawing.random_example(rng)
    _, _, shapes = drawing.random_edit(rng)
    return drawing.description(shapes), shapes


def held_out_examples(count: int) -> list[tuple[Scene, list[drawing.Shape]]]:
    """Random scenes of a stream of their own, of every category."""
    rng = np.random.default_rng([0, 99])
    return [drawing.random_example(rng) for _ in range(count)]


def held_out_edits(count: int) -> list[tuple[list[drawing.Shape], Edit, list[drawing.Shape]]]:
    """Random edits of a stream of their own."""
    rng = np.random.default_rng([0, 98])
    return [drawing.random_edit(rng) for _ in range(count)]
