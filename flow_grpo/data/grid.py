"""Grid images and single images as PNG files that contain the prompt, seed and model of each image.

The text chunk `flow_grpo` of the PNG has these and the pixel position of each cell, the Exif data of a video has these alone. Images are
enlarged by integer factors only, so that `read_grid` returns their exact pixels.
"""

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageDraw, ImageFont, ImageOps
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import atomic_file
from flow_grpo.image_prompt import SourceImage, images_of
from flow_grpo.rewards import images as reward_images
from flow_grpo.rewards.images import MAX_PIXELS, read_image_file, to_pil
from flow_grpo.rewards.scopes import evenly_spaced, is_video

FIELD = "parameters"
SETTINGS = re.compile(r"\n[A-Z][\w ]*: [^\n]*, [A-Z][\w ]*: [^\n]*$")  # the last line, such as `Steps: 20, Seed: 1`
STRIP_FRAMES = 4  # evenly spaced, with the first and the last
FRAMES_PER_SECOND = 16  # as Wan 2.1 is trained; LTX and HunyuanVideo have 24
CHUNK = "flow_grpo"
GAP = 10
SMALLEST_CELL = 192  # pixels: narrower images are enlarged to about this width
LINE = 15
INK, PAPER = (70, 70, 76), (250, 250, 250)


def write_parameters(prompt: str, settings: Mapping[str, object]) -> str:
    """The text of an image as AUTOMATIC1111 writes it: the prompt, the negative one, which is empty here, and a line of settings.

    Programs that read it expect `Steps` first, and at least three settings.
    """
    line = ", ".join(f"{name}: {_quoted(str(value))}" for name, value in settings.items())
    return f"{prompt}\nNegative prompt: \n{line}"


def prompt_of(parameters: str | None) -> str | None:
    """The prompt in such a text; None if it has another form."""
    settings = SETTINGS.search((parameters or "").rstrip())
    if parameters is None or settings is None:
        return None
    return parameters[: settings.start()].split("\nNegative prompt: ")[0].strip() or None


def sampling_settings(parameters: str | None) -> dict[str, str]:
    """The steps, the guidance and the size that such a text states, by AUTOMATIC1111's names: compared images should have the same."""
    line = (parameters or "").rstrip().rpartition("\n")[2]
    return dict(re.findall(r"(?:^|, )(Steps|CFG scale|Size): ([^,]+)", line))


def rows_and_columns(parameters: str | None, width: int, height: int) -> tuple[int, int] | None:
    """Of a grid of AUTOMATIC1111, by the `Size` of its images in such a text: they adjoin. None for a single, maybe enlarged, image."""
    stated = re.search(r"\bSize: (\d+)x(\d+)\b", parameters or "")
    if parameters is None or stated is None or "upscale" in parameters.lower():
        return None
    of_image = int(stated[1]), int(stated[2])
    if 0 in of_image or (width, height) == of_image or width % of_image[0] or height % of_image[1]:
        return None
    return height // of_image[1], width // of_image[0]


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if re.search(r"[,:\n]", value) else value


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


@dataclass(frozen=True)
class ImageInfo:
    """The prompt of an image, the seed of its noise, and the model that generated it.

    Attributes:
        had_source: of an image that was read: whether its prompt had images, which are not stored.
    """

    prompt: str
    seed: int
    model: str
    had_source: bool = False


def save_grid(path: Path, images: Tensor, cells: list[ImageInfo], columns: int, notes: list[str] | None = None) -> None:
    """Write images (B, 3, H, W) in [0, 1] as a grid, with a caption under each. The first image of a prompt is shown to the left of its
    first image in a row. Of videos (B, F, 3, H, W) each is a strip of frames.

    Args:
        notes: for the captions instead of the seeds, repeated over the cells.
    """
    content: dict[str, Any] = {"videos": True} if is_video(images) else {}
    images = strips(images)
    height, width = images.shape[-2:]
    scale = max(1, -(-SMALLEST_CELL // width))
    cell_width, cell_height = width * scale, height * scale
    captions = [
        _caption(cell, notes[i % len(notes)] if notes else f"seed {cell.seed}", cell_width) for i, cell in enumerate(cells)
    ]
    caption_height = LINE * max(len(lines) for lines in captions) + 6
    rows = -(-len(cells) // columns)
    positions = _cell_positions([cell.prompt for cell in cells], columns)
    num_columns = 1 + max(column for column, _ in positions)  # with those of sources
    size = (GAP + num_columns * (cell_width + GAP), GAP + rows * (cell_height + caption_height + GAP))
    grid = Image.new("RGB", size, PAPER)
    pen, font = ImageDraw.Draw(grid), ImageFont.load_default(11)
    boxes = []
    for i, (pixels, lines) in enumerate(zip(to_bytes(images), captions, strict=True)):
        column, source = positions[i]
        x = GAP + column * (cell_width + GAP)
        y = GAP + i // columns * (cell_height + caption_height + GAP)
        if source is not None:
            fitted = ImageOps.contain(source.open(), (cell_width, cell_height))
            grid.paste(fitted, (x - GAP - fitted.width, y))
            pen.text((x - GAP - fitted.width, y + fitted.height + 4), "source", fill=INK, font=font)
        grid.paste(Image.fromarray(pixels).resize((cell_width, cell_height), Image.Resampling.NEAREST), (x, y))
        for n, line in enumerate(lines):
            pen.text((x, y + cell_height + 4 + n * LINE), line, fill=INK, font=font)
        boxes.append([x, y, cell_width, cell_height])
    info = PngInfo()
    content |= {"scale": scale, "cells": [_stored(cell, box) for cell, box in zip(cells, boxes, strict=True)]}
    info.add_itxt(CHUNK, json.dumps(content))
    with atomic_file(path) as file:
        grid.save(file, pnginfo=info)


def _stored(cell: ImageInfo, box: list[int]) -> dict[str, Any]:
    """What a file says of an image in it."""
    return {**asdict(cell), "had_source": bool(images_of(cell.prompt)), "box": box}


def _cell_positions(prompts: list[str], columns: int) -> list[tuple[int, SourceImage | None]]:
    """The column of each image, and the source that is shown in the column before it."""
    positions: list[tuple[int, SourceImage | None]] = []
    for i, prompt in enumerate(prompts):
        column = 0 if i % columns == 0 else positions[-1][0] + 1
        is_first = i % columns == 0 or prompt != prompts[i - 1]
        source = next(iter(images_of(prompt)), None) if is_first else None
        positions.append((column + (source is not None), source))
    return positions


def fits(count: int, images: Tensor) -> bool:
    """Whether a grid of `count` images of the size of these is small enough to be read again."""
    height, width = strips(images[:1]).shape[-2:]
    scale = max(1, -(-SMALLEST_CELL // width))
    return count * (height * scale + 3 * LINE + 6 + GAP) * (width * scale + GAP) <= MAX_PIXELS


def save_image(path: Path, image: Tensor, cell: ImageInfo, settings: Mapping[str, object] | None = None) -> None:
    """Write one image (3, H, W) in [0, 1] as a PNG, or a video (F, 3, H, W) as a WebP, which contains its prompt, seed and model.

    Args:
        settings: further ones that a PNG states for other programs, in AUTOMATIC1111's names.
    """
    if image.ndim == 4:
        save_animation(path.with_suffix(".webp"), image, description=json.dumps({"cells": [asdict(cell)]}))
        return
    info = PngInfo()
    content = {"scale": 1, "cells": [_stored(cell, [0, 0, image.shape[2], image.shape[1]])]}
    info.add_itxt(CHUNK, json.dumps(content))
    own = {"Seed": cell.seed, "Size": f"{image.shape[2]}x{image.shape[1]}", "Model": cell.model}
    info.add_text(FIELD, write_parameters(cell.prompt, {**(settings or {}), **own}))
    with atomic_file(path) as file:
        Image.fromarray(to_bytes(image[None])[0]).save(file, pnginfo=info)


def read_grid(path: Path) -> tuple[Tensor, list[ImageInfo]]:
    """The images (B, 3, H, W) in [0, 1] of a grid or single image that this module wrote, and what they are. Of videos: their strips.

    Raises:
        FlowGRPOError: not a PNG, damaged, too large, or written by another program.
    """
    return read_cells(open_image(path), path)


def has_prompts(image: Image.Image) -> bool:
    """Whether an opened image contains prompts."""
    return CHUNK in image.info


def shows_videos(image: Image.Image) -> bool:
    """Whether an opened grid, which contains prompts, shows strips of videos."""
    try:
        return bool(json.loads(image.info[CHUNK]).get("videos"))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return False  # reading its cells raises a better error


def read_cells(grid: Image.Image, path: Path) -> tuple[Tensor, list[ImageInfo]]:
    """As `read_grid`, for an image that `open_image` has opened."""
    try:
        content = json.loads(grid.info[CHUNK])
        scale, entries = int(content["scale"]), content["cells"]
        boxes = [(int(x), int(y), int(w), int(h)) for x, y, w, h in (entry["box"] for entry in entries)]
        cells = [ImageInfo(str(e["prompt"]), int(e["seed"]), str(e["model"]), bool(e.get("had_source"))) for e in entries]
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FlowGRPOError(f"{path} has no prompts in it: it was not written by flow-grpo sample.") from error
    are_inside = all(0 <= x < x + w <= grid.width and 0 <= y < y + h <= grid.height for x, y, w, h in boxes)
    one_size = len({(w, h) for _, _, w, h in boxes}) == 1
    if scale < 1 or not are_inside or not one_size or sum(w * h for _, _, w, h in boxes) > grid.width * grid.height:
        raise FlowGRPOError(f"{path} is damaged: its cells don't form a grid.")
    pixels = np.asarray(grid)
    images = [pixels[y : y + h : scale, x : x + w : scale] for x, y, w, h in boxes]
    return from_bytes(np.stack(images)), cells


def open_image(path: Path) -> Image.Image:
    """An image as RGB, with the text fields of a PNG as its `info`. FlowGRPOError if it can't be read, or is an animation."""
    pixels, text, is_animation = read_image_file(path)
    if is_animation:
        raise FlowGRPOError(f"the image {path} could not be read: it is an animation: give a single image.")
    pixels.info.clear()
    pixels.info.update(text)
    return pixels


def to_bytes(images: Tensor) -> np.ndarray:
    """(B, 3, H, W) in [0, 1] -> (B, H, W, 3) uint8."""
    return reward_images.to_bytes(images).permute(0, 2, 3, 1).numpy()


def from_bytes(pixels: np.ndarray) -> Tensor:
    """(B, H, W, 3) uint8 -> (B, 3, H, W) in [0, 1]."""
    return torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2).float() / 255


def _caption(cell: ImageInfo, note: str, width: int) -> list[str]:
    lines = textwrap.wrap(" ".join(cell.prompt.split()), max(12, width // 6), max_lines=2, placeholder=" …") or [""]
    return [*lines, note]
