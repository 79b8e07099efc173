"""A reward that runs on other machines: the client of `rewards.serving.server`, for one server or several."""

import asyncio
import base64
import io
import json
import os
from collections import deque
from typing import Any, Literal

import httpx
import safetensors.torch
import torch
from torch import Tensor

from rewards.images import to_pil
from rewards.serving.retry import (
    CONNECT_TIMEOUT,
    Client,
    InvalidResponse,
    NoResponse,
    error_detail,
    gather,
    post_with_retries,
)


class NoServer(ValueError):
    """No server of a reward is left."""


class Remote:
    """A reward that `flow-grpo serve` runs elsewhere: its values, bit for bit.

    Several servers share the images in chunks of `batch_size`, whoever is free taking the next. One that does not answer is
    asked `attempts` times with growing pauses; then the others take over, and it is looked after again at the next call. The
    chunks are the same whoever scores them, so the numbers do not depend on it. When no server is left, it is an error: no
    image ever gets a value that its reward did not give.

    Range, weights, licence and how it is gamed: those of the reward. No memory here. Reward models compute in batches whose size
    can change the last bits: for the local reward's own, let `batch_size` be a multiple of the local one's.

    Args:
        urls: a server's address, http://host:port, or a list of them.
        reward: the reward's name there; may be left out if it is the only one.
        token: the servers' token; by default the environment variable REWARD_TOKEN, which no config file shows.
        timeout: seconds that a request may take as a whole, from the connection to the last byte of the values of a chunk.
        encoding: images travel as float32, or as PNG: 8 bits a channel, a tenth of the size.
    """

    keep = True  # whether a connection is used again

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
        self.urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        wrong = [url for url in self.urls if not url.startswith(("http://", "https://"))]
        if wrong or not self.urls:
            raise ValueError(f"remote: {wrong or urls} is no address of a server: give for example http://10.0.0.2:8000.")
        if encoding not in ("float", "png"):
            raise ValueError(f"remote: encoding={encoding!r} is neither float nor png.")
        self.reward, self.batch_size, self.attempts, self.encoding = reward, batch_size, attempts, encoding
        if not timeout > 0 or attempts < 1 or batch_size < 1:
            raise ValueError("remote: timeout, attempts and batch_size must be positive.")
        self.client = Client(token or os.environ.get("REWARD_TOKEN"), timeout, keep=self.keep)
        troubles = self.client.run(gather([self._trouble(url) for url in self.urls]))
        self.down = {url: trouble for url, trouble in zip(self.urls, troubles, strict=True) if trouble}
        if len(self.down) == len(set(self.urls)):
            raise NoServer(f"no server for the reward {reward or 'remote'} answers: {self._reasons()}.")

    def __call__(self, images: Tensor, prompts: list[str], **metadata: Any) -> Tensor:
        """images (B, 3, H, W) in [0, 1]; returns (B,). ValueError if no server is left, or one refuses what it is asked."""
        return self.client.run(self._all(images, prompts, metadata))

    async def _all(self, images: Tensor, prompts: list[str], metadata: dict[str, list]) -> Tensor:
        todo = deque(range(0, len(prompts), self.batch_size))
        values: dict[int, list[float]] = {}

        async def work(url: str) -> bool:
            """Takes chunks until none is left; False if the server has failed and its chunk went back."""
            if url in self.down and not await self._is_back(url):
                return False
            while todo:
                first = todo.popleft()
                rows = slice(first, first + self.batch_size)
                columns = {name: column[rows] for name, column in metadata.items()}
                try:
                    values[first] = await self._score(url, images[rows], prompts[rows], columns)
                except NoResponse as error:
                    self.down[url] = str(error)
                    todo.append(first)
                    return False
            return True

        left = self.urls
        while todo:
            if not left:
                raise NoServer(f"no server is left for the reward {self.reward or 'remote'}: {self._reasons()}.")
            good = await gather([work(url) for url in left])
            left = [url for url, fine in zip(left, good, strict=True) if fine]
        return torch.tensor([value for first in sorted(values) for value in values[first]])

    async def _score(self, url: str, images: Tensor, prompts: list[str], metadata: dict[str, list]) -> list[float]:
        def read(response: httpx.Response) -> list[float]:
            try:
                values = [float(value) for value in response.json()["values"]]
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                raise InvalidResponse(f"it answered {response.text[:100]!r}") from error
            if len(values) != len(prompts):
                raise InvalidResponse(f"it gave {len(values)} values for {len(prompts)} images")
            return values

        request = {"reward": self.reward, "prompts": prompts, "metadata": metadata}
        sent = await asyncio.to_thread(encode, images, request, self.encoding)
        return await post_with_retries(self.client, f"{url}/score", lambda attempt: sent, read, self.attempts)

    async def _is_back(self, url: str) -> bool:
        try:
            trouble = await self._trouble(url)
        except ValueError as error:  # it came back as another: no reason to stop as long as there are others
            trouble = str(error)
        if trouble:
            self.down[url] = trouble
        else:
            self.down.pop(url, None)
        return not trouble

    async def _trouble(self, url: str) -> str:
        """Why a server does not answer; empty if it does. ValueError if it refuses, or has not this reward."""
        try:
            response = await self.client.request("GET", f"{url}/health", CONNECT_TIMEOUT)
            if response.is_server_error:
                return f"{url} answered {response.status_code}"
            if not response.is_success:
                raise ValueError(f"{url} refused with {response.status_code}: {error_detail(response)}")
            names = [str(name) for name in response.json()["rewards"]]
        except httpx.InvalidURL as error:
            raise ValueError(f"remote: {url} is no address of a server: {error}.") from error
        except (
            httpx.HTTPError,
            InvalidResponse,
            json.JSONDecodeError,
            UnicodeDecodeError,
            KeyError,
            TypeError,
            RecursionError,
        ) as error:
            return f"{url}: {type(error).__name__} {error}".strip()
        if self.reward is not None and self.reward not in names:
            raise ValueError(f"{url} does not serve the reward {self.reward}, but {', '.join(names)}.")
        return ""

    def _reasons(self) -> str:
        return "; ".join(self.down.values())


def encode(images: Tensor, request: dict[str, Any], encoding: str) -> dict[str, Any]:
    """The arguments of httpx's post for a request of `rewards.serving.server`."""
    try:
        text = json.dumps(request)
    except TypeError as error:
        raise ValueError(f"the metadata can't be sent to a server: {error}.") from error
    if encoding == "float":
        body = safetensors.torch.save({"images": images.detach().float().cpu().contiguous()}, {"request": text})
        return {"content": body, "headers": {"Content-Type": "application/x-safetensors"}}
    return {"json": {**request, "images": [base64.b64encode(png(image)).decode() for image in images]}}


def png(image: Tensor) -> bytes:
    """One image (3, H, W) in [0, 1] as PNG."""
    buffer = io.BytesIO()
    to_pil(image[None])[0].save(buffer, "PNG")
    return buffer.getvalue()
