"""A sheet of what two runs taught the model of shapes: `python benchmarks/shapes_sheet.py runs/tiny_shapes runs/tiny_edit docs/shapes.png`.

Of the held-out prompts, it shows the first scenes and the first edits that the base model gets wrong, before and after training.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.grid import ImageInfo, save_grid
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.evaluation.generate import SEED, generate_images, image_seed
from flow_grpo.image_prompt import ImagePrompt
from flow_grpo.policy.loading import load_policy
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards.shapes.rules import ExactShapes

SCENES, EDITS = 6, 4  # prompts shown, in two rows each


def sheet(run: Path, count: int, columns: int, file: Path) -> None:
    """Write a grid of `count` held-out prompts of a run that the base model gets wrong, each before and after training."""
    args = FlowGRPOConfig.from_yaml(run / "config.yaml")
    prompts = load_prompts(args.evaluation.prompts).prompts
    before, after = (images(policy(args, lora), prompts, args) for lora in (None, run / "lora"))
    sources = [[source.open() for source in p.images] if isinstance(p, ImagePrompt) else [] for p in prompts]
    exact = ExactShapes()(before, [str(prompt) for prompt in prompts], sources=sources if any(sources) else None)
    wrong = (exact < 1).nonzero()[:count, 0].tolist()
    pairs = torch.stack([generated[index] for index in wrong for generated in (before, after)])
    cells = [ImageInfo(prompts[index], 0, args.model) for index in wrong for _ in range(2)]
    save_grid(file, pairs, cells, columns=columns, notes=["before", "after"])


def policy(args: FlowGRPOConfig, lora: Path | None) -> Policy:
    """The run's model as its evaluations call it."""
    call = args.evaluation_call_kwargs()
    return load_policy(args.model, device=args.device, dtype=args.dtype, lora=lora, memory=args.memory, **call)


def images(policy: Policy, prompts: list[str], args: FlowGRPOConfig) -> Tensor:
    """The images (P, 3, H, W) of the run's evaluation."""
    seeds = [image_seed(SEED, index) for index in range(len(prompts))]
    return generate_images(policy, prompts, seeds, args.evaluation.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenes", type=Path, help="a run of tiny_shapes")
    parser.add_argument("edits", type=Path, help="a run of tiny_edit")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("scenes.png", "edits.png")]
        sheet(args.scenes, SCENES, 6, files[0])  # three pairs in a row
        sheet(args.edits, EDITS, 4, files[1])  # two, each beside its source
        parts = [Image.open(file).convert("RGB") for file in files]
    both = Image.new("RGB", (max(p.width for p in parts), sum(p.height for p in parts)), parts[0].getpixel((0, 0)))
    both.paste(parts[0], (0, 0))
    both.paste(parts[1], (0, parts[0].height))
    both.save(args.out, optimize=True)


if __name__ == "__main__":
    main()
