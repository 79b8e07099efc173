"""What a request to a reward server holds: read within limits, decoded, and checked. A bad one gets a 4xx status and a sentence."""

import asyncio
import base64
import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.torch
import torch
from fastapi import HTTPException, Request
from PIL import Image
from starlette.requests import ClientDisconnect
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.images import to_rgb
from flow_grpo.rewards.serving.sources import unpack_sources

RAW = "application/x-safetensors"


@dataclass(frozen=True)
class Limits:
    """Limits of a request: bytes of its body, pixels of its images and values of its JSON, all counted before decoding, and seconds
    until the body is complete."""

    body: int = 256_000_000
    pixels: int = 100_000_000
    values: int = 1_000_000
    seconds: float = 120.0


def refused(status: int, sentence: str) -> HTTPException:
    """An HTTP error with a message, whose characters are escaped so that it can be encoded as UTF-8."""
    return HTTPException(status, sentence.encode("utf-8", "backslashreplace").decode())


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read the body; refuse it as soon as it is known to be too long or too late."""
    too_long = refused(413, f"the body is longer than {limits.body:,} bytes: send fewer images at a time.")
    if int(request.headers.get("content-length", "0")) > limits.body:  # digits: the HTTP protocol has checked that
        raise too_long
    body = bytearray()

    async def read() -> None:
        async for part in request.stream():
            body.extend(part)
            if len(body) > limits.body:
                raise too_long

    try:
        await asyncio.wait_for(read(), limits.seconds)
    except asyncio.TimeoutError as error:
        raise refused(408, f"the body was not complete within {limits.seconds:g} seconds.") from error
    except ClientDisconnect as error:
        raise refused(400, "the connection was closed before the end of the body.") from error
    return bytes(body)


def decode(kind: str, body: bytes, limits: Limits) -> tuple[dict[str, Any], Tensor, dict[str, Tensor]]:
    """Decode a body to the request's JSON, images (B, 3, H, W), and further tensors by name."""
    try:
        if kind == RAW:
            request, pixels = _header(body, limits)
        elif kind == "application/json":
            request = _json(body, limits)
            opened = _opened(request)
            pixels = sum(image.width * image.height for image in opened)
        else:
            raise refused(415, f"the content type {kind[:100]!r} is neither {RAW} nor application/json.")
    except Image.DecompressionBombError as error:
        raise refused(413, f"an image is too large: {error}") from error
    except (TypeError, ValueError, OSError, SyntaxError, RecursionError) as error:
        raise refused(400, f"the request can't be read: {type(error).__name__}: {str(error)[:200]}") from error
    if pixels > limits.pixels:
        raise refused(413, f"the images have more than {limits.pixels:,} pixels together: send fewer at a time.")
    if not pixels:
        raise refused(400, "there must be at least one image.")
    try:  # after its size was checked
        tensors = (
            safetensors.torch.load(body) if kind == RAW else {"images": torch.cat([_pixels(image) for image in opened])}
        )
        images = tensors.pop("images")
    except Exception as error:  # decoders raise many types on malformed bytes
        raise refused(400, f"the images can't be decoded: {type(error).__name__}: {str(error)[:200]}") from error
    return request, images, tensors


def _header(body: bytes, limits: Limits) -> tuple[dict[str, Any], int]:
    """Read the request's JSON and the number of pixels from the header of a safetensors file with the images."""
    end = 8 + int.from_bytes(body[:8], "little")
    if end > len(body):
        raise FlowGRPOError("the header is longer than the body")
    header = _json(body[8:end], limits)
    images, more = _object(header.get("images"), "`images`"), _object(header.get("__metadata__"), "`__metadata__`")
    shape = _list(images.get("shape"), "the shape of `images`")
    if images.get("dtype") != "F32" or len(shape) != 4 or not all(type(size) is int and size >= 0 for size in shape):
        raise FlowGRPOError("`images` must be of dtype F32 and have a shape of four sizes")
    count, channels, height, width = shape
    if channels != 3:
        raise FlowGRPOError("the images must have three channels")
    if not isinstance(more.get("request"), str):
        raise TypeError("`__metadata__` must have the text `request`")
    return _json(more["request"].encode(), limits), count * height * width


def _json(text: bytes, limits: Limits) -> dict[str, Any]:
    """Parse a JSON object. Its values are counted first, by their separators, since a short text can decode to a large object."""
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > limits.values:
        raise FlowGRPOError(f"there are more than {limits.values:,} values")
    return _object(json.loads(text), "the JSON")


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be an object")
    return value


def _list(value: Any, name: str) -> list:
    if not isinstance(value, list):
        raise TypeError(f"{name} must be a list")
    return value


def _opened(request: dict[str, Any]) -> list[Image.Image]:
    """Open the images of a request's JSON, which must be of one size."""
    images = [_open(encoded) for encoded in _list(request.get("images"), "`images`")]
    if len({image.size for image in images}) > 1:
        raise FlowGRPOError("the images are not of one size")
    return images


def _open(encoded: str) -> Image.Image:
    """Open a base64 PNG, reading its header only."""
    return Image.open(io.BytesIO(base64.b64decode(encoded, validate=True)), formats=["PNG"])


def _pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(to_rgb(image)).copy()).permute(2, 0, 1)[None].float() / 255


def checked(request: dict[str, Any], count: int, names: list[str]) -> tuple[str, list[str], dict[str, list]]:
    """Check a request for `count` images; returns the reward's name, the prompts and the metadata."""
    name = request.get("reward")
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        raise refused(404, f"there is no reward {str(name)[:100]!r} here; name one of {', '.join(names)}.")
    prompts, columns = request.get("prompts"), {} if request.get("metadata") is None else request["metadata"]
    if not isinstance(prompts, list) or len(prompts) != count or not all(map(_is_text, prompts)):
        raise refused(400, f"`prompts` must be a list of {count} texts, one for each image.")
    if not isinstance(columns, dict) or not all(isinstance(c, list) and len(c) == count for c in columns.values()):
        raise refused(400, f"`metadata` must have lists of {count} values, one for each image.")
    if {"images", "prompts"} & columns.keys():
        raise refused(400, "no column of `metadata` may be called images or prompts.")
    return name, prompts, columns


def checked_group(request: dict[str, Any], count: int, name: str) -> list[int]:
    """The group of each of `count` images, for a reward that sees them together."""
    group = request.get("group")
    if not isinstance(group, list) or len(group) != count or not all(type(number) is int for number in group):
        raise refused(
            400, f"the reward {name} sees whole groups: `group` must be a list of {count} whole numbers, one for each image."
        )
    return group


def checked_sources(
    request: dict[str, Any], tensors: dict[str, Tensor], count: int, limits: Limits
) -> list[list[Image.Image]]:
    """The images of the prompts of `count` images."""
    try:
        return unpack_sources(request["sources"], tensors, count, limits.pixels)
    except Exception as error:  # decoders raise many types on malformed bytes
        raise refused(400, f"`sources` can't be read: {type(error).__name__}: {str(error)[:200]}") from error


def _is_text(value: Any) -> bool:
    """Whether a value is a string without lone surrogates, which JSON can hold but no file or tokenizer accepts."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
