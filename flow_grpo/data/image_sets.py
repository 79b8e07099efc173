"""Images on disk and their prompts: grid images, single images and folders, written by `sample` or by other programs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from typing_extensions import Self

from flow_grpo.data.grid import ImageInfo, has_prompts, open_image, read_cells, shows_videos, to_bytes
from flow_grpo.data.grid_layout import GridLayout
from flow_grpo.data.grid_options import GridOptions, layout_of
from flow_grpo.data.prompt_files import read_table
from flow_grpo.data.prompt_join import HOW_TO_GIVE_PROMPTS, file_column, join_prompts, rows_without_image
from flow_grpo.data.prompts import FILE_NAME, FOLDER_FILES, PromptSet, load_prompts
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import inside
from flow_grpo.image_prompt import images_of

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
MANIFESTS = ("metadata.jsonl", "metadata.csv", "manifest.jsonl", "manifest.csv")


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
    `datasets`, with the columns file_name and prompt, optionally seed; other columns are metadata. Other grid images are cut at their
    gutters, or as `grid` specifies.

    Args:
        prompts: a row for each image, in the order of file names or of a grid's cells row by row; or rows with the column file_name;
            or, for images that contain their prompts, metadata by prompt. For a grid also one prompt for all images or for each row.
            A text is the prompt of all images.
        promptless: whether images without a prompt are accepted; their prompt is "".

    Raises:
        FlowGRPOError: something is missing, unreadable, ambiguous, outside its folder, or differs in size from the rest.
    """
    if source.is_file():
        return _from_grid(source, prompts, grid or GridOptions(), promptless)
    if not source.is_dir():
        raise FlowGRPOError(f"there is no image or folder {source}.")
    manifest = next((source / name for name in MANIFESTS if (source / name).is_file()), None)
    return _from_folder(source, prompts, promptless) if manifest is None else _from_manifest(manifest, prompts)


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


def _from_manifest(manifest: Path, prompts: PromptSet | str | None) -> ImageSet:
    table, folder = load_prompts(manifest), manifest.parent
    column = file_column(table)
    if column is None:
        raise FlowGRPOError(f"{manifest} has no column `file_name` with the image's path in the same folder.")
    metadata = [dict(row) for row in table.metadata]
    files = [_image_path(manifest, row.pop(column)) for row in metadata]
    seeds = [_seed(manifest, row.pop("seed", None)) for row in metadata]
    labels = [str(file.relative_to(folder)) for file in files]
    given, known = join_prompts(labels, [str(prompt) for prompt in table.prompts], prompts, folder)
    shown = [own if images_of(own) else joined for own, joined in zip(table.prompts, given, strict=True)]
    pixels = _stack(files, [np.asarray(open_image(file)) for file in files])
    metadata, note = [a | b for a, b in zip(known, metadata, strict=True)], rows_without_image(labels, prompts, folder)
    return ImageSet(labels, shown, seeds, metadata, pixels, note=note)


def _image_path(manifest: Path, name: object) -> Path:
    """The path of an image, which must be inside the manifest's folder: the manifest may be untrusted."""
    file = inside(manifest.parent, name, str(manifest))
    if not file.is_file():
        raise FlowGRPOError(f"{manifest} names {name!r}, which does not exist.")
    return file


def _seed(manifest: Path, value: object) -> int | None:
    if value is None or value != value:  # a table's empty number is NaN
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise FlowGRPOError(f"{manifest} has the seed {value!r}, which is not a whole number.")
    return int(value)


def _from_folder(folder: Path, prompts: PromptSet | str | None, promptless: bool) -> ImageSet:
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and f.name != "grid.png")
    if not files:
        raise FlowGRPOError(f"the folder {folder} contains no images.")
    labels, opened = [file.name for file in files], [_read_image(file) for file in files]
    pixels, cells = _stack(files, [array for array, _ in opened]), [cell for _, cell in opened]
    without_prompt = next((file for file, cell in zip(files, cells, strict=True) if cell is None), None)
    if without_prompt is not None and prompts is None and not promptless:
        raise FlowGRPOError(
            f"{without_prompt} has no prompt in it: it was not written by flow-grpo sample. For such images {HOW_TO_GIVE_PROMPTS}."
        )
    texts, metadata = join_prompts(labels, [None if cell is None else cell.prompt for cell in cells], prompts, folder)
    seeds, note = [None if cell is None else cell.seed for cell in cells], rows_without_image(labels, prompts, folder)
    return ImageSet(labels, texts, seeds, metadata, pixels, note=note, lacks_sources=_lacks_sources(texts, cells))


def _lacks_sources(prompts: Sequence[str], cells: Sequence[ImageInfo | None]) -> bool:
    """Whether an image was made of a prompt with images that are not among these prompts."""
    return any(
        cell is not None and cell.had_source and not images_of(prompt) for prompt, cell in zip(prompts, cells, strict=True)
    )


def _read_image(file: Path) -> tuple[np.ndarray, ImageInfo | None]:
    """An image as (H, W, 3) uint8, and its prompt, seed and model if it contains them; of a grid image the first cell."""
    image = open_image(file)
    if not has_prompts(image):
        return np.asarray(image), None
    _check_no_videos(image, file)
    images, cells = read_cells(image, file)
    return to_bytes(images[:1])[0], cells[0]


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
    """Whether a folder has prompts with their images, and not results: a metadata.jsonl or .csv without the column `seed`."""
    manifest = next((path / name for name in FOLDER_FILES if (path / name).is_file()), None)
    if manifest is None:
        return False
    columns = read_table(manifest, str(manifest), manifest.suffix.lower()).columns
    return FILE_NAME in columns and "seed" not in columns


def is_image_file(path: Path) -> bool:
    """Whether the path is a file with an image's suffix."""
    return path.suffix.lower() in SUFFIXES and path.is_file()
