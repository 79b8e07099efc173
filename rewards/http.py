"""A question to a server that may be slow, busy or gone: asked again with growing pauses, then said what it was."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

Answer = TypeVar("Answer")
BUSY = (408, 425, 429, 500, 502, 503, 504)
CONNECT = 5.0  # seconds: a machine that is there accepts a connection at once
LONGEST_PAUSE = 30.0  # seconds


class Unanswered(Exception):
    """No usable answer, however often it was asked."""


class Unusable(Exception):
    """An answer that can't be made sense of: worth asking again."""


def client(token: str | None, timeout: float, connections: int = 100) -> httpx.Client:
    """Proxies of the environment are not for servers of one's own."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    limits = httpx.Limits(max_connections=connections)
    return httpx.Client(headers=headers, timeout=httpx.Timeout(timeout, connect=CONNECT), limits=limits, trust_env=False)


def ask(
    client: httpx.Client,
    url: str,
    request: Callable[[int], dict[str, Any]],
    read: Callable[[httpx.Response], Answer],
    attempts: int,
) -> Answer:
    """POSTs what `request` makes for the attempt (0 is the first) until `read` makes sense of the answer.

    Raises:
        Unanswered: what the last attempt came to.
        ValueError: the server refused the request, as it would again.
    """
    reason, pause = "", 0.0
    for attempt in range(attempts):
        time.sleep(pause)
        pause = min(0.5 * 2**attempt, LONGEST_PAUSE)
        try:
            response = client.post(url, **request(attempt))
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__} {error}".strip()
            continue
        if response.status_code in BUSY:
            reason = f"it answered {response.status_code} {sentence(response)}".strip()
            pause = max(pause, _retry_after(response))
            continue
        if not response.is_success:
            raise ValueError(f"{url} refused the request with {response.status_code}: {sentence(response)}")
        try:
            return read(response)
        except Unusable as error:
            reason = str(error)
    raise Unanswered(f"{url} gave no usable answer in {attempts} attempts, lastly: {reason}")


def sentence(response: httpx.Response) -> str:
    """What a server says of an error, on one line and not too long."""
    try:
        content = response.json()
        text = content.get("detail") or content["error"]["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        text = response.text
    return " ".join(str(text).split())[:500]


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait; it may also give a date, which is not worth the trouble."""
    text = response.headers.get("retry-after", "")
    return min(float(text), LONGEST_PAUSE) if text.isdecimal() else 0.0
