"""Images on disk and their prompts: grid images, single images and folders, written by `sample` or by other programs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from typing_extensions import Self

from flow_grpo.data.grid import FIELD, ImageInfo, has_prompts, open_image, prompt_of, read_cells, shows_videos, to_bytes
from flow_grpo.data.grid_layout import GridLayout, GridOptions, layout_of
from flow_grpo.data.image_folders import (
    HOW_TO_GIVE_PROMPTS,
    FoundImage,
    caption_of,
    file_column,
    find_images,
    join_prompts,
    left_out_note,
    rows_without_image,
)
from flow_grpo.data.prompt_files import read_table
from flow_grpo.data.prompt_sources import FILE_NAME, folder_file, text_files
from flow_grpo.data.prompts import PromptSet
from flow_grpo.errors import FlowGRPOError
from flow_grpo.image_prompt import images_of
from flow_grpo.rewards.image_files import SUFFIXES
from flow_grpo.text import counted


@dataclass(frozen=True)
class ImageRecords:
    """What B images are, or will be once they are generated. A seed is None where the image's noise is unknown.

    Attributes:
        lacks_sources: whether images were made of prompts with images, which are not known.
    """

    labels: list[str]
    prompts: list[str]
    seeds: list[int | None]
    metadata: list[dict]
    lacks_sources: bool = field(default=False, kw_only=True)

    def __len__(self) -> int:
        return len(self.labels)

    def columns(self, rows: Sequence[int] | None = None) -> dict[str, list]:
        """The metadata of these rows, by default of all, as reward keyword arguments: a list by name."""
        return PromptSet(self.prompts, self.metadata).take(range(len(self)) if rows is None else rows, 1).columns()

    def take(self, rows: list[int]) -> Self:
        """Some of the records, in the order of `rows`."""
        labels, prompts = [self.labels[i] for i in rows], [self.prompts[i] for i in rows]
        seeds, metadata = [self.seeds[i] for i in rows], [self.metadata[i] for i in rows]
        return replace(self, labels=labels, prompts=prompts, seeds=seeds, metadata=metadata)

    def head(self, count: int | None) -> Self:
        """All images of the first `count` different prompts, by default of all prompts."""
        first = set(list(dict.fromkeys(self.prompts))[:count])
        return self.take([i for i, prompt in enumerate(self.prompts) if prompt in first])


@dataclass(frozen=True)
class ImageSet(ImageRecords):
    """B images of one size.

    Attributes:
        note: for the user: how a grid image that `sample` did not write was cut, or which rows of the prompts have no image.
    """

    pixels: Tensor  # (B, 3, H, W) uint8
    note: str = ""

    def images(self, rows: Sequence[int] | None = None) -> Tensor:
        """These rows, by default all: (n, 3, H, W) in [0, 1]."""
        return (self.pixels if rows is None else self.pixels[list(rows)]).float() / 255

    def take(self, rows: list[int]) -> Self:
        return replace(super().take(rows), pixels=self.pixels[rows])


def read(
    source: Path, prompts: PromptSet | str | None = None, grid: GridOptions | None = None, promptless: bool = False
) -> ImageSet:
    """Read a grid image, a single image, or a folder of images.

    Images that `sample` wrote contain their prompts. A folder may have a manifest: metadata.jsonl or .csv as for the ImageFolder of
    `datasets`, with the columns file_name and prompt, optionally seed; other columns are metadata. Or a caption beside each image, or
    GenEval's folders of samples. A folder without images has those of its folders. Other grid images are cut at their gutters, or as
    `grid` specifies; those in a folder only as `grid` specifies.

    Args:
        prompts: a row for each image, in natural order of file names or of a grid's cells row by row; or rows with the column
            file_name; or, for images that contain their prompts, metadata by prompt. For a grid also one prompt for all images or for
            each row, and for a folder of grids one for each file. A text is the prompt of all images.
        promptless: whether images without a prompt are accepted; their prompt is "".

    Raises:
        FlowGRPOError: something is missing, unreadable, ambiguous, outside its folder, or differs in size from the rest.
    """
    if source.is_dir():
        return _from_folder(source, prompts, grid or GridOptions(), promptless)
    if not source.exists():
        raise FlowGRPOError(f"there is no image or folder {source}.")
    return _from_grid(source, prompts, grid or GridOptions(), promptless)


def _from_grid(file: Path, prompts: PromptSet | str | None, grid: GridOptions, promptless: bool) -> ImageSet:
    image = open_image(file)
    if has_prompts(image):
        _check_no_videos(image, file)
        stored, cells = read_cells(image, file)
        pixels = torch.from_numpy(to_bytes(stored)).permute(0, 3, 1, 2)
        labels = _cell_labels(file, len(cells))
        texts, metadata = join_prompts(labels, [cell.prompt for cell in cells], prompts, file)
        lacks_sources = _lacks_sources(texts, cells)
        return ImageSet(labels, texts, [cell.seed for cell in cells], metadata, pixels, lacks_sources=lacks_sources)
    if prompts is None:
        prompts = caption_of(file)[0] or prompt_of(image.info.get(FIELD))
    if prompts is None and not promptless:
        raise FlowGRPOError(
            f"{file} has no prompts in it: it was not written by flow-grpo sample. Give --prompt, or --prompts with a row for "
            "each of its images."
        )
    prompt_set = PromptSet([prompts or ""], [{}]) if prompts is None or isinstance(prompts, str) else prompts
    array = np.asarray(image)
    layout = layout_of(array, grid, str(file), allow_single=len(prompt_set) == 1)
    images = layout.crop_cells(array)
    indices = _prompt_indices(layout, images, len(prompt_set), file)
    pixels = torch.from_numpy(images[: len(indices)]).permute(0, 3, 1, 2)
    texts, metadata = [prompt_set.prompts[i] for i in indices], [prompt_set.metadata[i] for i in indices]
    is_single = layout.rows == layout.columns == 1
    note = f"one image of {layout.width} x {layout.height} pixels" if is_single else str(layout)
    labels, note = _cell_labels(file, len(indices)), f"{file.name}: {note}"
    return ImageSet(labels, texts, [None] * len(indices), metadata, pixels, note=note)


def _prompt_indices(layout: GridLayout, images: np.ndarray, prompts: int, file: Path) -> list[int]:
    """The index of each image's prompt. The last row of a grid may end early, so that there are fewer images than cells."""
    cells = layout.rows * layout.columns
    if layout.filled <= prompts <= cells:
        return list(range(prompts))
    if prompts == 1:
        return [0] * layout.filled
    if prompts == layout.rows:
        return [cell // layout.columns for cell in range(layout.filled)]
    if cells - layout.columns < prompts < cells and all(not np.ptp(cell, axis=(0, 1)).any() for cell in images[prompts:]):
        return list(range(prompts))
    raise FlowGRPOError(
        f"there are {prompts} prompts for the {layout.filled} images in {layout.rows} rows of {file}: give one for each image, "
        "one for each row, or one for all."
    )


@dataclass(frozen=True)
class _Read:
    """An image of a folder: its file's name there, its label, pixels (H, W, 3), and what is known of it.

    Attributes:
        prompt: of the folder's table, or in the file by `sample`.
        caption: in the file beside it, or in the file by another program.
        made_of: what `sample` stored.
    """

    name: str
    label: str
    pixels: np.ndarray
    prompt: str | None
    caption: str | None
    seed: int | None
    metadata: dict
    made_of: ImageInfo | None


def _from_folder(folder: Path, prompts: PromptSet | str | None, grid: GridOptions, promptless: bool) -> ImageSet:
    found = find_images(folder)
    left_out = left_out_note(folder, found.left_out)
    if not found.images:
        raise FlowGRPOError(f"the folder {folder} contains no images{f' ({left_out})' if left_out else ''}.")
    files = [image.file for image in found.images]
    read_images, layouts = zip(*(_read_found(image, folder, grid) for image in found.images), strict=True)
    images = [image for of_file in read_images for image in of_file]
    without = next((image for image in images if not image.prompt and not image.caption), None)
    if without is not None and prompts is None and not promptless:
        raise FlowGRPOError(
            f"{folder / without.name} has no prompt in it: it was not written by flow-grpo sample. For such images "
            f"{HOW_TO_GIVE_PROMPTS}."
        )
    names, owner = [image.name for image in images], [i for i, of_file in enumerate(read_images) for _ in of_file]
    if isinstance(prompts, PromptSet) and len(prompts) == len(files) < len(images) and file_column(prompts) is None:
        prompts = PromptSet([prompts.prompts[i] for i in owner], [prompts.metadata[i] for i in owner])
    own, captions = [image.prompt for image in images], [image.caption for image in images]
    plain = [None if prompt is None else str(prompt) for prompt in own]  # equal to prompts without its images
    given, joined = join_prompts(names, plain, prompts, folder, captions)
    texts = [text if text is not None and images_of(text) else other for text, other in zip(own, given, strict=True)]
    metadata = [row | image.metadata for row, image in zip(joined, images, strict=True)]
    cut = [layout for layout in layouts if layout is not None]
    folders = len({file.parent for file in files})
    notes = [
        *found.notes,
        f"{folder}: {counted(len(files), 'image')} in {counted(folders, 'folder')}" if folders > 1 else "",
        f"{folder}: {counted(len(cut), 'file')} cut into {counted(len(images), 'image')}; the first: {cut[0]}"
        if cut
        else "",
        left_out,
        rows_without_image(names, prompts, folder),
    ]
    return ImageSet(
        [image.label for image in images],
        texts,
        [image.seed for image in images],
        metadata,
        _stack([folder / image.name for image in images], [image.pixels for image in images]),
        note="\n".join(note for note in notes if note),
        lacks_sources=_lacks_sources(texts, [image.made_of for image in images]),
    )


def _read_found(found: FoundImage, folder: Path, grid: GridOptions) -> tuple[list[_Read], GridLayout | None]:
    """The images of a file, of which a grid has several, and how it was cut if it is another program's grid."""
    image, layout, stored = open_image(found.file), None, list[ImageInfo]()
    if has_prompts(image):
        _check_no_videos(image, found.file)
        cells, stored = read_cells(image, found.file)
        pixels = to_bytes(cells)
    elif grid.is_empty:
        pixels = np.asarray(image)[None]
    else:
        array = np.asarray(image)
        layout = layout_of(array, grid, str(found.file), allow_single=False)
        pixels = layout.crop_cells(array)[: layout.filled]
    name = str(found.file.relative_to(folder))
    caption = found.caption or prompt_of(image.info.get(FIELD))
    read_images = []
    for i, (cell, made_of) in enumerate(zip_longest(pixels, stored)):
        label = name if len(pixels) == 1 else f"{name}[{i}]"
        prompt = found.prompt if found.prompt is not None or made_of is None else made_of.prompt
        seed = found.seed if found.seed is not None or made_of is None or found.prompt is not None else made_of.seed
        read_images.append(_Read(name, label, cell, prompt, caption, seed, found.metadata, made_of))
    return read_images, layout


def _lacks_sources(prompts: Sequence[str], cells: Sequence[ImageInfo | None]) -> bool:
    """Whether an image was made of a prompt with images that are not among these prompts."""
    return any(
        cell is not None and cell.had_source and not images_of(prompt) for prompt, cell in zip(prompts, cells, strict=True)
    )


def _check_no_videos(image: Image.Image, file: Path) -> None:
    """Raise ValueError for a grid of videos: a strip of frames is no image that a reward knows."""
    if shows_videos(image):
        raise FlowGRPOError(f"{file} shows strips of videos, which can't be scored: measure the model by flow-grpo eval.")


def _stack(files: list[Path], arrays: list[np.ndarray]) -> Tensor:
    """Images (H, W, 3) as (B, 3, H, W)."""
    other_size = next((file for file, array in zip(files, arrays, strict=True) if array.shape != arrays[0].shape), None)
    if other_size is not None:
        raise FlowGRPOError(f"{other_size} has another size than {files[0]}: score images of one size at a time.")
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)


def _cell_labels(file: Path, count: int) -> list[str]:
    return [f"{file.name}[{i}]" for i in range(count)]


def is_prompt_folder(path: Path) -> bool:
    """Whether a folder has prompts, and not results: a metadata.jsonl or .csv without the column `seed`, or texts and no images."""
    manifest = folder_file(path)
    if manifest is None:
        return bool(text_files(path)) and not any(file.suffix.lower() in SUFFIXES for file in path.iterdir())
    columns = read_table(manifest, str(manifest), manifest.suffix.lower()).columns
    return FILE_NAME in columns and "seed" not in columns


def is_image_file(path: Path) -> bool:
    """Whether the path is a file with an image's suffix."""
    return path.suffix.lower() in SUFFIXES and path.is_file()


def has_images(folder: Path) -> bool:
    """Whether a folder has images, in itself or in its folders, as `read` finds them."""
    return bool(find_images(folder).images)
