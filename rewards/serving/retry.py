"""Requests to servers that may be slow, busy or gone: each has one deadline, and is made again after growing pauses.

They run in an event loop of a daemon thread: whoever waits for them can be interrupted, and leaves none behind.
"""

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import httpx

Answer = TypeVar("Answer")
RETRY_STATUSES = (408, 425, 429, 500, 502, 503, 504)
CONNECT_TIMEOUT = 5.0  # seconds: a machine that is there accepts a connection at once
MAX_PAUSE = 30.0  # seconds
MAX_RESPONSE_BYTES = 16_000_000


class NoResponse(Exception):
    """No usable answer, however often it was asked."""


class InvalidResponse(Exception):
    """An answer that can't be made sense of: worth asking again."""


class Client:
    """An HTTP client whose requests take `timeout` seconds at most, from the connection to the last byte of the answer.

    Proxies of the environment are not for servers of one's own.
    """

    def __init__(self, token: str | None, timeout: float, connections: int = 100, keep: bool = True) -> None:
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections if keep else 0)
        waits = httpx.Timeout(None, connect=CONNECT_TIMEOUT)
        self.timeout, self.loop = timeout, _loop(os.getpid())
        self.client = httpx.AsyncClient(headers=headers, timeout=waits, limits=limits, trust_env=False)
        weakref.finalize(self, _close, self.loop, self.client).atexit = False

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Wait for work on this client; an error that ends the wait, such as a KeyboardInterrupt, ends the work."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        finally:
            future.cancel()

    async def request(self, method: str, url: str, timeout: float | None = None, **more: Any) -> httpx.Response:
        """The whole answer.

        Raises:
            httpx.HTTPError: there was none in time.
            InvalidResponse: it is too long.
        """
        seconds = self.timeout if timeout is None else timeout
        try:
            return await asyncio.wait_for(self._whole(method, url, **more), seconds)
        except asyncio.TimeoutError as error:
            raise httpx.ReadTimeout(f"no whole answer within {seconds:g} seconds") from error

    async def _whole(self, method: str, url: str, **more: Any) -> httpx.Response:
        body = bytearray()
        async with self.client.stream(method, url, **more) as response:
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MAX_RESPONSE_BYTES:
                    raise InvalidResponse(f"its answer is longer than {MAX_RESPONSE_BYTES:,} bytes")
        kept = {name: response.headers[name] for name in ("content-type", "retry-after") if name in response.headers}
        return httpx.Response(response.status_code, headers=kept, content=bytes(body))


async def post_with_retries(
    client: Client,
    url: str,
    request: Callable[[int], dict[str, Any]],
    read: Callable[[httpx.Response], Answer],
    attempts: int,
) -> Answer:
    """POSTs what `request` makes for the attempt (0 is the first) until `read` makes sense of the answer.

    Raises:
        NoResponse: what the last attempt came to.
        ValueError: the server refused the request, as it would again.
    """
    reason, pause = "", 0.0
    for attempt in range(attempts):
        await asyncio.sleep(pause)
        pause = min(0.5 * 2**attempt, MAX_PAUSE)
        try:
            response = await client.request("POST", url, **request(attempt))
            if response.status_code in RETRY_STATUSES:
                reason = f"it answered {response.status_code} {error_detail(response)}".strip()
                pause = max(pause, _retry_after(response))
                continue
            if not response.is_success:
                raise ValueError(f"{url} refused the request with {response.status_code}: {error_detail(response)}")
            return read(response)
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__} {error}".strip()
        except InvalidResponse as error:
            reason = str(error)
    raise NoResponse(f"{url} gave no usable answer in {attempts} attempts, lastly: {reason}")


async def gather(works: Iterable[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """The results of all, in their order; the first error, or an end from outside, ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def error_detail(response: httpx.Response) -> str:
    """What a server says of an error, on one line and not too long."""
    try:
        content = response.json()
        text = content.get("detail") or content["error"]["message"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        text = response.text
    return " ".join(str(text).split())[:500]


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait; it may also give a date, which is not worth the trouble."""
    text = response.headers.get("retry-after", "")
    return min(float(text), MAX_PAUSE) if text.isdecimal() else 0.0


@functools.cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The loop of this process: a forked one has not got its parent's threads."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop


def _close(loop: asyncio.AbstractEventLoop, client: httpx.AsyncClient) -> None:
    """Closes the connections of a client that nobody has any more."""
    asyncio.run_coroutine_threadsafe(client.aclose(), loop)
