"""HTTP server for rewards, so that they can run in another environment or on another machine.

    POST /score   application/x-safetensors: the tensor `images` (B, 3, H, W), float32 in [0, 1], bit for bit, and in the
                  file's own metadata `request`, the JSON below; or application/json: the same JSON with `images`, B PNGs
                  in base64.
                  {"reward": name, "prompts": [B texts], "metadata": {column: [B values]}}; one reward needs no name.
                  With "group", B numbers, for a reward that sees the images of a group together; all images of a group are needed.
                  Answers {"values": [B numbers]}; one that is not finite is "nan", "inf" or "-inf".
    GET /health   {"rewards": [names], "scopes": {name: image, group or pair}, "versions": {...}}, and of rewards that have these
                  attributes "frames": {name: its frames of a video}, "costly": [names]; "columns": {name: the columns that it reads,
                  if not all}; "source_tensors": true, if the files of "sources" may be uint8 tensors of the body

Errors have a 4xx status and one sentence as `detail`. Without the token no body is read; a server without a token answers only to the names
of this machine, and to no web page. Header and body of a request have deadlines.
Nothing is unpickled. The token is not encrypted: on an untrusted network, use TLS or an ssh tunnel.
"""

import asyncio
import ipaddress
import json
import math
import os
import platform
import secrets
import socket
import sys
from asyncio import Transport
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

import torch
import uvicorn
from fastapi import Depends, FastAPI, Request
from starlette.concurrency import run_in_threadpool
from uvicorn.protocols.http.h11_impl import H11Protocol

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.calls import named_columns
from flow_grpo.rewards.images import SOURCES
from flow_grpo.rewards.interrupt import DaemonThread, exit_with_parent
from flow_grpo.rewards.loading import load
from flow_grpo.rewards.scopes import IMAGE, frames_of, scope_of
from flow_grpo.rewards.scoring import Reward, call_reward
from flow_grpo.rewards.serving.request import Limits, checked, checked_group, checked_sources, decode, read_body, refused

MAX_REQUESTS = 64  # at a time; further ones get status 503 and are retried by the client
SHUTDOWN_TIMEOUT = 5  # seconds that running requests have to finish when the server shuts down
IDLE_TIMEOUT = 10.0  # seconds that a connection may stay open without a running request
MAX_IDLE = 128  # such connections at a time; beyond this the oldest is closed


def serve(
    rewards: dict[str, Reward],
    host: str,
    port: int,
    token: str | None,
    limits: Limits,
    ready: Callable[[str], object],
) -> None:
    """Serve rewards until the process is stopped. `ready` is called with the URL, with port 0 that of the port the system chose.

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
            http=bounded(),
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
    turn, requests, versions = asyncio.Lock(), 0, _versions()
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
        return {**stated, "source_tensors": True, "versions": versions}

    @app.post("/score", dependencies=[Depends(admit)])
    async def score(request: Request) -> dict[str, Any]:
        nonlocal requests
        if requests >= MAX_REQUESTS:
            raise refused(503, f"{MAX_REQUESTS} requests are running: try again later.")
        requests += 1
        try:
            return {"values": await values_of(request)}
        finally:
            requests -= 1

    async def values_of(request: Request) -> list[float | str]:
        body = await read_body(request, limits)
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
                return []
            try:
                values = (await asyncio.wrap_future(thread.submit(call))).tolist()
            except ValueError as error:
                raise refused(422, str(error)) from error
        return [value if math.isfinite(value) else str(value) for value in values]

    return app


def _versions() -> dict[str, str]:
    version = {d.metadata["Name"]: d.version for d in metadata.distributions(name="flow-grpo")}
    return {**version, "torch": torch.__version__, "python": platform.python_version()}


def _check_is_local(request: Request) -> None:
    """Refuse what a web page in this machine's browser sends: a name that was made to lead here (DNS rebinding), or another origin."""
    host = request.headers.get("host", "")
    if not _is_loopback(urlsplit(f"//{host}").hostname or ""):
        raise refused(
            403, f"without a token this server answers to 127.0.0.1 and localhost, not to {host[:100]!r}: give it --token."
        )
    if request.headers.get("origin", f"http://{host}") != f"http://{host}":
        raise refused(403, "without a token this server answers no web page: give it --token.")


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
    os.dup2(2, 1)  # what the reward prints must not be read as an answer
    request = json.loads(sys.stdin.readline())
    exit_with_parent(sys.stdin.fileno())
    if request["gpu"] is not None and torch.cuda.is_available():
        torch.cuda.set_device(request["gpu"])
    try:
        reward = load(request["reward"], **request["options"])
    except ValueError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    limits = Limits(sys.maxsize, sys.maxsize, sys.maxsize, 3600.0)

    def ready(url: str) -> None:
        print(json.dumps({"url": url}), file=answers, flush=True)

    serve({request["reward"]: reward}, "127.0.0.1", 0, token=request["token"], limits=limits, ready=ready)


def bounded(seconds: float = IDLE_TIMEOUT, max_idle: int = MAX_IDLE) -> type[H11Protocol]:
    """Return an HTTP protocol for uvicorn; its own waits forever for the header of a request."""
    idle: dict[Any, Any] = {}  # connection -> timer, the oldest first

    class Bounded(H11Protocol):
        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start_idle_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._start_idle_timer()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._start_idle_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop_timer()
            super().connection_lost(exc)

        def _start_idle_timer(self) -> None:
            """Start the timer while no request is running, whatever data arrives."""
            if self.cycle is not None and not self.cycle.response_complete:
                self.stop_timer()
            elif self not in idle and not self.transport.is_closing():
                idle[self] = self.loop.call_later(seconds, self.transport.abort)
                if len(idle) > max_idle:
                    oldest = next(iter(idle))
                    oldest.stop_timer()
                    oldest.transport.abort()

        def stop_timer(self) -> None:
            timer = idle.pop(self, None)
            if timer is not None:
                timer.cancel()

    return Bounded
