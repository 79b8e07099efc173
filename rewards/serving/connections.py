"""Connections that have a deadline: whoever opens many and sends nothing keeps nobody else out."""

from asyncio import Transport
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 10.0  # without a request in work: for its head, or for the rest of a body that nobody reads
WAITING = 128  # such connections at a time; beyond them the oldest gives way


def bounded(seconds: float = SECONDS, waiting: int = WAITING) -> type[H11Protocol]:
    """A protocol for uvicorn, whose own one waits for ever for the head of a request."""
    idle: dict[Any, Any] = {}  # connections and their timers, the oldest first

    class Bounded(H11Protocol):
        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.look()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.look()

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop_timer()
            super().connection_lost(exc)

        def look(self) -> None:
            """Lets the time run while there is no request in work, whatever arrives."""
            if self.cycle is not None and not self.cycle.response_complete:
                self.stop_timer()
            elif self not in idle and not self.transport.is_closing():
                idle[self] = self.loop.call_later(seconds, self.transport.abort)
                if len(idle) > waiting:
                    oldest = next(iter(idle))
                    oldest.stop_timer()
                    oldest.transport.abort()

        def stop_timer(self) -> None:
            timer = idle.pop(self, None)
            if timer is not None:
                timer.cancel()

    return Bounded
