"""Do `unchanged` and `fidelity` tell edits that keep the rest from edits that do not? On images of the embedded model of shapes.

    python benchmarks/edit_rewards.py

The model before training edits the held-out sources, some right and some wrong. The rules of the world say whether each shape that the
edit does not mean is as it was, and nothing else came. The table has, for each reward, the chance that it values an image that kept
the rest above one that did not (AUC, 0.5 is chance), with and without a mask of the cell that the edit is about.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from scipy.stats import mannwhitneyu
from shapes_sheet import policy

from flow_grpo import FlowGRPOConfig
from flow_grpo.data.prompt_sources import load_run_prompts
from flow_grpo.evaluation.generate import generate_images, image_seed
from flow_grpo.rewards import Reward, score
from flow_grpo.rewards.fidelity import Fidelity, Unchanged
from flow_grpo.rewards.images import SOURCES, to_pil
from flow_grpo.rewards.shapes.prompts import parse_edit
from flow_grpo.rewards.shapes.rules import check_edit, find_shapes

SIDE, CELL = 64, 32
MOVES = {"above": (0, -1), "below": (0, 1), "left of": (-1, 0), "right of": (1, 0)}


def mask_of(prompt: str, source: Image.Image) -> Image.Image:
    """White in the cell that the edit is about."""
    edit = parse_edit(prompt)
    meant = next(s for s in find_shapes(source) if s.shape == edit.shape and edit.color in (None, s.color))
    x, y = int(meant.x // CELL), int(meant.y // CELL)
    dx, dy = MOVES[edit.relation] if edit.relation else (0, 0)
    mask = Image.new("L", (SIDE, SIDE))
    mask.paste(255, ((x + dx) * CELL, (y + dy) * CELL, (x + dx + 1) * CELL, (y + dy + 1) * CELL))
    return mask


def kept_the_rest(prompt: str, source: Image.Image, image: Image.Image) -> bool:
    met = check_edit(parse_edit(prompt), find_shapes(source), find_shapes(image)).met
    return all(value for name, value in met.items() if name.endswith("stays") or name == "nothing else")


def auc(values: torch.Tensor, right: torch.Tensor) -> float:
    return float(mannwhitneyu(values[right], values[~right]).statistic) / int(right.sum() * (~right).sum())


@dataclass(frozen=True)
class Edits:
    """Images of the held-out edits, those of a prompt one after the other.

    Attributes:
        images: (B, 3, H, W) in [0, 1].
        sources: the source of each, in a list of one.
        masks: files that are white in the cell of the edit.
        kept: whether an image kept what the edit does not mean.
    """

    images: torch.Tensor
    sources: list[list[Image.Image]]
    prompts: list[str]
    masks: list[str]
    kept: torch.Tensor


def held_out_edits(folder: str, count: int, lora: Path | None = None) -> Edits:
    """`count` images of each held-out edit, of the model before training or with a LoRA; the masks are written into the folder."""
    args = FlowGRPOConfig.from_yaml("tiny_edit", ["dtype=fp32"])
    held_out = load_run_prompts(args.evaluation.prompts)
    batch = held_out.take(list(range(len(held_out))), count)
    seeds = [image_seed(0, row // count, row % count) for row in range(len(batch.prompts))]
    images = generate_images(policy(args, lora), batch.prompts, seeds, steps=10)
    sources = batch.columns()[SOURCES]
    prompts = [str(prompt) for prompt in batch.prompts]
    masks = [f"{folder}/{row}.png" for row in range(len(prompts))]
    for mask, prompt, [source] in zip(masks, prompts, sources, strict=True):
        mask_of(prompt, source).save(mask)
    kept = torch.tensor(
        [kept_the_rest(*row) for row in zip(prompts, (of_row[0] for of_row in sources), to_pil(images), strict=True)]
    )
    return Edits(images, sources, prompts, masks, kept)


def row_of(name: str, reward: Reward, edits: Edits) -> str:
    """The line of a reward: its AUC with and without masks."""
    without: list[str | None] = [None] * len(edits.masks)
    scores = [
        score(name, reward, edits.images, edits.prompts, sources=edits.sources, mask=m) for m in (edits.masks, without)
    ]
    cells = [f"{auc(values, edits.kept):.3f}" for values in scores]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4, help="of each held-out edit")
    count = parser.parse_args().images
    with tempfile.TemporaryDirectory() as folder:
        edits = held_out_edits(folder, count)
        print(f"{len(edits.kept)} edits, of which {int(edits.kept.sum())} kept the rest\n")
        print("| reward | with a mask | without |\n|---|---|---|")
        for name, reward in (("`unchanged`", Unchanged()), ("`fidelity`", Fidelity(model="flow-grpo-shapes"))):
            print(row_of(name, reward, edits))


if __name__ == "__main__":
    main()
