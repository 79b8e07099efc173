"""BRISQUE, a measure of quality that no one here trained, on images of shapes: does it see damage, and does training do any?

    python -m venv /envs/brisque
    /envs/brisque/bin/pip install brisque numpy==1.26.4 scipy==1.13.1 opencv-python-headless==4.10.0.84
    /envs/brisque/bin/pip install torch safetensors pillow fastapi uvicorn
    python benchmarks/image_quality.py /envs/brisque/bin/python [RUN of tiny_shapes]

BRISQUE runs in that environment, as a reward with `isolate` (brisque_reward.py): its package does not run with NumPy 2. The first table has
images of the held-out scenes as they are and after each damage, and how many of the damaged ones it finds worse. With a run, a second
one compares the images before and after training.
"""

import argparse
import io
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image, ImageFilter
from shapes_sheet import images, policy

from dev.tiny.pretrain_shapes import tensor_of
from flow_grpo import FlowGRPOConfig, rewards
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.rewards import score
from flow_grpo.rewards.images import to_pil

REWARD = Path(__file__).parent / "brisque_reward.py"


def noisy(std: int) -> Callable[[Image.Image], Image.Image]:
    def damaged(image: Image.Image) -> Image.Image:
        pixels = tensor_of([image]) / 2 + 0.5
        noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
        return to_pil((pixels + std / 255 * noise).clamp(0, 1))[0]

    return damaged


def jpeg(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=10)
    return Image.open(file).convert("RGB")


DAMAGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "none": lambda image: image,
    "Gaussian blur of radius 1": lambda image: image.filter(ImageFilter.GaussianBlur(1)),
    "Gaussian blur of radius 2": lambda image: image.filter(ImageFilter.GaussianBlur(2)),
    "noise of 10 in 255": noisy(10),
    "noise of 30 in 255": noisy(30),
    "JPEG of quality 10": jpeg,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the interpreter of the environment with brisque")
    parser.add_argument("run", nargs="?", type=Path)
    given = parser.parse_args()
    reward = rewards.load(f"{REWARD}:sharp", isolate=True, python=given.python)
    args = FlowGRPOConfig.from_yaml("tiny_shapes")
    prompts = load_prompts(args.evaluation.prompts).prompts
    texts = [str(prompt) for prompt in prompts]

    def drawn(lora: Path | None) -> list[Image.Image]:
        return to_pil(images(policy(args, lora), prompts, args))

    def brisque(pictures: list[Image.Image]) -> torch.Tensor:
        return -score("BRISQUE", reward, tensor_of(pictures) / 2 + 0.5, texts)

    before = drawn(None)
    clean = brisque(before)
    print(f"| damage to {len(before)} images of 64 px | BRISQUE | found worse |\n|---|---|---|")
    for title, damage in DAMAGES.items():
        values = brisque([damage(image) for image in before])
        print(f"| {title} | {values.mean():.1f} | {(values > clean).float().mean():.3f} |")
    if given.run:
        after = brisque(drawn(given.run / "lora"))
        change = after - clean
        error = change.std() / len(change) ** 0.5
        print(
            f"\nbefore training {clean.mean():.1f}, after {after.mean():.1f}: {change.mean():+.1f}, standard error {error:.1f}"
        )


if __name__ == "__main__":
    main()
