"""Any reward behind HTTP, so that it can live in an environment or on a machine of its own.

    POST /score   application/x-safetensors: the tensor `images` (B, 3, H, W), float32 in [0, 1], bit for bit, and in the
                  file's own metadata `request`, the JSON below; or application/json: the same JSON with `images`, B PNGs
                  in base64.
                  {"reward": name, "prompts": [B texts], "metadata": {column: [B values]}}; one reward needs no name.
                  Answers {"values": [B numbers]}; one that is not finite is "nan", "inf" or "-inf".
    GET /health   {"rewards": [names], "versions": {...}}

Errors are 4xx with one sentence as `detail`. Nothing is ever unpickled. The token travels in the clear: where others may listen,
go through TLS or an ssh tunnel.
"""

import base64
import io
import ipaddress
import json
import math
import os
import platform
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import safetensors.torch
import torch
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from PIL import Image
from starlette.concurrency import run_in_threadpool
from torch import Tensor

from rewards import Reward, load, raw_score
from rewards.batches import to_rgb

RAW = "application/x-safetensors"
CONNECTIONS = 64  # at once; whoever comes then is told 503, and comes again


@dataclass(frozen=True)
class Limits:
    """Of a request: bytes of its body, and pixels of its pictures, which are counted before any is decoded."""

    body: int = 256_000_000
    pixels: int = 100_000_000


def serve(
    rewards: dict[str, Reward],
    host: str,
    port: int,
    token: str | None,
    limits: Limits,
    ready: Callable[[str], object],
) -> None:
    """Serves until it is stopped; `ready` hears the address, at port 0 with the port that the system chose.

    Raises:
        ValueError: others could reach it without a token.
    """
    if token is None and not _is_loopback(host):
        raise ValueError(
            f"without a token anyone who reaches {host} could use the server: give --token, or set REWARD_TOKEN."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listening:
        config = uvicorn.Config(application(rewards, token, limits), log_level="warning", limit_concurrency=CONNECTIONS)
        name = f"[{host}]" if family == socket.AF_INET6 else host
        ready(f"http://{name}:{listening.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listening])


def application(rewards: dict[str, Reward], token: str | None, limits: Limits) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    turn = threading.Lock()  # a reward is not made for several threads

    def admit(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if token is not None and not secrets.compare_digest(given, f"Bearer {token}".encode()):
            raise HTTPException(401, "this server wants its token, as the header `Authorization: Bearer TOKEN`.")

    def answer(kind: str, body: bytes) -> dict[str, Any]:
        request, images = _decode(kind, body, limits)
        name, prompts, columns = _checked(request, len(images), list(rewards))
        try:
            with turn:
                values = raw_score(name, rewards[name], images, prompts, columns).tolist()
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        return {"values": [value if math.isfinite(value) else str(value) for value in values]}

    @app.get("/health", dependencies=[Depends(admit)])
    def health() -> dict[str, Any]:
        return {"rewards": list(rewards), "versions": _versions()}

    @app.post("/score", dependencies=[Depends(admit)])
    async def score(request: Request) -> dict[str, Any]:
        body = await _body(request, limits.body)
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        return await run_in_threadpool(answer, kind, body)

    return app


async def _body(request: Request, limit: int) -> bytes:
    """The body, given up as soon as it is known to be too long."""
    too_long = HTTPException(413, f"the body is longer than {limit:,} bytes: send fewer pictures at a time.")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise too_long
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_long
    return bytes(body)


def _decode(kind: str, body: bytes, limits: Limits) -> tuple[dict[str, Any], Tensor]:
    """The request's JSON, and images (B, 3, H, W)."""
    try:
        if kind == RAW:
            header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
            request = json.loads(header["__metadata__"]["request"])
            count, channels, height, width = header["images"]["shape"]
            pixels, alike = int(count) * int(height) * int(width), channels == 3
        elif kind == "application/json":
            request = json.loads(body)
            pictures = [_open(encoded) for encoded in request["images"]]
            pixels = sum(picture.width * picture.height for picture in pictures)
            alike = len({picture.size for picture in pictures}) == 1
        else:
            raise HTTPException(415, f"the content type {kind[:100]!r} is neither {RAW} nor application/json.")
        if not isinstance(request, dict):
            raise TypeError("it is no JSON object")
    except Image.DecompressionBombError as error:
        raise HTTPException(413, f"a picture is too large: {error}") from error
    except (KeyError, TypeError, ValueError, OSError, SyntaxError, RecursionError) as error:
        raise HTTPException(400, f"the request can't be read: {type(error).__name__}: {str(error)[:200]}") from error
    if pixels > limits.pixels:
        raise HTTPException(413, f"the pictures have more than {limits.pixels:,} pixels together: send fewer at a time.")
    if not pixels or not alike:
        raise HTTPException(400, "there must be at least one image, and all in RGB and of one size.")
    try:  # only what was found small enough is decoded
        images = _floats(body) if kind == RAW else torch.cat([_pixels(picture) for picture in pictures])
    except Exception as error:  # whatever a decoder makes of hostile bytes
        raise HTTPException(400, f"the images can't be decoded: {type(error).__name__}: {str(error)[:200]}") from error
    return request, images


def _open(encoded: str) -> Image.Image:
    """A PNG of which only the header has been read."""
    return Image.open(io.BytesIO(base64.b64decode(encoded, validate=True)), formats=["PNG"])


def _pixels(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(to_rgb(picture)).copy()).permute(2, 0, 1)[None].float() / 255


def _floats(body: bytes) -> Tensor:
    images = safetensors.torch.load(body)["images"]
    if images.dtype != torch.float32:
        raise ValueError(f"they are {images.dtype}, not float32")
    return images


def _checked(request: dict[str, Any], count: int, names: list[str]) -> tuple[str, list[str], dict[str, list]]:
    """The reward's name, the prompts and the metadata of a request for so many images."""
    name = request.get("reward") or names[0]
    if name not in names or (len(names) > 1 and not request.get("reward")):
        raise HTTPException(404, f"there is no reward {str(name)[:100]!r} here; name one of {', '.join(names)}.")
    prompts, columns = request.get("prompts"), request.get("metadata") or {}
    if not isinstance(prompts, list) or len(prompts) != count or not all(isinstance(p, str) for p in prompts):
        raise HTTPException(400, f"`prompts` must be a list of {count} texts, one for each image.")
    if not isinstance(columns, dict) or not all(isinstance(c, list) and len(c) == count for c in columns.values()):
        raise HTTPException(400, f"`metadata` must have lists of {count} values, one for each image.")
    return name, prompts, columns


def _versions() -> dict[str, str]:
    found = {d.metadata["Name"]: d.version for d in metadata.distributions(name="flow-grpo")}
    return {**found, "torch": torch.__version__, "python": platform.python_version()}


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve_parent() -> None:
    """What a process of `rewards.isolated` does: reads one line of JSON, loads the reward, says its address, serves.

    It ends when its standard input does, which the system sees to however the parent dies.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the reward prints is not an answer
    order = json.loads(sys.stdin.readline())

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        reward = load(order["reward"], **order["options"])
    except ValueError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    boundless = Limits(sys.maxsize, sys.maxsize)
    serve(
        {order["reward"]: reward},
        "127.0.0.1",
        0,
        order["token"],
        boundless,
        lambda url: print(json.dumps({"url": url}), file=answers, flush=True),
    )
