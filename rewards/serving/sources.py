"""Source images of a request to a reward server, each sent once, with the image indices of each row.

In a safetensors body their files are uint8 tensors, which the request names, since its header has a limit of 100 MB. In JSON they are
base64.
"""

import base64
import io
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.images import to_png, to_rgb


def pack_sources(sources: list[list[Image.Image]]) -> dict[str, list]:
    """Encode the images of B prompts: {"files": PNGs, "rows": B lists of indices into them}."""
    index_of: dict[int, int] = {}  # by identity: the images of a group are one object
    files: list[bytes] = []
    for image in (image for row in sources for image in row):
        if id(image) not in index_of:
            index_of[id(image)] = len(files)
            files.append(to_png(image))
    return {"files": files, "rows": [[index_of[id(image)] for image in row] for row in sources]}


def as_tensors(packed: dict[str, list]) -> tuple[dict[str, list], dict[str, Tensor]]:
    """The output of `pack_sources` with names in place of its files, and the files by these names."""
    tensors = {f"source_{i}": torch.frombuffer(bytearray(f), dtype=torch.uint8) for i, f in enumerate(packed["files"])}
    return {**packed, "files": list(tensors)}, tensors


def as_text(packed: dict[str, list]) -> dict[str, list]:
    """The output of `pack_sources` with its files in base64."""
    return {**packed, "files": [base64.b64encode(file).decode() for file in packed["files"]]}


def unpack_sources(packed: Any, tensors: dict[str, Tensor], count: int, max_pixels: int) -> list[list[Image.Image]]:
    """Decode what `as_tensors` or `as_text` made, for `count` rows. FlowGRPOError if it is malformed, or has more pixels than allowed."""
    if not isinstance(packed, dict) or not isinstance(packed.get("files"), list) or not isinstance(packed.get("rows"), list):
        raise FlowGRPOError("`sources` must have the lists `files` and `rows`")
    files, rows = packed["files"], packed["rows"]
    if len(rows) != count or not all(isinstance(row, list) and all(map(_is_index(len(files)), row)) for row in rows):
        raise FlowGRPOError(f"`rows` of `sources` must have a list of indices into `files` for each of {count} images")
    sent = {name: bytes(tensor.numpy()) for name, tensor in tensors.items()}  # once each, however often they are named
    contents = [sent[file] if file in sent else base64.b64decode(file, validate=True) for file in files]
    opened = [Image.open(io.BytesIO(content), formats=["PNG"]) for content in contents]
    if sum(image.width * image.height for image in opened) > max_pixels:
        raise FlowGRPOError(f"the images of `sources` have more than {max_pixels:,} pixels together")
    images = [to_rgb(image) for image in opened]
    return [[images[index] for index in row] for row in rows]


def _is_index(count: int) -> Any:
    return lambda value: type(value) is int and 0 <= value < count
