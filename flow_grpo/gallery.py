"""Pictures that lie on disk, and what each shows: sheets and single pictures, ours or others', and folders of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from flow_grpo.grid import Cell, cells_of, open_image, remembers, to_bytes
from flow_grpo.prompts import PromptSet, load_prompts

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
MANIFESTS = ("metadata.jsonl", "metadata.csv", "manifest.jsonl", "manifest.csv")
FILE_COLUMNS = ("file_name", "file")
HOW = "give --prompts, a file with a prompt for each, or a metadata.jsonl beside them with the columns file_name and prompt"


@dataclass(frozen=True)
class Rows:
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
class Gallery(Rows):
    """B pictures of one size."""

    pixels: Tensor  # (B, 3, H, W) uint8

    def images(self, rows: Sequence[int] | None = None) -> Tensor:
        """These rows, by default all: (n, 3, H, W) in [0, 1]."""
        return (self.pixels if rows is None else self.pixels[list(rows)]).float() / 255

    def take(self, rows: list[int]) -> Self:
        return replace(super().take(rows), pixels=self.pixels[rows])


@dataclass(frozen=True)
class Sheet:
    """How a sheet that was not written by us is cut into pictures.

    Attributes:
        padding: pixels around every picture, as torchvision's `make_grid` leaves them: 2 by default there.
    """

    rows: int = 1
    columns: int = 1
    padding: int = 0


def read(source: Path, prompts: PromptSet | None = None, sheet: Sheet | None = None) -> Gallery:
    """A sheet, a picture, or a folder of pictures.

    What `sample` wrote says itself what it shows, and a folder may have a manifest: metadata.jsonl or .csv as for the ImageFolder of
    `datasets`, with the columns file_name and prompt, perhaps seed, the rest metadata. `prompts` then only adds metadata to prompts
    that it knows. Otherwise there is one of `prompts` for each picture, in the order of their names, or of a sheet's cells row by
    row, or for each row of a sheet.

    Raises:
        ValueError: what is missing, unreadable, outside of its folder, or of another size than the rest.
    """
    if source.is_file():
        return _of_sheet(source, prompts, sheet)
    if not source.is_dir():
        raise ValueError(f"there is no picture or folder {source}.")
    manifest = next((source / name for name in MANIFESTS if (source / name).is_file()), None)
    return _of_folder(source, prompts) if manifest is None else _of_manifest(manifest, prompts)


def _of_sheet(file: Path, prompts: PromptSet | None, sheet: Sheet | None) -> Gallery:
    picture = open_image(file)
    if remembers(picture):
        images, cells = cells_of(picture, file)
        pixels = torch.from_numpy(to_bytes(images)).permute(0, 3, 1, 2)
        texts = [cell.prompt for cell in cells]
        seeds: list[int | None] = [cell.seed for cell in cells]
        return Gallery(_numbered(file, len(cells)), texts, seeds, _known(texts, prompts), pixels)
    if prompts is None:
        raise ValueError(
            f"{file} does not say what is in its cells: it was not written by flow-grpo sample. Give --prompts, and of a sheet "
            "--rows and --columns."
        )
    sheet = sheet or Sheet()
    pixels = _cut(np.asarray(picture), sheet, file)
    places = _dealt(len(pixels), sheet.rows, len(prompts), file)
    count = len(places)
    texts, metadata = [prompts.prompts[i] for i in places], [prompts.metadata[i] for i in places]
    return Gallery(_numbered(file, count), texts, [None] * count, metadata, pixels[:count])


def _cut(pixels: np.ndarray, sheet: Sheet, file: Path) -> Tensor:
    """(H, W, 3) -> (rows * columns, 3, h, w), row by row."""
    sizes = []
    for whole, count in zip(pixels.shape[:2], (sheet.rows, sheet.columns), strict=True):
        size, rest = divmod(whole - sheet.padding * (count + 1), count)
        if size < 1 or rest:
            raise ValueError(
                f"{file} has {pixels.shape[1]} x {pixels.shape[0]} pixels, which are not {sheet.columns} columns x {sheet.rows} rows of "
                f"pictures with {sheet.padding} pixels around each: give --rows, --columns and --padding as it was made."
            )
        sizes.append(size)
    (high, wide), pad = sizes, sheet.padding
    corners = [(pad + r * (high + pad), pad + c * (wide + pad)) for r in range(sheet.rows) for c in range(sheet.columns)]
    return torch.from_numpy(np.stack([pixels[y : y + high, x : x + wide] for y, x in corners])).permute(0, 3, 1, 2)


def _dealt(cells: int, rows: int, prompts: int, file: Path) -> list[int]:
    """The place of each cell's prompt. The last row of a sheet may be half empty, so that there are fewer prompts than cells."""
    if prompts == rows:
        return [cell * rows // cells for cell in range(cells)]
    if cells - cells // rows < prompts <= cells:
        return list(range(prompts))
    raise ValueError(
        f"there are {prompts} prompts for the {cells} pictures in {rows} rows of {file}: give one for each picture or each row."
    )


def _of_manifest(manifest: Path, prompts: PromptSet | None) -> Gallery:
    table, folder = load_prompts(manifest), manifest.parent
    column = next((name for name in FILE_COLUMNS if name in table.metadata[0]), None)
    if column is None:
        raise ValueError(f"{manifest} has no column `file_name` with the picture's path beside it.")
    metadata = [dict(row) for row in table.metadata]
    files = [_inside(manifest, row.pop(column)) for row in metadata]
    seeds = [_seed(manifest, row.pop("seed", None)) for row in metadata]
    known = _known(table.prompts, prompts)
    labels = [str(file.relative_to(folder)) for file in files]
    pixels = _stacked(files, [np.asarray(open_image(file)) for file in files])
    return Gallery(labels, table.prompts, seeds, [a | b for a, b in zip(known, metadata, strict=True)], pixels)


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


def _of_folder(folder: Path, prompts: PromptSet | None) -> Gallery:
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and f.name != "grid.png")
    if not files:
        raise ValueError(f"the folder {folder} holds no pictures.")
    labels, opened = [file.name for file in files], [_first(file) for file in files]
    pixels, cells = _stacked(files, [array for array, _ in opened]), [cell for _, cell in opened if cell is not None]
    if len(cells) == len(files):
        texts = [cell.prompt for cell in cells]
        return Gallery(labels, texts, [cell.seed for cell in cells], _known(texts, prompts), pixels)
    if prompts is None:
        odd = next(file for file, (_, cell) in zip(files, opened, strict=True) if cell is None)
        raise ValueError(
            f"{odd} does not say what it shows: it was not written by flow-grpo sample. Of such pictures {HOW}."
        )
    if len(prompts) != len(files):
        raise ValueError(f"there are {len(prompts)} prompts for {len(files)} pictures in {folder}: {HOW}.")
    return Gallery(labels, prompts.prompts, [None] * len(files), prompts.metadata, pixels)


def _first(file: Path) -> tuple[np.ndarray, Cell | None]:
    """A picture as (H, W, 3) uint8, and what it says of itself; of a sheet its first cell."""
    picture = open_image(file)
    if not remembers(picture):
        return np.asarray(picture), None
    images, cells = cells_of(picture, file)
    return to_bytes(images[:1])[0], cells[0]


def _stacked(files: list[Path], arrays: list[np.ndarray]) -> Tensor:
    """Pictures (H, W, 3) as (B, 3, H, W)."""
    odd = next((file for file, array in zip(files, arrays, strict=True) if array.shape != arrays[0].shape), None)
    if odd is not None:
        raise ValueError(f"{odd} is of another size than {files[0]}: score pictures of one size at a time.")
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)


def _known(texts: list[str], prompts: PromptSet | None) -> list[dict]:
    """The metadata of these prompts, as far as `prompts` knows them."""
    table = {} if prompts is None else dict(zip(prompts.prompts, prompts.metadata, strict=True))
    return [table.get(text, {}) for text in texts]


def _numbered(file: Path, count: int) -> list[str]:
    return [f"{file.name}[{i}]" for i in range(count)]


def is_picture(path: Path) -> bool:
    """Whether a file is called as a picture is."""
    return path.suffix.lower() in SUFFIXES and path.is_file()
