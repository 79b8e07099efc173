"""The images of prompts: the column `image` of a prompt file, read and checked once."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import inside
from flow_grpo.image_prompt import SourceImage
from flow_grpo.progress import phase

COLUMN = "image"
DERIVED = ("source", "sources")  # arguments of rewards that are made of the images
MAX_IMAGES = 16  # of one prompt


def read_images(
    cells: Sequence[Any],
    locations: Sequence[str],
    folder: Path | None,
    column: str = COLUMN,
    stay_inside: bool = False,
) -> list[tuple[SourceImage, ...]]:
    """Read the images of each prompt, from the cells of a column.

    Args:
        cells: each a path, a list of paths, a mapping with `bytes` or `path` as hub data sets have, a PIL image, or None.
        locations: of the cells, such as `prompts.csv, line 3`, for errors.
        folder: which paths are relative to; None if there is none, as for a file at an address.
        column: its name, for errors.
        stay_inside: refuse paths that lead out of the folder, since the table may be a stranger's.

    Raises:
        FlowGRPOError: an image does not exist, is damaged, too large or no image, or is outside the folder; names the location.
    """
    readers = [
        [_reader(image, location, folder, column, stay_inside) for image in _cell_images(cell, location, column)]
        for cell, location in zip(cells, locations, strict=True)
    ]
    flat = [reader for of_prompt in readers for reader in of_prompt]
    with ThreadPoolExecutor() as threads, phase("reading the prompts' images", total=len(flat)) as done:
        read = []
        for image in threads.map(lambda reader: reader(), flat):
            read.append(image)
            done.advance(1)
    images = iter(read)
    return [tuple(next(images) for _ in of_prompt) for of_prompt in readers]


def _cell_images(cell: Any, location: str, column: str) -> list[Any]:
    """The images of a cell, each still a path, content or mapping."""
    if isinstance(cell, str) and cell.strip().startswith("["):  # of a .csv file
        try:
            cell = json.loads(cell)
        except ValueError as error:
            raise FlowGRPOError(
                f"{location}: the column `{column}` holds {cell[:80]!r}, which is not a list of paths."
            ) from error
    if cell is None or cell == "":
        return []
    images = list(cell) if isinstance(cell, list | tuple) else [cell]
    if len(images) > MAX_IMAGES:
        raise FlowGRPOError(f"{location}: a prompt has {len(images)} images; at most {MAX_IMAGES} are allowed.")
    return images


def _reader(image: Any, location: str, folder: Path | None, column: str, stay_inside: bool) -> Callable[[], SourceImage]:
    """What reads one image, once it is called."""
    if isinstance(image, Image.Image):
        return partial(SourceImage.from_pil, image, f"of {location}")
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return partial(SourceImage.read, image, f"of {location}")
    if not isinstance(image, str | Path) or not str(image).strip() or "\0" in str(image):
        raise FlowGRPOError(f"{location}: the column `{column}` holds {repr(image)[:80]}; give a path, or a list of paths.")
    if folder is None and (stay_inside or not Path(image).is_absolute()):
        raise FlowGRPOError(
            f"{location}: the image {str(image)[:200]} has no folder to be found in: download the file and its images."
        )
    path = (folder or Path()) / image
    if folder is not None and stay_inside:
        path = inside(folder, str(path.relative_to(folder) if path.is_relative_to(folder) else image), location)
    return partial(SourceImage.read, path, f"{str(image)[:200]} ({location})")
