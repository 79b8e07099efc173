"""Fit a learned reward of scenes: `python benchmarks/learned_reward.py --out runs/scene_head`.

The embedded model of shapes draws four images of each training scene. Of two images of a scene, the one that meets more of its prompt by
the rules of the world is the better one: these pairs are the votes that `preference_head` is fitted to, on features of the embedded CLIP
of shapes, as a person's votes would be. Printed is the head's accuracy on the votes of held-out prompts, and on images of the held-out
scenes. docs/comparison.md has the command that trains on the head.
"""

import argparse
import io
from itertools import combinations
from pathlib import Path

import torch
from PIL import Image
from shapes_sheet import policy

from flow_grpo import FlowGRPOConfig
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.evaluation.generate import generate_images, image_seed
from flow_grpo.rewards.images import Vote, to_pil
from flow_grpo.rewards.preference_head import PreferenceHead, fit
from flow_grpo.rewards.shapes.rules import Shapes

MODEL = "flow-grpo-shapes"
IMAGES = 4  # of each prompt


def drawn_pairs(args: FlowGRPOConfig, source: str) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Prompts, images (B, 3, H, W), and the pairs (N, 2) of rows of one prompt, the better image first."""
    prompts = [str(prompt) for prompt in load_prompts(source).prompts]
    model = policy(args, None)
    images = [
        generate_images(model, prompts, [image_seed(0, i, n) for i in range(len(prompts))], args.evaluation.steps)
        for n in range(IMAGES)
    ]
    met = torch.stack([Shapes()(part, prompts) for part in images])  # (IMAGES, P)
    pairs = []
    for prompt in range(len(prompts)):
        for a, b in combinations(range(IMAGES), 2):
            difference = float(met[a, prompt] - met[b, prompt])
            if difference:
                rows = (a * len(prompts) + prompt, b * len(prompts) + prompt)
                pairs.append(rows if difference > 0 else rows[::-1])
    return prompts * IMAGES, torch.cat(images), torch.tensor(pairs)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/scene_head"))
    out = parser.parse_args().out
    args = FlowGRPOConfig.from_yaml("tiny_shapes")
    assert isinstance(args.prompts, str)
    prompts, images, pairs = drawn_pairs(args, args.prompts)
    files = [png(image) for image in to_pil(images)]
    result = fit([Vote(prompts[a], files[a], files[b]) for a, b in pairs.tolist()], out, model=MODEL)
    print(
        f"{result.votes} votes, accuracy {result.accuracy:.3f}; of {result.held_out_votes} held-out votes {result.held_out_accuracy:.3f}"
    )
    assert isinstance(args.evaluation.prompts, str)
    prompts, images, pairs = drawn_pairs(args, args.evaluation.prompts)
    value = PreferenceHead(str(out))(images, prompts)
    right = value[pairs[:, 0]] > value[pairs[:, 1]]
    print(f"of {len(pairs)} pairs of held-out scenes {right.float().mean():.3f}")


if __name__ == "__main__":
    main()
