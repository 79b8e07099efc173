"""Images of scenes with known answers: what the detector and the embedded model of shapes are made from.

`python -m dev.prompts.drawing FOLDER` writes the prompt files of that model: shapes_train.jsonl and shapes_eval.jsonl,
scenes with their category, and shape_edits_train.jsonl and shape_edits_eval.jsonl, edits with the image that each of them changes, in
shape_edits/, and with a caption of the result. shapes_counting_train.jsonl and shapes_counting_eval.jsonl are the scenes of several equal
shapes among them. Evaluation asks for combinations that training never names.
"""

import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from flow_grpo.rewards.shapes.prompts import CATEGORIES, COLORS, RELATIONS, SHAPES, Edit, Group, Scene
from flow_grpo.rewards.shapes.rules import BACKGROUND, PALETTE, SIDE, distance_along

PLAIN = "black"  # the colour of shapes for which none is named
EXTENTS = {"small": (13.5, 14.5), None: (18.5, 19.5), "large": (24.0, 25.0)}  # pixels, the longer side of a shape
CELL = 32  # pixels: a shape has a cell of its own, which is one token of the model
JITTER = 1.5  # pixels by which its centre may be off the cell's
OVERSAMPLING = 4
ATTEMPTS = 60  # to place the shapes of a scene
SCENES = {"train": 160, "eval": 32}  # of each category, if there are as many
EDITS = {"train": 192, "eval": 72}
SEARCHED = 40_000  # random scenes that are looked through


@dataclass(frozen=True)
class Shape:
    """A shape in an image: the centre of its bounding box and its longer side in pixels."""

    shape: str
    color: str
    x: float
    y: float
    extent: float
    angle: float = 0.0  # degrees

    def outline(self) -> list[tuple[float, float]]:
        """The corners in pixels."""
        half, third = self.extent / 2, self.extent / 6
        if self.shape == "circle":
            points = [(half * math.cos(a), half * math.sin(a)) for a in np.linspace(0, 2 * math.pi, 48, endpoint=False)]
        elif self.shape == "square":
            points = [(-half, -half), (half, -half), (half, half), (-half, half)]
        elif self.shape == "triangle":
            height = half * math.sqrt(3) / 2
            points = [(0.0, -height), (half, height), (-half, height)]
        else:
            arm = [(-third, -half), (third, -half), (third, -third), (half, -third)]
            points = [turned(point, 90.0 * quarter) for quarter in range(4) for point in arm[1:]]
        return [(self.x + px, self.y + py) for px, py in (turned(point, self.angle) for point in points)]


def turned(point: tuple[float, float], degrees: float) -> tuple[float, float]:
    """The point turned about the origin."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return c * point[0] - s * point[1], s * point[0] + c * point[1]


def draw(shapes: Sequence[Shape]) -> Image.Image:
    """The shapes on a light ground, later ones over earlier ones; edges are smooth."""
    canvas = Image.new("RGB", (SIDE * OVERSAMPLING, SIDE * OVERSAMPLING), BACKGROUND)
    pen = ImageDraw.Draw(canvas)
    for shape in shapes:
        pen.polygon([(x * OVERSAMPLING, y * OVERSAMPLING) for x, y in shape.outline()], fill=PALETTE[shape.color])
    return canvas.resize((SIDE, SIDE), Image.Resampling.BOX)


def holds(relation: str, first: Shape, second: Shape) -> bool:
    """Whether the first shape is left of, right of, above or below the second: their boxes do not overlap along that axis."""
    return distance_along(relation, first, second) >= (first.extent + second.extent) / 2


def description(shapes: Sequence[Shape]) -> Scene:
    """The scene that names each shape with its colour: the caption of an image, also of more than two groups."""
    return Scene(tuple(Group(shape.shape, color=shape.color) for shape in shapes))


def place_shapes(scene: Scene, rng: np.random.Generator) -> list[Shape] | None:
    """Shapes at random positions that show the scene; None if none were found. A shape without a named colour is `PLAIN`."""
    shapes: list[Shape] = []
    of_first: list[Shape] = []
    for number, group in enumerate(scene.groups):
        color = group.color or PLAIN
        for _ in range(group.count):
            found = fit(Shape(group.shape, color, 0, 0, rng.uniform(*EXTENTS[group.size])), shapes, rng)
            if found is None:
                return None
            shapes.append(found)
        if number == 0:
            of_first = list(shapes)
    others = shapes[len(of_first) :]
    if scene.relation and not all(holds(scene.relation, first, second) for first in of_first for second in others):
        return None
    return shapes


def fit(shape: Shape, others: Sequence[Shape], rng: np.random.Generator) -> Shape | None:
    """The shape in a random cell that is free; None if there is none."""
    taken = {(int(other.x // CELL), int(other.y // CELL)) for other in others}
    free = [(x, y) for x in range(SIDE // CELL) for y in range(SIDE // CELL) if (x, y) not in taken]
    if not free:
        return None
    x, y = free[int(rng.integers(len(free)))]
    across, down = rng.uniform(-JITTER, JITTER, 2)
    return replace(shape, x=(x + 0.5) * CELL + across, y=(y + 0.5) * CELL + down)


def random_scene(rng: np.random.Generator, categories: Sequence[str] = CATEGORIES) -> Scene:
    """A scene of a random one of the categories; one that is named twice is twice as frequent."""
    while True:
        groups = []
        kind = categories[int(rng.integers(len(categories)))]
        colored = kind in ("counting", "colours", "attribute binding") or (kind == "position" and rng.random() < 0.8)
        for _ in range(2 if kind in ("two objects", "position", "attribute binding") else 1):
            size = str(rng.choice(["small", "large"])) if rng.random() < 0.2 else None
            several = kind in ("position", "attribute binding")
            count = int(rng.integers(2, 5)) if kind == "counting" else int(rng.choice([1, 1, 2])) if several else 1
            color = str(rng.choice(COLORS)) if colored else None
            groups.append(Group(str(rng.choice(SHAPES)), count, color, size))
        relation = str(rng.choice(RELATIONS)) if kind == "position" else None
        scene = Scene(tuple(groups), relation)
        named = {(group.shape, group.color) for group in groups}
        same_shape_twice = kind == "two objects" and groups[0].shape == groups[-1].shape
        if scene.count <= 4 and len(named) == len(groups) and not same_shape_twice:
            return scene


def random_example(rng: np.random.Generator, categories: Sequence[str] = CATEGORIES) -> tuple[Scene, list[Shape]]:
    """A random scene, as of `random_scene`, and shapes that show it."""
    while True:
        scene = random_scene(rng, categories)
        for _ in range(ATTEMPTS):
            shapes = place_shapes(scene, rng)
            if shapes is not None:
                return scene, shapes


def crowded(rng: np.random.Generator) -> list[Shape]:
    """Random shapes in any number of cells: what an autoencoder learns from, faster than from scenes, which are mostly empty."""
    filled, shapes = rng.uniform(), []
    sizes = list(EXTENTS.values())
    for x, y in itertools.product(range(SIDE // CELL), repeat=2):
        if rng.uniform() < filled:
            extent = rng.uniform(*sizes[rng.integers(len(sizes))])
            across, down = rng.uniform(-JITTER, JITTER, 2)
            kind, color = str(rng.choice(SHAPES)), str(rng.choice(list(PALETTE)))
            shapes.append(Shape(kind, color, (x + 0.5) * CELL + across, (y + 0.5) * CELL + down, extent))
    return shapes


def random_edit(rng: np.random.Generator) -> tuple[list[Shape], Edit, list[Shape]]:
    """The shapes of an image, an edit of it, and the shapes after it. The edit names each shape without doubt."""
    kind = str(rng.choice(["make", "remove", "add"]))
    while True:
        count = int(rng.integers(1, 4))
        shapes: list[Shape] = []
        for _ in range(count):
            found = fit(
                Shape(str(rng.choice(SHAPES)), str(rng.choice(COLORS)), 0, 0, rng.uniform(*EXTENTS[None])), shapes, rng
            )
            shapes += [found] if found else []
        if len(shapes) < count or len({(shape.shape, shape.color) for shape in shapes}) < count:
            continue
        edit_and_result = _edit(kind, shapes, rng)
        if edit_and_result is not None:
            return shapes, *edit_and_result


def _edit(kind: str, shapes: list[Shape], rng: np.random.Generator) -> tuple[Edit, list[Shape]] | None:
    """An edit of that kind, and the shapes after it; None if there is no room for one."""
    chosen = shapes[int(rng.integers(len(shapes)))]
    alone = sum(shape.shape == chosen.shape for shape in shapes) == 1
    color = None if alone and rng.random() < 0.5 else chosen.color
    if kind == "make":
        new = str(rng.choice([color for color in COLORS if color != chosen.color]))
        return Edit(kind, chosen.shape, color, new), [replace(s, color=new) if s is chosen else s for s in shapes]
    if kind == "remove":
        return (Edit(kind, chosen.shape, color), [s for s in shapes if s is not chosen]) if len(shapes) > 1 else None
    relation = str(rng.choice(RELATIONS))
    added = Shape(str(rng.choice(SHAPES)), str(rng.choice(COLORS)), 0, 0, rng.uniform(*EXTENTS[None]))
    for _ in range(10):
        found = fit(added, shapes, rng)
        if found is not None and holds(relation, found, chosen):
            edit = Edit(kind, chosen.shape, color, new_color=added.color, new_shape=added.shape, relation=relation)
            return edit, [*shapes, found]
    return None


def scenes(part: str, rng: np.random.Generator) -> list[dict[str, str]]:
    """Different prompts of every category, held out or not. Categories alternate, so that a few first prompts show all of them."""
    found: dict[str, dict[str, str]] = {category: {} for category in CATEGORIES}  # prompts by their meaning
    for _ in range(SEARCHED):
        scene = random_scene(rng)
        of_category = found[scene.category]
        if scene.is_held_out == (part == "eval") and len(of_category) < SCENES[part]:
            of_category.setdefault(scene.meaning, str(scene))
    rows = [[{"prompt": prompt, "category": name} for prompt in of_category.values()] for name, of_category in found.items()]
    in_turn = [row for turn in itertools.zip_longest(*rows) for row in turn if row is not None]
    return in_turn if part == "eval" else [variant for row in in_turn for variant in both_orders(row)]


def both_orders(row: dict[str, str]) -> list[dict[str, str]]:
    """The prompt, and for two objects also that of their other order: two objects have few different prompts."""
    first, _, second = row["prompt"].partition(" and ")
    return [row, {**row, "prompt": f"{second} and {first}"}] if row["category"] == "two objects" else [row]


def write(folder: Path, seed: int = 0) -> None:
    """Write the prompt files and the images."""
    rng = np.random.default_rng(seed)
    (folder / "shape_edits").mkdir(parents=True, exist_ok=True)
    for part, count in EDITS.items():
        found = scenes(part, rng)
        counting = [row for row in found if row["category"] == "counting"]
        for name, of_file in (("shapes", found), ("shapes_counting", counting)):
            (folder / f"{name}_{part}.jsonl").write_text("\n".join(map(json.dumps, of_file)) + "\n")
        rows: list[str] = []
        while len(rows) < count:
            before, edit, after = random_edit(rng)
            if edit.is_held_out == (part == "eval"):
                name = f"shape_edits/{part}_{len(rows):03d}.png"
                draw(before).quantize(64).save(folder / name, optimize=True)
                row = {"prompt": str(edit), "image": name, "category": edit.kind, "output_caption": str(description(after))}
                rows.append(json.dumps(row))
        (folder / f"shape_edits_{part}.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
