"""HTTP requests with one deadline each, which are retried after growing pauses.

They run in an event loop of a daemon thread, so that Ctrl-C interrupts the wait and cancels the requests.
"""

import asyncio
import functools
import os
import re
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import httpx

from flow_grpo.errors import FlowGRPOError

Answer = TypeVar("Answer")
RETRY_STATUSES = (408, 425, 429, 500, 502, 503, 504)
CONNECT_TIMEOUT = 5.0  # seconds
MAX_PAUSE = 30.0  # seconds
MAX_RESPONSE_BYTES = 16_000_000
ADDRESS = re.compile(r"(\w+://)[^/?#]*")
CREDENTIALS = re.compile(r"(\w+://)([^/?#]*@)([^/?#]*)(.*)")


class NoResponse(Exception):
    """A request got no usable answer, and may get one later.

    Attributes:
        pause: seconds that the server asks to wait before the next attempt.
        answered: whether there was an answer, though no usable one.
    """

    def __init__(self, reason: str, pause: float = 0.0, answered: bool = True) -> None:
        super().__init__(reason)
        self.pause, self.answered = pause, answered


class Refused(FlowGRPOError):
    """A server refused a request, and would refuse it again.

    Attributes:
        detail: the server's own sentence.
    """

    def __init__(self, sentence: object = "", detail: str = "") -> None:
        super().__init__(sentence)
        self.detail = detail


class InvalidResponse(Exception):
    """A response that can't be parsed; the request is retried."""


class Client:
    """An HTTP client whose requests take at most `timeout` seconds, from the connection to the last byte of the response.

    It ignores the proxies of the environment, since reward servers are usually on the local network.
    """

    def __init__(self, token: str | None, timeout: float, connections: int = 100, keep_alive: bool = True) -> None:
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections if keep_alive else 0)
        waits = httpx.Timeout(None, connect=CONNECT_TIMEOUT)
        self.timeout, self.loop = timeout, _loop(os.getpid())
        self._credentials: dict[str, str] = {}  # `user:password@` by scheme and host
        self.client = httpx.AsyncClient(headers=headers, timeout=waits, limits=limits, trust_env=False)
        weakref.finalize(self, _close, self.loop, self.client).atexit = False

    def without_credentials(self, url: str) -> str:
        """The address without user and password, which can be shown. Requests to it have them nevertheless."""
        if (parts := CREDENTIALS.fullmatch(url)) is None:
            return url
        self._credentials[f"{parts[1]}{parts[3]}"] = parts[2]
        return f"{parts[1]}{parts[3]}{parts[4]}"

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Run a coroutine and wait for its result; an error that ends the wait, such as KeyboardInterrupt, cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        finally:
            future.cancel()

    async def request(self, method: str, url: str, timeout: float | None = None, **more: Any) -> httpx.Response:
        """Make a request and read the whole response.

        Raises:
            httpx.HTTPError: there was no complete response within the timeout.
            InvalidResponse: it is too long.
        """
        seconds = self.timeout if timeout is None else timeout
        try:
            return await asyncio.wait_for(self._read_response(method, url, **more), seconds)
        except asyncio.TimeoutError as error:
            raise httpx.ReadTimeout(f"no complete answer within {seconds:g} seconds") from error

    async def _read_response(self, method: str, url: str, **more: Any) -> httpx.Response:
        body, parts = bytearray(), ADDRESS.match(url)
        if parts is not None:
            url = f"{parts[1]}{self._credentials.get(parts[0], '')}{url[parts.end(1) :]}"
        async with self.client.stream(method, url, **more) as response:
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MAX_RESPONSE_BYTES:
                    raise InvalidResponse(f"its answer is longer than {MAX_RESPONSE_BYTES:,} bytes")
        headers = {name: response.headers[name] for name in ("content-type", "retry-after") if name in response.headers}
        return httpx.Response(response.status_code, headers=headers, content=bytes(body))


async def post_with_retries(
    client: Client,
    url: str,
    request: Callable[[int], dict[str, Any]],
    read: Callable[[httpx.Response], Answer],
    attempts: int,
) -> Answer:
    """POST the arguments that `request` returns for attempt 0, 1, ... until `read` can parse the response.

    Raises:
        NoResponse: all attempts failed; the message says how the last one did.
        Refused: the server refused the request.
    """
    failure = NoResponse("")
    for attempt in range(attempts):
        await asyncio.sleep(pause_before(attempt, failure))
        try:
            return await post(client, url, request(attempt), read)
        except NoResponse as error:
            failure = error
    raise NoResponse(no_usable_answer(url, attempts, failure))


async def post(client: Client, url: str, arguments: dict[str, Any], read: Callable[[httpx.Response], Answer]) -> Answer:
    """POST once. NoResponse if that failed, Refused if the server refused the request."""
    try:
        response = await client.request("POST", url, **arguments)
        if response.status_code in RETRY_STATUSES:
            raise NoResponse(f"it answered {response.status_code} {error_detail(response)}".strip(), _retry_after(response))
        if not response.is_success:
            detail = error_detail(response)
            raise Refused(f"{url} refused the request with {response.status_code}: {detail}", detail)
        return read(response)
    except httpx.HTTPError as error:
        raise NoResponse(f"{type(error).__name__} {error}".strip(), answered=False) from error
    except InvalidResponse as error:
        raise NoResponse(str(error)) from error


def pause_before(attempt: int, failure: NoResponse) -> float:
    """Seconds before an attempt: none before attempt 0, then twice as many each time, and at least what the server asked for."""
    return max(min(0.5 * 2 ** (attempt - 1), MAX_PAUSE), failure.pause) if attempt else 0.0


def no_usable_answer(url: str, attempts: int, failure: NoResponse) -> str:
    """A sentence without its end."""
    return f"{url} gave no usable answer in {attempts} attempts, lastly: {failure}"


async def gather(works: Iterable[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Return the results of all coroutines in order; the first error, or a cancellation, cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def error_detail(response: httpx.Response) -> str:
    """The error message in a response, as one line of at most 500 characters."""
    try:
        content = response.json()
        text = content.get("detail") or content["error"]["message"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        text = response.text
    return " ".join(str(text).split())[:500]


def _retry_after(response: httpx.Response) -> float:
    """Seconds of the header Retry-After; 0 if it is missing or a date."""
    text = response.headers.get("retry-after", "")
    return min(float(text), MAX_PAUSE) if text.isdecimal() else 0.0


@functools.cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of a process; a forked process needs its own, since threads are not forked."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop


def _close(loop: asyncio.AbstractEventLoop, client: httpx.AsyncClient) -> None:
    """Close the connections of a client that was garbage collected."""
    asyncio.run_coroutine_threadsafe(client.aclose(), loop)
