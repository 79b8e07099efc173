"""Client of `rewards.serving.server`: a reward that runs on one or several other machines."""

import asyncio
import base64
import itertools
import json
import math
import os
import sys
import time
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import safetensors.torch
import torch
from torch import Tensor

from flow_grpo.errors import FlowGRPOError, RetryableError
from flow_grpo.rewards.calls import RewardInputs
from flow_grpo.rewards.images import SOURCE, SOURCES, has_sources, to_pil, to_png
from flow_grpo.rewards.scopes import IMAGE, Frames, check_sendable, checked_frames, rows_by_group
from flow_grpo.rewards.serving.retry import (
    CONNECT_TIMEOUT,
    Client,
    InvalidResponse,
    NoResponse,
    error_detail,
    gather,
    no_usable_answer,
    pause_before,
    post,
)
from flow_grpo.rewards.serving.sources import as_tensors, as_text, pack_sources

IN_FLIGHT = 4  # requests of one process that a server has at a time, so that a slow connection does not keep it idle
# of the timeout: a server that takes longer has one request at a time, since those that wait for others time out
QUICK = 0.1
PROBE_EVERY = 5.0  # seconds between two looks at a server that does not answer
MAX_SUSPENSION = 600.0  # seconds


class NoServer(RetryableError):
    """All servers of a reward have failed."""


@dataclass(frozen=True)
class _Stated:
    """A server's facts about the reward: its frames, whether it is costly, whether sources may be tensors, the columns that it reads."""

    frames: Any
    costly: bool
    source_tensors: bool
    columns: list[str] | None  # None for all


@dataclass(eq=False)
class _Server:
    """A server as this process has seen it.

    Attributes:
        stated: None before its first answer; till then it gets no images.
        failure: why it is down; empty if it is not.
        failures: of requests for scores, since the last one that succeeded.
        running: requests that it has of this process.
        seconds: that its last score took; infinite before the first one.
        answered: time of its last healthy answer or score.
        probe: looks whether it is back.
    """

    url: str
    stated: _Stated | None = None
    failure: str = ""
    failures: int = 0
    running: int = 0
    seconds: float = math.inf
    answered: float = -math.inf
    probe: asyncio.Task | None = None


class Remote:
    """A reward that `flow-grpo serve` runs on other machines, with the same values to the last bit.

    The images are split into chunks of `batch_size`, or of the fewest whole groups that have as many. Each chunk is one request, to
    the server with the fewest requests; processes and calls begin with different servers. A server that fails is left out, and looked at in
    the background until it answers; its chunks go to the others. A chunk is tried up to `attempts` times with each server, with growing
    pauses. The chunks do not depend on the servers, so neither do the values. If all servers fail, NoServer is raised: no image
    ever gets a value that its reward did not return.

    Range, weights, licence and how it is gamed: those of the reward. No memory here. The batch size of a reward model can change the
    last bits of its values: to match a local reward, use a multiple of its batch_size.

    Args:
        urls: address of a server, http://host:port, or a list of addresses.
        reward: name of the reward on the server; optional if it serves only one.
        token: bearer token of the servers; by default the environment variable REWARD_TOKEN, which keeps it out of config files.
        timeout: seconds that one request may take in total, from the connection to the last byte of the answer.
        encoding: send images as float32, or as PNG with 8 bits per channel and a tenth of the size.
        wait: seconds that the first server may take to answer, for servers that start with the run.

    Attributes:
        scope: of the servers' reward.
        costly: of the servers' reward.
        frames: of a video, those that are sent, see `rewards.scopes`; those of the servers' reward, unless they are set here. Without
            either, it has no such attribute.
    """

    elsewhere = True  # the values come from another process, without gradients
    concurrent = True  # may be called by several threads at a time
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
        wait: float = 0.0,
    ) -> None:
        self.scope = IMAGE
        self._known_scope: str | None = None
        self.client = Client(token or os.environ.get("REWARD_TOKEN"), timeout, keep_alive=self.keep_alive)
        given = [self.client.without_credentials(url.rstrip("/")) for url in ([urls] if isinstance(urls, str) else urls)]
        wrong = [url for url in given if not url.startswith(("http://", "https://"))]
        if wrong or not given:
            raise FlowGRPOError(f"remote: {wrong or given} is not a server address; give for example http://10.0.0.2:8000.")
        if encoding not in ("float", "png"):
            raise FlowGRPOError(f"remote: encoding={encoding!r} is neither float nor png.")
        self.reward, self.batch_size, self.attempts, self.encoding = reward, batch_size, attempts, encoding
        if not timeout > 0 or attempts < 1 or batch_size < 1 or not 0 <= wait < math.inf:
            raise FlowGRPOError("remote: timeout, attempts and batch_size must be positive, and wait a number of seconds.")
        self.servers = [_Server(url) for url in dict.fromkeys(given)]
        self._left_out: set[str] = set()  # columns that the user was warned of
        rank = os.environ.get("RANK", "0")
        self._calls = itertools.count(int(rank) if rank.isdecimal() else 0)
        self._freed = asyncio.Event()  # a server has one request less
        self.client.run(self._meet(wait))
        self._take_attributes()

    @property
    def down(self) -> dict[str, str]:
        """Servers that do not answer, and why."""
        return {server.url: server.failure for server in self.servers if server.failure}

    async def _meet(self, wait: float) -> None:
        """Ask the servers how they are until one answers. The others are looked at in the background."""
        deadline = time.monotonic() + wait
        for attempt in itertools.count(1):
            await gather([self._look(server) for server in self.servers])
            down = self.down
            if len(down) < len(self.servers):
                break
            if attempt >= self.attempts and time.monotonic() >= deadline:
                raise NoServer(
                    f"no server for the reward {self.reward or 'remote'} answers: {'; '.join(down.values())}. Start it there by "
                    f"`flow-grpo serve {self.reward or 'NAME'}`, or give the option `wait`, in seconds, if it starts with the run."
                )
            if attempt == 1 and wait and os.environ.get("RANK", "0") == "0":
                print(f"waiting up to {wait:g} s for the reward server {', '.join(down)}", file=sys.stderr, flush=True)
            await asyncio.sleep(min(0.2 * 2**attempt, 2.0))
        for server in self.servers:
            if server.failure:
                self._probe(server)
                if os.environ.get("RANK", "0") == "0":
                    others = f"the other servers of the reward {self.reward or 'remote'} score in its place until it does"
                    print(f"warning: a server does not answer, {server.failure}; {others}.", file=sys.stderr, flush=True)

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

    def _run(self, *request: Any) -> Tensor:
        return self.client.run(self._all(*request))

    async def _all(
        self,
        chunks: list[list[int]],
        images: Tensor,
        prompts: list[str],
        metadata: dict[str, list],
        group: list[int] | None = None,
    ) -> Tensor:
        """Values (B,) of rows in chunks, each of which is one request. FlowGRPOError as in a call."""
        inputs, number = RewardInputs(images, prompts, metadata, group=group), next(self._calls)
        values = torch.empty(len(prompts))
        scored = await gather([self._score_chunk(inputs, rows, number + i) for i, rows in enumerate(chunks)])
        for rows, part in zip(chunks, scored, strict=True):
            values[rows] = part
        return values

    async def _score_chunk(self, inputs: RewardInputs, rows: list[int], number: int) -> Tensor:
        """The values of a chunk by the server that is free first, or by the others if that fails. The number says which is asked first."""
        start = number % len(self.servers)
        order, failures = self.servers[start:] + self.servers[:start], dict[_Server, list[NoResponse]]()
        while True:
            server = await self._free(order, failures)
            own = failures.setdefault(server, [])
            try:
                if own:
                    await asyncio.sleep(pause_before(len(own), own[-1]))
                began = time.monotonic()
                values = await self._post(server.url, inputs.images[rows], self._request(inputs, rows, server))
                server.failures, server.failure, server.answered = 0, "", time.monotonic()
                server.seconds = server.answered - began
                return values
            except NoResponse as error:
                own.append(error)
                server.failures += 1
                if not error.answered:
                    server.failure = f"{server.url}: {error}"
                    self._probe(server)
            finally:
                server.running -= 1
                self._freed.set()

    def _request(self, inputs: RewardInputs, rows: list[int], server: _Server) -> dict[str, Any]:
        """The JSON of a request for these rows: what the server's reward reads."""
        assert server.stated
        read, sources = server.stated.columns, inputs.metadata[SOURCES] if has_sources(inputs.metadata) else None
        if sources is not None and self.encoding == "float" and not server.stated.source_tensors:
            raise FlowGRPOError(
                f"{server.url} runs an earlier flow-grpo, which can't receive the images of prompts: update it there."
            )
        hidden = () if sources is None else (SOURCE, SOURCES)
        columns = {name: column for name, column in inputs.metadata.items() if name not in hidden}
        sent = self._sendable(columns) if read is None else {k: v for k, v in columns.items() if k in read}
        request: dict[str, Any] = {
            "reward": self.reward,
            "prompts": [inputs.prompts[i] for i in rows],
            "metadata": {name: [column[i] for i in rows] for name, column in sent.items()},
        }
        if sources is not None and (read is None or {SOURCE, SOURCES} & set(read)):
            request["sources"] = pack_sources([sources[i] for i in rows])
        if inputs.group is not None:
            request["group"] = [inputs.group[i] for i in rows]
        return request

    async def _free(self, order: list[_Server], failures: dict[_Server, list[NoResponse]]) -> _Server:
        """Wait until the best server for a chunk can take it, and count it there. NoServer if all have failed `attempts` times.

        Args:
            order: the servers, of which the first of several equally good ones is taken.
            failures: of this chunk.
        """

        def is_full(server: _Server) -> bool:
            return server.running >= (IN_FLIGHT if server.seconds < QUICK * self.client.timeout else 1)

        def rank(server: _Server) -> tuple:
            silent = time.monotonic() - server.answered if server.failure else 0.0
            return silent, len(failures.get(server, ())), is_full(server), server.running

        while True:
            left = [one for one in order if one.stated is not None and len(failures.get(one, ())) < self.attempts]
            if not left:
                reasons = [no_usable_answer(f"{one.url}/score", len(own), own[-1]) for one, own in failures.items()]
                reasons += [one.failure for one in order if one not in failures]
                raise NoServer(f"no server is left for the reward {self.reward or 'remote'}: {'; '.join(reasons)}.")
            best = min(left, key=rank)
            if not is_full(best):
                best.running += 1
                return best
            self._freed.clear()
            await self._freed.wait()

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

    async def _post(self, url: str, images: Tensor, request: dict[str, Any]) -> Tensor:
        def read(response: httpx.Response) -> Tensor:
            try:
                values = [float(value) for value in response.json()["values"]]
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                raise InvalidResponse(f"it answered {response.text[:100]!r}") from error
            if len(values) != len(images):
                raise InvalidResponse(f"it gave {len(values)} values for {len(images)} images")
            return torch.tensor(values)

        arguments = await asyncio.to_thread(encode, images, request, self.encoding)
        return await post(self.client, f"{url}/score", arguments, read)

    def _probe(self, server: _Server) -> None:
        """Look in the background whether a server is back, if there are others to use in its place."""
        if len(self.servers) > 1 and (server.probe is None or server.probe.done()):
            server.probe = asyncio.get_running_loop().create_task(_probing(weakref.ref(self), server))

    async def _look(self, server: _Server) -> None:
        """Ask a server how it is. FlowGRPOError as in `_failure`."""
        server.failure = await self._failure(server)

    async def _failure(self, server: _Server) -> str:
        """Why a server does not answer; empty if it does. FlowGRPOError if it refuses, or does not serve this reward."""
        url = server.url
        try:
            response = await self.client.request("GET", f"{url}/health", CONNECT_TIMEOUT)
            if response.is_server_error:
                return f"{url} answered {response.status_code}"
            if not response.is_success:
                raise FlowGRPOError(f"{url} refused with {response.status_code}: {_refusal(response)}")
            health = response.json()
            names = [str(name) for name in health["rewards"]]
            name = self.reward or names[0]
            scope = str(health.get("scopes", {}).get(name, IMAGE))
            stated = _Stated(
                health.get("frames", {}).get(name),
                name in health.get("costly", ()),
                bool(health.get("source_tensors")),
                health.get("columns", {}).get(name),
            )
        except httpx.InvalidURL as error:
            raise FlowGRPOError(f"remote: {url} is not a server address: {error}.") from error
        except (httpx.HTTPError, InvalidResponse) as error:
            return f"{url}: {type(error).__name__} {error}".strip()
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            if isinstance(error, FlowGRPOError):
                raise
            raise FlowGRPOError(f"{url} answers, but is no reward server of flow-grpo: check the address.") from error
        if self.reward is not None and self.reward not in names:
            raise FlowGRPOError(f"{url} does not serve the reward {self.reward}, but {', '.join(names)}.")
        self._check_scope(url, scope)
        server.stated, server.answered = stated, time.monotonic()
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
        stated = [server.stated for server in self.servers if server.stated]
        self.costly = any(one.costly for one in stated)
        frames = next((one.frames for one in stated if one.frames is not None), None)
        if frames is not None:
            check_sendable(self.reward or "remote", frames)
            if not hasattr(self, "frames"):  # an isolated reward that starts again has them
                self.frames = checked_frames(frames)


async def _probing(client: "weakref.ref[Remote]", server: _Server) -> None:
    """Look at a server until it answers; later after each failure, since one may say that it is well and fail again."""
    pause = min(2.0 ** max(server.failures - 1, 0), MAX_SUSPENSION)
    while True:
        await asyncio.sleep(pause)
        remote, pause = client(), PROBE_EVERY
        if remote is None or not server.failure:
            return
        try:
            await remote._look(server)
        except ValueError as error:  # it restarted with other rewards
            server.failure = str(error)
        del remote


def _refusal(response: httpx.Response) -> str:
    detail = error_detail(response)
    if response.status_code == 401 and "REWARD_TOKEN" not in detail:
        detail = f"{detail} Set the environment variable REWARD_TOKEN to the token of the server.".strip()
    return detail


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
