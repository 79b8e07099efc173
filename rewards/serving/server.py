"""HTTP server for rewards, so that they can run in another environment or on another machine.

    POST /score   application/x-safetensors: the tensor `images` (B, 3, H, W), float32 in [0, 1], bit for bit, and in the
                  file's own metadata `request`, the JSON below; or application/json: the same JSON with `images`, B PNGs
                  in base64.
                  {"reward": name, "prompts": [B texts], "metadata": {column: [B values]}}; one reward needs no name.
                  With "group", B numbers, for a reward that sees the images of a group together; all images of a group are needed.
                  Answers {"values": [B numbers]}; one that is not finite is "nan", "inf" or "-inf".
    GET /health   {"rewards": [names], "scopes": {name: image, group or pair}}, and of rewards that have these attributes "frames":
                  {name: its frames of a video}, "costly": [names]; "columns": {name: the columns that it reads, if not all};
                  "source_tensors": true, if the files of "sources" may be uint8 tensors of the body

Errors have a 4xx status and one sentence as `detail`. Without the token no body is read; a server without a token answers only to the names
of this machine, and to no web page. Nothing is unpickled. The token is not encrypted: on an untrusted network, use TLS or an ssh tunnel.
"""

import asyncio
import base64
import io
import ipaddress
import json
import math
import os
import secrets
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import safetensors.torch
import torch
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.calls import Reward, call_reward, named_columns
from flow_grpo.rewards.images import SOURCES, to_rgb
from flow_grpo.rewards.loading import load
from flow_grpo.rewards.scopes import IMAGE, frames_of, scope_of
from flow_grpo.rewards.serving.sources import unpack_sources
from flow_grpo.rewards.threads import DaemonThread, exit_with_parent

RAW = "application/x-safetensors"
SHUTDOWN_TIMEOUT = 5  # seconds that running requests have to finish when the server shuts down


@dataclass(frozen=True)
class Limits:
    """Limits of a request: bytes of its body, and pixels of its images, which are counted before PNGs are decoded."""

    body: int = 256_000_000
    pixels: int = 100_000_000


def refused(status: int, sentence: str) -> HTTPException:
    """An HTTP error with a message, whose characters are escaped so that it can be encoded as UTF-8."""
    return HTTPException(status, sentence.encode("utf-8", "backslashreplace").decode())


async def read_body(request: Request, longest: int) -> bytes:
    """Read the body; refuse it as soon as it is known to have more than `longest` bytes."""
    too_long = refused(413, f"the body is longer than {longest:,} bytes: send fewer images at a time.")
    if int(request.headers.get("content-length", "0")) > longest:  # digits: the HTTP protocol has checked that
        raise too_long
    body = bytearray()
    try:
        async for part in request.stream():
            body.extend(part)
            if len(body) > longest:
                raise too_long
    except ClientDisconnect as error:
        raise refused(400, "the connection was closed before the end of the body.") from error
    return bytes(body)


def decode(kind: str, body: bytes, limits: Limits) -> tuple[dict[str, Any], Tensor, dict[str, Tensor]]:
    """Decode a body to the request's JSON, images (B, 3, H, W), and further tensors by name."""
    if kind not in (RAW, "application/json"):
        raise refused(415, f"the content type {kind[:100]!r} is neither {RAW} nor application/json.")
    too_large = refused(413, f"the images have more than {limits.pixels:,} pixels together: send fewer at a time.")
    tensors: dict[str, Tensor] = {}
    try:
        if kind == RAW:
            tensors = safetensors.torch.load(body)
            header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
            request, images = json.loads(header["__metadata__"]["request"]), tensors.pop("images")
        else:
            request = json.loads(body)
            opened = [_open(encoded) for encoded in request["images"]]
            if sum(image.width * image.height for image in opened) > limits.pixels:
                raise too_large
            images = torch.stack([_pixels(image) for image in opened])
    except HTTPException:
        raise
    except Image.DecompressionBombError as error:
        raise too_large from error
    except Exception as error:  # decoders raise many types on malformed bytes
        raise refused(400, f"the request can't be read: {type(error).__name__}: {str(error)[:200]}") from error
    if not isinstance(request, dict):
        raise refused(400, "the JSON must be an object.")
    if images.dtype != torch.float32 or images.ndim != 4 or images.shape[1] != 3 or not images.numel():
        raise refused(400, "`images` must be float32 of shape (B, 3, H, W), and at least one.")
    if images[:, 0].numel() > limits.pixels:
        raise too_large
    return request, images, tensors


def _open(encoded: str) -> Image.Image:
    """Open a base64 PNG, reading its header only."""
    return Image.open(io.BytesIO(base64.b64decode(encoded, validate=True)), formats=["PNG"])


def _pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(to_rgb(image)).copy()).permute(2, 0, 1).float() / 255


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


def serve(
    rewards: dict[str, Reward],
    host: str,
    port: int,
    token: str | None,
    limits: Limits,
    ready: Callable[[str], object],
) -> None:
    """Serve rewards until the process is stopped. `ready` is called with the URL; with port 0 it has the port that the system chose.

    Raises:
        FlowGRPOError: other machines could reach it without a token, the token can't be sent in a header, or host and port can't be used.
    """
    if not token and not _is_loopback(host):
        raise FlowGRPOError(
            f"without a token anyone who reaches {host} could use the server: give --token, or set REWARD_TOKEN."
        )
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise FlowGRPOError("the token can't be sent in a header: give --token ASCII characters without spaces.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise FlowGRPOError(f"port {port} of {host} can't be used: {reason}. Give another --port or --host.") from error
    with listening:
        config = uvicorn.Config(
            application(rewards, token or None, limits),
            log_level="warning",
            loop="asyncio",  # other loops take over the file descriptor that Python uses for signals
            http="h11",
            ws="none",
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
        )
        name = f"[{host}]" if family == socket.AF_INET6 else host
        ready(f"http://{name}:{listening.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listening])


def application(rewards: dict[str, Reward], token: str | None, limits: Limits) -> FastAPI:
    """The HTTP application that serves rewards."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    thread = DaemonThread()  # rewards need not be thread-safe, and may hang
    turn = asyncio.Lock()
    scopes = {name: scope_of(reward) for name, reward in rewards.items()}
    frames = {name: frames_of(reward) for name, reward in rewards.items() if hasattr(reward, "frames")}
    costly = [name for name, reward in rewards.items() if getattr(reward, "costly", False)]
    columns = {name: known for name, reward in rewards.items() if (known := named_columns(reward)) is not None}

    def admit(request: Request) -> None:
        if token is None:
            _check_is_local(request)
            return
        authorization = request.headers.get("authorization", "").encode()
        if not secrets.compare_digest(authorization, f"Bearer {token}".encode()):
            raise refused(
                401,
                "this server requires its token in the header `Authorization: Bearer TOKEN`: set the environment variable REWARD_TOKEN "
                "where you train.",
            )

    @app.get("/health", dependencies=[Depends(admit)])
    async def health() -> dict[str, Any]:
        stated = {"rewards": list(rewards), "scopes": scopes, "frames": frames, "costly": costly, "columns": columns}
        return {**stated, "source_tensors": True}

    @app.post("/score", dependencies=[Depends(admit)])
    async def score(request: Request) -> dict[str, Any]:
        body = await read_body(request, limits.body)
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        content, images, tensors = await run_in_threadpool(decode, kind, body, limits)
        name, prompts, sent = checked(content, len(images), list(rewards))
        if "sources" in content:
            sources = await run_in_threadpool(checked_sources, content, tensors, len(images), limits)
            sent = {**sent, SOURCES: sources}
        group = None if scopes[name] == IMAGE else checked_group(content, len(images), name)
        call = partial(call_reward, name, rewards[name], images, prompts, sent, group=group)
        async with turn:
            if await request.is_disconnected():  # the client disconnected while it waited for its turn
                return {"values": []}
            try:
                values = (await asyncio.wrap_future(thread.submit(call))).tolist()
            except ValueError as error:
                raise refused(422, str(error)) from error
        return {"values": [value if math.isfinite(value) else str(value) for value in values]}

    return app


def _check_is_local(request: Request) -> None:
    """Refuse what a web page in this machine's browser sends: a name that was made to lead here (DNS rebinding), or another origin."""
    host = request.headers.get("host", "")
    if not _is_loopback(_hostname(host)):
        raise refused(
            403, f"without a token this server answers to 127.0.0.1 and localhost, not to {host[:100]!r}: give it --token."
        )
    if request.headers.get("origin", f"http://{host}") != f"http://{host}":
        raise refused(403, "without a token this server answers no web page: give it --token.")


def _hostname(host: str) -> str:
    """The name in a Host header; "" if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve_parent() -> None:
    """Main function of the process of `rewards.serving.subprocess`: read one line of JSON, load the reward, print the URL, serve.

    It exits when its standard input is closed.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # else a print of the reward would be read as an answer
    request = json.loads(sys.stdin.readline())
    exit_with_parent(sys.stdin.fileno())
    if request["gpu"] is not None and torch.cuda.is_available():
        torch.cuda.set_device(request["gpu"])
    try:
        reward = load(request["reward"], **request["options"])
    except ValueError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    limits = Limits(sys.maxsize, sys.maxsize)

    def ready(url: str) -> None:
        print(json.dumps({"url": url}), file=answers, flush=True)

    serve({request["reward"]: reward}, "127.0.0.1", 0, token=request["token"], limits=limits, ready=ready)
