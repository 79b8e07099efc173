"""The diversity of images of shapes that are right: `python benchmarks/shapes_diversity.py [RUN ...]`.

Without a run, draws two right images for each held-out prompt of the embedded model of shapes, scenes and edits, and prints the mean of
their root mean square difference and its standard deviation over 20 seeds: of the first prompts, by which a run measures its diversity,
of all of them, by which `eval --seeds 4` does, and of each category. A model whose images are all right can hardly have more; one whose
images are often wrong can.

With runs, prints for each the diversity of four images of each held-out prompt before and after training: of all images, and of those
pairs whose two images are right, in the mean over the prompts that have such a pair both before and after.
"""

import argparse
import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from shapes_sheet import policy
from torch import Tensor

from dev.prompts import drawing
from dev.tiny.pretrain_shapes import tensor_of
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.loading import bundled_file
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.evaluation.generate import NUM_DIVERSITY_PROMPTS, SEED, generate_images, image_seed
from flow_grpo.evaluation.image_metrics import rms_difference
from flow_grpo.image_prompt import images_of
from flow_grpo.rewards.shapes.prompts import parse_edit, parse_scene
from flow_grpo.rewards.shapes.rules import ExactShapes, find_shapes

SEEDS = 20
IMAGES = 4  # of each prompt, with runs


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


def of_run(run: Path) -> None:
    """Print the diversity of a run's held-out images before and after training, and that of the right ones among them."""
    args = FlowGRPOConfig.from_yaml(run / "config.yaml")
    prompts = load_prompts(args.evaluation.prompts).prompts
    before, after = (_pairs(args, lora, prompts) for lora in (None, run / "lora"))
    for title, only_right in (("all images", False), ("right images", True)):
        by_prompt = [
            difference.where(right | (not only_right), torch.nan).nanmean(0) for difference, right in (before, after)
        ]
        change = by_prompt[1] - by_prompt[0]
        measured = change.isfinite()
        means = [values[measured].mean() for values in by_prompt]
        error = change[measured].std() / measured.sum() ** 0.5
        print(
            f"{run.name}, {title} of {measured.sum()} prompts: {means[0]:.4f} before and {means[1]:.4f} after, "
            f"change {change[measured].mean():+.4f} with a standard error of {error:.4f}",
            flush=True,
        )


def _pairs(args: FlowGRPOConfig, lora: Path | None, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Of each pair of a prompt's images, (pairs, P): how much they differ, and whether both are right."""
    model, sources = policy(args, lora), [[source.open() for source in images_of(prompt)] for prompt in prompts]
    images = [
        generate_images(model, prompts, [image_seed(SEED, i, n) for i in range(len(prompts))], args.evaluation.steps)
        for n in range(IMAGES)
    ]
    texts = [str(prompt) for prompt in prompts]
    right = [ExactShapes()(part, texts, sources=sources if any(sources) else None) == 1 for part in images]
    pairs = list(itertools.combinations(range(IMAGES), 2))
    differences = torch.stack([rms_difference(images[a], images[b]) for a, b in pairs])
    return differences, torch.stack([right[a] & right[b] for a, b in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="runs of tiny_shapes or tiny_edit")
    runs = parser.parse_args().runs
    for run in runs:
        of_run(run)
    if not runs:
        of_random_images()


def of_random_images() -> None:
    """Print the diversity of right images that are drawn at random."""
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
