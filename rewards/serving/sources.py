"""Source images of a request to a reward server, each sent once, with the image indices of each row."""

import base64
import io
from typing import Any

from PIL import Image

from rewards.images import to_png, to_rgb


def pack_sources(sources: list[list[Image.Image]]) -> dict[str, list]:
    """Encode the images of B prompts: {"files": base64 PNGs, "rows": B lists of indices into them}."""
    index_of: dict[int, int] = {}  # by identity: the images of a group are one object
    files: list[str] = []
    for image in (image for row in sources for image in row):
        if id(image) not in index_of:
            index_of[id(image)] = len(files)
            files.append(base64.b64encode(to_png(image)).decode())
    return {"files": files, "rows": [[index_of[id(image)] for image in row] for row in sources]}


def unpack_sources(packed: Any, count: int, max_pixels: int) -> list[list[Image.Image]]:
    """Decode what `pack_sources` made, for `count` rows. ValueError if it is malformed, or has more pixels than are allowed."""
    if not isinstance(packed, dict) or not isinstance(packed.get("files"), list) or not isinstance(packed.get("rows"), list):
        raise ValueError("`sources` must have the lists `files` and `rows`")
    files, rows = packed["files"], packed["rows"]
    if len(rows) != count or not all(isinstance(row, list) and all(map(_is_index(len(files)), row)) for row in rows):
        raise ValueError(f"`rows` of `sources` must have a list of indices into `files` for each of {count} images")
    opened = [Image.open(io.BytesIO(base64.b64decode(file, validate=True)), formats=["PNG"]) for file in files]
    if sum(image.width * image.height for image in opened) > max_pixels:
        raise ValueError(f"the images of `sources` have more than {max_pixels:,} pixels together")
    images = [to_rgb(image) for image in opened]
    return [[images[index] for index in row] for row in rows]


def _is_index(count: int) -> Any:
    return lambda value: type(value) is int and 0 <= value < count
