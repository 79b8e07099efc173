"""The diversity of images that are all right: `python benchmarks/shapes_diversity.py`.

Draws two right images for each held-out prompt of the embedded model of shapes, scenes and edits, and prints the mean of their root
mean square difference and its standard deviation over 20 seeds: of the first prompts, by which a run measures its diversity, of all of
them, by which `eval --seeds 4` does, and of each category. A model whose images are all right can hardly have more; one whose images
are often wrong can.
"""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from flow_grpo.config.bundled import bundled_file
from flow_grpo.evaluation.held_out import NUM_DIVERSITY_PROMPTS
from flow_grpo.evaluation.image_metrics import rms_difference
from flow_grpo.tiny.shapes.examples import tensor_of
from rewards.shapes import drawing
from rewards.shapes.detection import find_shapes
from rewards.shapes.prompts import parse_edit, parse_scene

SEEDS = 20


def right_scene(row: dict[str, str], rng: np.random.Generator) -> Image.Image:
    """An image of the prompt's scene."""
    while (shapes := drawing.place_shapes(parse_scene(row["prompt"]), rng)) is None:
        pass
    return drawing.draw(shapes)


def right_edit(row: dict[str, str], rng: np.random.Generator) -> Image.Image:
    """The source's shapes after the edit; what is added has a random position that fits."""
    edit = parse_edit(row["prompt"])
    source = Image.open(bundled_file("prompts") / row["image"]).convert("RGB")
    shapes = [drawing.Shape(str(shape.shape), shape.color, shape.x, shape.y, shape.extent) for shape in find_shapes(source)]
    meant = next(shape for shape in shapes if shape.shape == edit.shape and edit.color in (None, shape.color))
    others = [shape for shape in shapes if shape is not meant]
    if edit.kind == "remove":
        return drawing.draw(others)
    if edit.kind == "make":
        return drawing.draw([*others, replace(meant, color=str(edit.new_color))])
    while True:
        extent = rng.uniform(*drawing.EXTENTS[None])
        added = drawing.fit(drawing.Shape(str(edit.new_shape), str(edit.new_color), 0, 0, extent), shapes, rng)
        if added is not None and drawing.holds(str(edit.relation), added, meant):
            return drawing.draw([*shapes, added])


def main() -> None:
    for name, right in (("shapes_eval.jsonl", right_scene), ("shape_edits_eval.jsonl", right_edit)):
        file: Path = bundled_file(f"prompts/{name}")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        differences = []  # of each seed, (P,)
        for seed in range(SEEDS):
            rng = np.random.default_rng(seed)
            first, second = (tensor_of([right(row, rng) for row in rows]) / 2 + 0.5 for _ in range(2))
            differences.append(rms_difference(first, second))
        indices = range(len(rows))
        categories = {row["category"]: [i for i in indices if rows[i]["category"] == row["category"]] for row in rows}
        parts = {f"the first {NUM_DIVERSITY_PROMPTS}": [*indices[:NUM_DIVERSITY_PROMPTS]], "all": [*indices], **categories}
        for title, of_part in parts.items():
            values = [difference[of_part].mean().item() for difference in differences]
            print(f"{name}, {title}: {statistics.mean(values):.3f}, standard deviation {statistics.stdev(values):.3f}")


if __name__ == "__main__":
    main()
