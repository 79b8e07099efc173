"""The share of drawn images whose nearest training picture, by shift-tolerant LPIPS and by plain colours, is the prompt's.

/envs/lpips/bin/python judge.py FOLDER     (that environment: see benchmarks/perceptual.py)
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from stlpips_pytorch import stlpips, utils

WHITE = 16  # paler than this is background


def aligned(image: np.ndarray) -> np.ndarray:
    """What is not background, centred on white as the training pictures are: place and size are not judged."""
    image = np.where((255 - image.astype(int)).max(-1, keepdims=True) < WHITE, 255, image).astype(np.uint8)
    inside = np.argwhere((255 - image.astype(int)).max(-1) > 40)
    if not len(inside):
        return image
    (top, left), (bottom, right) = inside.min(0), inside.max(0) + 1
    side = round(max(bottom - top, right - left) * 1.08)
    square = Image.new("RGB", (side, side), "white")
    square.paste(Image.fromarray(image[top:bottom, left:right]), ((side - right + left) // 2, (side - bottom + top) // 2))
    return np.asarray(square.resize((64, 64), Image.Resampling.BICUBIC))


def tensor(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack([aligned(image) for image in images])).permute(0, 3, 1, 2).float() / 127.5 - 1


@torch.no_grad()
def perceptual(network: torch.nn.Module, images: np.ndarray, pooled: int = 2, side: int = 128) -> torch.Tensor:
    """Rows whose squared distances are LPIPS. A VAE blurs, and AlexNet takes blur for another texture: both are pooled, then enlarged."""
    rows = []
    for part in tensor(images).split(64):
        part = F.interpolate(F.avg_pool2d(part, pooled), size=side, mode="bilinear") if pooled else part
        layers = zip(network.net.forward(network.scaling_layer(part)), network.lins, strict=True)
        scaled = [
            utils.normalize_tensor(x) * (lin.model[-1].weight / x[0, 0].numel()).clamp(min=0).sqrt() for x, lin in layers
        ]
        rows.append(torch.cat([x.flatten(1) for x in scaled], 1))
    return torch.cat(rows)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    network = stlpips.LPIPS(net="alex", variant="shift_tolerant", verbose=False)
    pictures = np.load(folder / "pictures.npz")["centred"].reshape(-1, 64, 64, 3)
    judges = {
        "LPIPS": lambda images: perceptual(network, images),
        "LPIPS as published": lambda images: perceptual(network, images, pooled=0),
        "colours of 16 x 16": lambda images: F.avg_pool2d(tensor(images), 4).flatten(1),
    }
    for name, embed in judges.items():
        known = embed(pictures)
        for file in sorted(folder.glob("drawn_*.npz")):
            given = np.load(file)
            nearest = torch.cdist(embed(given["images"]), known).argmin(1).numpy()
            same_name, same = nearest // 2 == given["target"] // 2, nearest == given["target"]
            print(
                f"{name}, {file.stem}: picture {same.mean():.3f}, name {same_name.mean():.3f}; chance {1 / len(known):.4f}"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
