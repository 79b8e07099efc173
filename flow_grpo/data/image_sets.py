"""Pictures that lie on disk, and what each shows: sheets and single pictures, ours or others', and folders of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from flow_grpo.data.grid import ImageInfo, has_prompts, open_image, read_cells, to_bytes
from flow_grpo.data.grid_layout import GridLayout
from flow_grpo.data.grid_options import GridOptions, layout_of
from flow_grpo.data.prompts import PromptSet, load_prompts

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
MANIFESTS = ("metadata.jsonl", "metadata.csv", "manifest.jsonl", "manifest.csv")
FILE_COLUMNS = ("file_name", "file")
HOW = "give --prompt, --prompts with a row for each, or a metadata.jsonl beside them with the columns file_name and prompt"


@dataclass(frozen=True)
class ImageRecords:
    """B pictures, there or still to be drawn: what each is. A seed is None where nothing says from which noise one was drawn."""

    labels: list[str]
    prompts: list[str]
    seeds: list[int | None]
    metadata: list[dict]

    def __len__(self) -> int:
        return len(self.labels)

    def columns(self, rows: Sequence[int] | None = None) -> dict[str, list]:
        """The metadata of these rows, by default of all, as rewards take it: a list by name."""
        return PromptSet(self.prompts, self.metadata).take(range(len(self)) if rows is None else rows, 1).columns()

    def take(self, rows: list[int]) -> Self:
        labels, prompts = [self.labels[i] for i in rows], [self.prompts[i] for i in rows]
        seeds, metadata = [self.seeds[i] for i in rows], [self.metadata[i] for i in rows]
        return replace(self, labels=labels, prompts=prompts, seeds=seeds, metadata=metadata)

    def head(self, count: int | None) -> Self:
        """All pictures of so many different prompts, from the first on, by default of all."""
        first = set(list(dict.fromkeys(self.prompts))[:count])
        return self.take([i for i, prompt in enumerate(self.prompts) if prompt in first])


@dataclass(frozen=True)
class ImageSet(ImageRecords):
    """B pictures of one size.

    Attributes:
        note: how a sheet that `sample` did not write was cut, to be shown.
    """

    pixels: Tensor  # (B, 3, H, W) uint8
    note: str = ""

    def images(self, rows: Sequence[int] | None = None) -> Tensor:
        """These rows, by default all: (n, 3, H, W) in [0, 1]."""
        return (self.pixels if rows is None else self.pixels[list(rows)]).float() / 255

    def take(self, rows: list[int]) -> Self:
        return replace(super().take(rows), pixels=self.pixels[rows])


def read(
    source: Path, prompts: PromptSet | str | None = None, sheet: GridOptions | None = None, promptless: bool = False
) -> ImageSet:
    """A sheet, a picture, or a folder of pictures.

    What `sample` wrote says itself what it shows, and a folder may have a manifest: metadata.jsonl or .csv as for the ImageFolder of
    `datasets`, with the columns file_name and prompt, perhaps seed, the rest metadata. The images of other sheets are found by their
    gutters, or cut as `sheet` says.

    Args:
        prompts: a row for each picture, in the order of their names, or of a sheet's cells row by row; or with the column file_name;
            or, for pictures that say their prompts, metadata of prompts. Of a sheet also one prompt for all or for each of its rows.
            A text is the prompt of all pictures.
        promptless: whether pictures without a prompt are taken, with an empty one.

    Raises:
        ValueError: what is missing, unreadable, ambiguous, outside of its folder, or of another size than the rest.
    """
    if source.is_file():
        return _of_sheet(source, prompts, sheet or GridOptions(), promptless)
    if not source.is_dir():
        raise ValueError(f"there is no picture or folder {source}.")
    manifest = next((source / name for name in MANIFESTS if (source / name).is_file()), None)
    return _of_folder(source, prompts, promptless) if manifest is None else _of_manifest(manifest, prompts)


def _of_sheet(file: Path, prompts: PromptSet | str | None, sheet: GridOptions, promptless: bool) -> ImageSet:
    picture = open_image(file)
    if has_prompts(picture):
        drawn, cells = read_cells(picture, file)
        pixels = torch.from_numpy(to_bytes(drawn)).permute(0, 3, 1, 2)
        labels = _numbered(file, len(cells))
        texts, metadata = _joined(labels, [cell.prompt for cell in cells], prompts, file)
        return ImageSet(labels, texts, [cell.seed for cell in cells], metadata, pixels)
    if prompts is None and not promptless:
        raise ValueError(
            f"{file} does not say what it shows: it was not written by flow-grpo sample. Give --prompt, or --prompts with a row for "
            "each of its images."
        )
    given = PromptSet([prompts or ""], [{}]) if prompts is None or isinstance(prompts, str) else prompts
    array = np.asarray(picture)
    layout = layout_of(array, sheet, str(file), allow_single=len(given) == 1)
    images = layout.crop_cells(array)
    places = _dealt(layout, images, len(given), file)
    pixels = torch.from_numpy(images[: len(places)]).permute(0, 3, 1, 2)
    texts, metadata = [given.prompts[i] for i in places], [given.metadata[i] for i in places]
    alone = layout.rows == layout.columns == 1
    note = f"one image of {layout.width} x {layout.height} pixels" if alone else str(layout)
    return ImageSet(_numbered(file, len(places)), texts, [None] * len(places), metadata, pixels, f"{file.name}: {note}")


def _dealt(layout: GridLayout, images: np.ndarray, prompts: int, file: Path) -> list[int]:
    """The place of each image's prompt. The last row of a sheet may end early, so that there are fewer images than cells."""
    cells = layout.rows * layout.columns
    if layout.filled <= prompts <= cells:
        return list(range(prompts))
    if prompts == 1:
        return [0] * layout.filled
    if prompts == layout.rows:
        return [cell // layout.columns for cell in range(layout.filled)]
    if cells - layout.columns < prompts < cells and all(not np.ptp(cell, axis=(0, 1)).any() for cell in images[prompts:]):
        return list(range(prompts))
    raise ValueError(
        f"there are {prompts} prompts for the {layout.filled} images in {layout.rows} rows of {file}: give one for each image, "
        "one for each row, or one for all."
    )


def _joined(
    labels: list[str], shown: Sequence[str | None], given: PromptSet | str | None, place: Path
) -> tuple[list[str], list[dict]]:
    """The prompt and the metadata of each picture: by its file's name, by its place, or by its prompt where that is unambiguous.

    Args:
        shown: the prompts that pictures say themselves.
    """
    if given is None:
        return [text or "" for text in shown], [{} for _ in shown]
    if isinstance(given, str):
        given = PromptSet([given] * len(labels), [{}] * len(labels))
    column = next((name for name in FILE_COLUMNS if name in given.metadata[0]), None)
    if column is not None and place.is_dir():
        rows = _by_name(labels, [row[column] for row in given.metadata], place)
    elif len(given) == len(labels):
        rows = list(range(len(labels)))
    else:
        return _by_prompt(labels, shown, given, place)
    for label, text, row in zip(labels, shown, rows, strict=True):
        if text is not None and text != given.prompts[row]:
            raise ValueError(
                f"{label} in {place} shows {text!r}, but the prompt that is given for it, row {row + 1}, is {given.prompts[row]!r}: "
                "give the rows in the order of the images."
            )
    metadata = [{key: value for key, value in given.metadata[i].items() if key != column} for i in rows]
    return [given.prompts[i] for i in rows], metadata


def _by_name(labels: list[str], names: list[object], folder: Path) -> list[int]:
    """The row of each picture, by the column of file names."""
    places: dict[object, int] = {}
    for row, name in enumerate(names):
        if places.setdefault(name, row) != row:
            raise ValueError(
                f"the rows {places[name] + 1} and {row + 1} of the prompts are both of {name}: keep one of them."
            )
    missing = next((label for label in labels if label not in places), None)
    if missing is not None:
        raise ValueError(f"the prompts have no row whose file name is {missing}, which is in {folder}.")
    return [places[label] for label in labels]


def _by_prompt(
    labels: list[str], shown: Sequence[str | None], given: PromptSet, place: Path
) -> tuple[list[str], list[dict]]:
    """The metadata of each picture's prompt, of those that are among the given ones."""
    counts = f"there are {len(given)} prompts for {len(labels)} pictures in {place}"
    texts = [text for text in shown if text is not None]
    if len(texts) < len(labels):
        raise ValueError(f"{counts}: {HOW}.")
    known: dict[str, dict] = {}
    for text, row in zip(given.prompts, given.metadata, strict=True):
        if text in texts and known.setdefault(text, row) != row:
            raise ValueError(
                f"{counts}, and several with the text {text!r} but other metadata: give a row for each picture, in their order."
            )
    if any(given.metadata) and not known:
        raise ValueError(f"{counts}, none of which is a prompt of theirs: give a row for each picture, in their order.")
    return texts, [known.get(text, {}) for text in texts]


def _of_manifest(manifest: Path, prompts: PromptSet | str | None) -> ImageSet:
    table, folder = load_prompts(manifest), manifest.parent
    column = next((name for name in FILE_COLUMNS if name in table.metadata[0]), None)
    if column is None:
        raise ValueError(f"{manifest} has no column `file_name` with the picture's path beside it.")
    metadata = [dict(row) for row in table.metadata]
    files = [_inside(manifest, row.pop(column)) for row in metadata]
    seeds = [_seed(manifest, row.pop("seed", None)) for row in metadata]
    labels = [str(file.relative_to(folder)) for file in files]
    _, known = _joined(labels, table.prompts, prompts, folder)
    pixels = _stacked(files, [np.asarray(open_image(file)) for file in files])
    return ImageSet(labels, table.prompts, seeds, [a | b for a, b in zip(known, metadata, strict=True)], pixels)


def _inside(manifest: Path, name: object) -> Path:
    """The picture of that name, which must lie in the manifest's folder: a manifest may come from anybody."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError(f"{manifest} has {name!r} where a picture's path should stand.")
    folder, file = manifest.parent, manifest.parent / name
    if not file.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{manifest} names {name!r}, which lies outside of its folder: give paths inside it.")
    if not file.is_file():
        raise ValueError(f"{manifest} names {name!r}, which is not there.")
    return file


def _seed(manifest: Path, value: object) -> int | None:
    if value is None or value != value:  # a table's empty number is NaN
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise ValueError(f"{manifest} has the seed {value!r}, which is no whole number.")
    return int(value)


def _of_folder(folder: Path, prompts: PromptSet | str | None, promptless: bool) -> ImageSet:
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and f.name != "grid.png")
    if not files:
        raise ValueError(f"the folder {folder} holds no pictures.")
    labels, opened = [file.name for file in files], [_first(file) for file in files]
    pixels, cells = _stacked(files, [array for array, _ in opened]), [cell for _, cell in opened]
    odd = next((file for file, cell in zip(files, cells, strict=True) if cell is None), None)
    if odd is not None and prompts is None and not promptless:
        raise ValueError(
            f"{odd} does not say what it shows: it was not written by flow-grpo sample. Of such pictures {HOW}."
        )
    texts, metadata = _joined(labels, [None if cell is None else cell.prompt for cell in cells], prompts, folder)
    return ImageSet(labels, texts, [None if cell is None else cell.seed for cell in cells], metadata, pixels)


def _first(file: Path) -> tuple[np.ndarray, ImageInfo | None]:
    """A picture as (H, W, 3) uint8, and what it says of itself; of a sheet its first cell."""
    picture = open_image(file)
    if not has_prompts(picture):
        return np.asarray(picture), None
    images, cells = read_cells(picture, file)
    return to_bytes(images[:1])[0], cells[0]


def _stacked(files: list[Path], arrays: list[np.ndarray]) -> Tensor:
    """Pictures (H, W, 3) as (B, 3, H, W)."""
    odd = next((file for file, array in zip(files, arrays, strict=True) if array.shape != arrays[0].shape), None)
    if odd is not None:
        raise ValueError(f"{odd} is of another size than {files[0]}: score pictures of one size at a time.")
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)


def _numbered(file: Path, count: int) -> list[str]:
    return [f"{file.name}[{i}]" for i in range(count)]


def is_picture(path: Path) -> bool:
    """Whether a file is called as a picture is."""
    return path.suffix.lower() in SUFFIXES and path.is_file()
