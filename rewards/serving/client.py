"""Client of `rewards.serving.server`: a reward that runs on one or several other machines."""

import asyncio
import base64
import json
import os
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import safetensors.torch
import torch
from torch import Tensor

from flow_grpo.errors import FlowGRPOError, RetryableError
from flow_grpo.rewards.images import SOURCE, SOURCES, has_sources, to_pil, to_png
from flow_grpo.rewards.scopes import IMAGE, Frames, check_sendable, checked_frames, rows_by_group
from flow_grpo.rewards.serving.retry import (
    CONNECT_TIMEOUT,
    Client,
    InvalidResponse,
    NoResponse,
    error_detail,
    gather,
    post_with_retries,
)
from flow_grpo.rewards.serving.sources import as_tensors, as_text, pack_sources


class NoServer(RetryableError):
    """All servers of a reward have failed."""


@dataclass(frozen=True)
class _Stated:
    """What a server states of the reward: its frames, whether it is costly, whether sources may be tensors, the columns that it reads."""

    frames: Any
    costly: bool
    source_tensors: bool
    columns: list[str] | None  # None for all


class Remote:
    """A reward that `flow-grpo serve` runs on other machines, with the same values to the last bit.

    The images are split into chunks of `batch_size`, or of the fewest whole groups that have as many, and each free server takes the
    next chunk. A failed request is retried up to `attempts` times with growing pauses; then the other servers take over, and the
    failed one is tried again at the next call. The chunks do not depend on the servers, so neither do the values. If all servers
    fail, a ValueError is raised: no image ever gets a value that its reward did not return.

    Range, weights, licence and how it is gamed: those of the reward. No memory here. The batch size of a reward model can change the
    last bits of its values: to match a local reward, use a multiple of its batch_size.

    Args:
        urls: address of a server, http://host:port, or a list of addresses.
        reward: name of the reward on the server; optional if it serves only one.
        token: bearer token of the servers; by default the environment variable REWARD_TOKEN, which keeps it out of config files.
        timeout: seconds that one request may take in total, from the connection to the last byte of the answer.
        encoding: send images as float32, or as PNG with 8 bits per channel and a tenth of the size.

    Attributes:
        scope: of the servers' reward.
        costly: of the servers' reward.
        frames: of a video, those that are sent, see `rewards.scopes`; those of the servers' reward, unless they are set here. Without
            either, it has no such attribute.
    """

    elsewhere = True  # the values come from another process, without gradients
    keep_alive = True  # whether connections are reused
    frames: Frames

    def __init__(
        self,
        urls: str | list[str],
        reward: str | None = None,
        token: str | None = None,
        batch_size: int = 16,
        timeout: float = 120.0,
        attempts: int = 5,
        encoding: Literal["float", "png"] = "float",
    ) -> None:
        self.scope = IMAGE
        self._known_scope: str | None = None
        self.client = Client(token or os.environ.get("REWARD_TOKEN"), timeout, keep_alive=self.keep_alive)
        given = [urls] if isinstance(urls, str) else urls
        self.urls = [self.client.without_credentials(url.rstrip("/")) for url in given]
        wrong = [url for url in self.urls if not url.startswith(("http://", "https://"))]
        if wrong or not self.urls:
            raise FlowGRPOError(
                f"remote: {wrong or self.urls} is not a server address; give for example http://10.0.0.2:8000."
            )
        if encoding not in ("float", "png"):
            raise FlowGRPOError(f"remote: encoding={encoding!r} is neither float nor png.")
        self.reward, self.batch_size, self.attempts, self.encoding = reward, batch_size, attempts, encoding
        if not timeout > 0 or attempts < 1 or batch_size < 1:
            raise FlowGRPOError("remote: timeout, attempts and batch_size must be positive.")
        self._stated: dict[str, _Stated] = {}
        self._left_out: set[str] = set()  # columns that the user was told of
        failures = self.client.run(gather([self._failure(url) for url in self.urls]))
        self.down = {url: failure for url, failure in zip(self.urls, failures, strict=True) if failure}
        if len(self.down) == len(set(self.urls)):
            raise NoServer(f"no server for the reward {reward or 'remote'} answers: {self._reasons()}.")
        self._take_attributes()

    def __call__(self, images: Tensor, prompts: list[str], **metadata: Any) -> Tensor:
        """images (B, 3, H, W) in [0, 1]; returns (B,). FlowGRPOError if all servers failed, or one refused the request."""
        rows = range(len(prompts))
        chunks = [list(rows[first : first + self.batch_size]) for first in rows[:: self.batch_size]]
        return self._run(chunks, images, prompts, metadata)

    def score_groups(self, group: list[int], images: Tensor, prompts: list[str], /, **metadata: Any) -> Tensor:
        """As a call, for a reward that sees groups: row i is of group `group[i]`. Each request has whole groups."""
        chunks: list[list[int]] = [[]]
        for rows in rows_by_group(group):
            if len(chunks[-1]) >= self.batch_size:
                chunks.append([])
            chunks[-1] += rows
        return self._run(chunks, images, prompts, metadata, group)

    def _run(
        self,
        chunks: list[list[int]],
        images: Tensor,
        prompts: list[str],
        metadata: dict[str, list],
        group: list[int] | None = None,
    ) -> Tensor:
        """Values (B,) of rows in chunks, each of which is one request. FlowGRPOError as of a call."""
        return self.client.run(self._all(chunks, images, prompts, metadata, group))

    async def _all(
        self,
        chunks: list[list[int]],
        images: Tensor,
        prompts: list[str],
        metadata: dict[str, list],
        group: list[int] | None,
    ) -> Tensor:
        todo, sources = deque(chunks), metadata[SOURCES] if has_sources(metadata) else None
        columns = metadata if sources is None else {k: v for k, v in metadata.items() if k not in (SOURCE, SOURCES)}
        values = torch.empty(len(prompts))

        async def work(url: str) -> bool:
            """Score chunks until none is left; returns False if the server failed, after putting its chunk back."""
            if url in self.down and not await self._is_back(url):
                return False
            if sources is not None and self.encoding == "float" and not self._stated[url].source_tensors:
                raise FlowGRPOError(
                    f"{url} runs an earlier flow-grpo, which can't receive the images of prompts: update it there."
                )
            while todo:
                rows, read = todo.popleft(), self._stated[url].columns
                sent = self._sendable(columns) if read is None else {k: v for k, v in columns.items() if k in read}
                reads_sources = read is None or SOURCE in read or SOURCES in read
                request = {
                    "reward": self.reward,
                    "prompts": [prompts[i] for i in rows],
                    "metadata": {name: [column[i] for i in rows] for name, column in sent.items()},
                    **(
                        {"sources": pack_sources([sources[i] for i in rows])}
                        if sources is not None and reads_sources
                        else {}
                    ),
                    **({} if group is None else {"group": [group[i] for i in rows]}),
                }
                try:
                    values[rows] = await self._score(url, images[rows], request)
                except NoResponse as error:
                    self.down[url] = str(error)
                    todo.append(rows)
                    return False
            return True

        remaining = self.urls
        while todo:
            if not remaining:
                raise NoServer(f"no server is left for the reward {self.reward or 'remote'}: {self._reasons()}.")
            succeeded = await gather([work(url) for url in remaining])
            remaining = [url for url, success in zip(remaining, succeeded, strict=True) if success]
        return values

    def _sendable(self, columns: dict[str, list]) -> dict[str, list]:
        """The columns for a reward that takes any, without those that JSON can't hold: a warning names each once."""
        without = [name for name, column in columns.items() if not _is_json(column)]
        new = sorted(set(without) - self._left_out)
        self._left_out.update(new)
        if new and os.environ.get("RANK", "0") == "0":
            words = f"the prompts' columns {', '.join(new)}, which JSON can't hold"
            print(
                f"warning: {self.reward or 'remote'} runs in another process without {words}.", file=sys.stderr, flush=True
            )
        return {name: column for name, column in columns.items() if name not in without}

    async def _score(self, url: str, images: Tensor, request: dict[str, Any]) -> Tensor:
        def read(response: httpx.Response) -> Tensor:
            try:
                values = [float(value) for value in response.json()["values"]]
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                raise InvalidResponse(f"it answered {response.text[:100]!r}") from error
            if len(values) != len(images):
                raise InvalidResponse(f"it gave {len(values)} values for {len(images)} images")
            return torch.tensor(values)

        arguments = await asyncio.to_thread(encode, images, request, self.encoding)
        return await post_with_retries(self.client, f"{url}/score", lambda attempt: arguments, read, self.attempts)

    async def _is_back(self, url: str) -> bool:
        try:
            failure = await self._failure(url)
        except ValueError as error:  # it restarted with other rewards: use the other servers
            failure = str(error)
        if failure:
            self.down[url] = failure
        else:
            self.down.pop(url, None)
        return not failure

    async def _failure(self, url: str) -> str:
        """Why a server does not answer; empty if it does. FlowGRPOError if it refuses, or does not serve this reward."""
        try:
            response = await self.client.request("GET", f"{url}/health", CONNECT_TIMEOUT)
            if response.is_server_error:
                return f"{url} answered {response.status_code}"
            if not response.is_success:
                raise FlowGRPOError(f"{url} refused with {response.status_code}: {error_detail(response)}")
            health = response.json()
            names = [str(name) for name in health["rewards"]]
            name = self.reward or names[0]
            scope = str(health.get("scopes", {}).get(name, IMAGE))  # a server of 0.3 has images alone
            self._stated[url] = _Stated(  # 0.3 states none of them
                health.get("frames", {}).get(name),
                name in health.get("costly", ()),
                bool(health.get("source_tensors")),
                health.get("columns", {}).get(name),
            )
        except httpx.InvalidURL as error:
            raise FlowGRPOError(f"remote: {url} is not a server address: {error}.") from error
        except (
            httpx.HTTPError,
            InvalidResponse,
            json.JSONDecodeError,
            UnicodeDecodeError,
            KeyError,
            TypeError,
            AttributeError,
            IndexError,
            RecursionError,
        ) as error:
            return f"{url}: {type(error).__name__} {error}".strip()
        if self.reward is not None and self.reward not in names:
            raise FlowGRPOError(f"{url} does not serve the reward {self.reward}, but {', '.join(names)}.")
        self._check_scope(url, scope)
        return ""

    def _check_scope(self, url: str, scope: str) -> None:
        """All servers' rewards must see as many images as the first one's."""
        if self._known_scope not in (None, scope):
            raise FlowGRPOError(
                f"{url} serves the reward {self.reward or 'NAME'} with scope {scope}, and another server with scope {self._known_scope}: "
                "serve the same reward on both."
            )
        self.scope = self._known_scope = scope

    def _take_attributes(self) -> None:
        """Take the attributes that the first servers state; later ones change nothing, so that the values stay the same."""
        stated = [self._stated[url] for url in self.urls if url in self._stated]
        self.costly = any(one.costly for one in stated)
        frames = next((one.frames for one in stated if one.frames is not None), None)
        if frames is not None:
            check_sendable(self.reward or "remote", frames)
            if not hasattr(self, "frames"):  # an isolated reward that starts again has them
                self.frames = checked_frames(frames)

    def _reasons(self) -> str:
        return "; ".join(self.down.values())


def encode(images: Tensor, request: dict[str, Any], encoding: str) -> dict[str, Any]:
    """Encode a request to `rewards.serving.server` as arguments of httpx's post."""
    tensors: dict[str, Tensor] = {}
    if "sources" in request:
        is_float = encoding == "float"
        sources, tensors = as_tensors(request["sources"]) if is_float else (as_text(request["sources"]), tensors)
        request = {**request, "sources": sources}
    try:
        text = json.dumps(request)
    except TypeError as error:
        columns = [name for name, column in request["metadata"].items() if not _is_json(column)]
        raise FlowGRPOError(
            f"the prompts' column {' and '.join(columns)} can't be sent to another process ({error}): write it as text."
        ) from error
    if encoding == "float":
        tensors["images"] = images.detach().float().cpu().contiguous()
        body = safetensors.torch.save(tensors, {"request": text})
        return {"content": body, "headers": {"Content-Type": "application/x-safetensors"}}
    return {"json": {**request, "images": [base64.b64encode(png(image)).decode() for image in images]}}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def png(image: Tensor) -> bytes:
    """Encode one image (3, H, W) in [0, 1] as PNG."""
    return to_png(to_pil(image[None])[0])
