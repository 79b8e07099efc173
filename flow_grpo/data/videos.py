"""Videos as files: an animation that plays in a browser, and a strip of frames that fits where an image does."""

from pathlib import Path
from typing import Any

import torch
from PIL import ExifTags, Image
from torch import Tensor

from flow_grpo.files import atomic_file
from flow_grpo.rewards.images import to_pil
from flow_grpo.rewards.scopes import evenly_spaced, is_video

STRIP_FRAMES = 4  # evenly spaced, with the first and the last
FRAMES_PER_SECOND = 16  # as Wan 2.1 is trained; LTX and HunyuanVideo have 24


def strip_frames(videos: Tensor) -> Tensor:
    """Videos (B, F, 3, H, W) -> (B, n, 3, H, W): those of their frames that a strip shows."""
    return videos[:, evenly_spaced(STRIP_FRAMES, videos.shape[1])]


def strips(images: Tensor) -> Tensor:
    """Videos (B, F, 3, H, W) -> (B, 3, H, n W), n of their frames side by side; images (B, 3, H, W) stay as they are."""
    return torch.cat(strip_frames(images).unbind(1), -1) if is_video(images) else images


def cut_strips(images: Tensor, width: int) -> Tensor:
    """Strips (B, 3, H, n W) of frames of width W -> (B, n, 3, H, W)."""
    return torch.stack(images.split(width, -1), 1)


def save_animation(
    path: Path, video: Tensor, longest_side: int | None = None, quality: int = 90, description: str = ""
) -> None:
    """Write a video (F, 3, H, W) in [0, 1] as an animated WebP that repeats.

    Args:
        longest_side: in pixels, to which larger frames are reduced.
        description: what the file says of itself, in its Exif data.
    """
    frames = to_pil(video)
    if longest_side is not None:
        for frame in frames:
            frame.thumbnail((longest_side, longest_side), Image.Resampling.LANCZOS)
    settings: dict[str, Any] = {"duration": round(1000 / FRAMES_PER_SECOND), "loop": 0, "quality": quality}
    if description:
        exif = Image.Exif()
        exif[ExifTags.Base.ImageDescription] = description
        settings["exif"] = exif
    with atomic_file(path) as file:
        frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], **settings)
