"""Server connections with deadlines, so that a client with many idle connections can't lock out the others."""

from asyncio import Transport
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_TIMEOUT = 10.0  # seconds that a connection may stay open without a running request
MAX_IDLE = 128  # such connections at a time; beyond this the oldest is closed


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
