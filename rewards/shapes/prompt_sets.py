"""The prompt files of the embedded model of shapes: `python -m flow_grpo.rewards.shapes.prompt_sets FOLDER`.

Writes shapes_train.jsonl and shapes_eval.jsonl, scenes with their category, and shape_edits_train.jsonl and shape_edits_eval.jsonl,
edits with the image that each of them changes, in shape_edits/, and with a caption of the result. shapes_counting_train.jsonl and
shapes_counting_eval.jsonl are the scenes of several equal shapes among them. Evaluation asks for combinations that training never names.
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np

from flow_grpo.rewards.shapes.drawing import description, draw, random_edit, random_scene
from flow_grpo.rewards.shapes.prompts import CATEGORIES

SCENES = {"train": 160, "eval": 32}  # of each category, if there are as many
EDITS = {"train": 192, "eval": 72}
ATTEMPTS = 40_000  # random scenes that are looked through


def scenes(part: str, rng: np.random.Generator) -> list[dict[str, str]]:
    """Different prompts of every category, held out or not. Categories alternate, so that a few first prompts show all of them."""
    found: dict[str, dict[str, str]] = {category: {} for category in CATEGORIES}  # prompts by their meaning
    for _ in range(ATTEMPTS):
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
