"""uvicorn's HTTP/1.1 protocol with what it lacks: a time limit for headers, a limit of connections."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
"""From connecting, or from the first byte of a further request, to the end of its headers; and from an answer
to the end of a body that was not read."""

MAX_HEADER_BYTES = 16 << 10
MAX_CONNECTIONS = 8192


class EdgeProtocol(H11Protocol):
    """One connection. A client that takes too long over its headers is cut off without an answer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._watch_headers()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE:
            self._watch_headers()
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE and not self._answered_early():
            self._unwatch_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._answered_early():
            self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_headers()
        super().connection_lost(exc)

    def _answered_early(self) -> bool:
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _watch_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def _unwatch_headers(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        self.transport.abort()
