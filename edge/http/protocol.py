"""uvicorn's HTTP/1.1 protocol with what it lacks: limits of headers, their time, and chunks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Mapping
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from sealring.api.errors import error_status
from sealring.edge.http.answers import error_response
from sealring.edge.http.pieces import InPieces
from sealring.edge.http.websocket import WebSocketProtocol
from sealring.mesh.errors import InvalidInput
from sealring.mesh.rpc.crowd import Place

HEADER_SECONDS = 10.0
"""The time from connecting, or from the first byte of a further request, to the end of its headers. It also
bounds the time from an answer to the end of a body that was not read."""

MAX_HEADER_BYTES = 16 << 10
MAX_HEADERS = 100
MIN_CHUNK_BYTES = 64
"""The least average size of the chunks of a body, once it has this number of them: to parse a chunk of one
byte costs a thousand times what the byte does."""

_KEEP_ALIVE = {"TCP_KEEPIDLE": 300, "TCP_KEEPALIVE": 300, "TCP_KEEPINTVL": 30, "TCP_KEEPCNT": 10}
"""The machine of a client has ten minutes to show that it is there, about as long as TCP tries to send. A
client that waits for a whole answer is sent nothing, and waits for as long as its ring is down. macOS calls
the idle time `TCP_KEEPALIVE`."""

_LOGGER = logging.getLogger("uvicorn.edge")
_LOGGER.setLevel(logging.ERROR)
"""uvicorn warns of every malformed request and every `upgrade`, before any limit has been asked."""


_LOOSE_LINE = re.compile(rb"(?<!\r)\n|\n[ \t]")
"""The end of a line without its CR, or a line that goes on in the next one."""


class _Received(ReceiveBuffer):
    """Bytes that came, of which no head and no trailers have loose lines.

    A proxy in front of the gateway may see other lines there, where h11 is as tolerant as it may be (RFC 9112
    sections 2.2 and 5.2).
    """

    def maybe_extract_lines(self) -> list[bytearray] | None:
        before = bytes(self)
        lines = super().maybe_extract_lines()
        if lines is not None and _LOOSE_LINE.search(before, 0, len(before) - len(self)):
            raise h11.RemoteProtocolError("a loose line")
        return lines


class _Connection(h11.Connection):
    """A parser that takes no more headers, and no smaller chunks, than it should, and no loose lines."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._receive_buffer = _Received()  # h11's private name: it offers no other way to see raw lines

    def next_event(self) -> Any:
        """As h11's. Raises RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            _check_headers(event)
            self._chunks = self._chunked_bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._chunked_bytes += len(event.data)
            if self._chunks > MIN_CHUNK_BYTES + self._chunked_bytes // MIN_CHUNK_BYTES:
                raise h11.RemoteProtocolError("too many small chunks")
        return event


def _check_headers(request: h11.Request) -> None:
    if request.http_version not in (b"1.1", b"1.0"):  # h11 takes any digits, as HTTP/2's preface has them
        raise h11.RemoteProtocolError("another version")
    size = sum(len(name) + len(value) + 4 for name, value in request.headers)
    if len(request.headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
        raise h11.RemoteProtocolError("too many headers")
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
        # a proxy in front of the gateway may read the other one (RFC 9112 section 6.3)
        raise h11.RemoteProtocolError("two lengths")


def _keep_alive(connection: socket.socket | None) -> None:
    if connection is None:
        return
    with contextlib.suppress(OSError):  # its client has gone already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class EdgeProtocol(H11Protocol, InPieces):
    """One connection. A client that takes too long over its headers is cut off without an answer."""

    places: Mapping[Any, Place] = {}
    """The places of the listener's connections, by their clients' addresses. The guard has one in `state`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _Connection(h11.SERVER, MAX_HEADER_BYTES)
        self.logger = _LOGGER
        self._application, self.app = self.app, self._answer
        self._header_timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        place = self.places.get(transport.get_extra_info("peername"))
        self.app_state = {**self.app_state, "place": place}
        _keep_alive(transport.get_extra_info("socket"))
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        """Feeds a piece: h11 checks the size of headers only while they are incomplete."""
        if self.conn.their_state is h11.IDLE:
            self._watch_headers()
        if not self._refused:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE and not (self._refused or self._answered_early()):
            self._unwatch_headers()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Has another parser read the head. That one answers nothing to what it cannot read."""
        super().handle_websocket_upgrade(event)
        socket = self.transport.get_protocol()
        assert isinstance(socket, WebSocketProtocol)
        if not socket.handshake_initiated:
            self.connections.discard(socket)
            self.connections.add(self)
            self.transport.set_protocol(self)
            self._refuse(
                "no WebSocket is opened by this request",
                "send it without a body, and with headers of 8192 bytes at most",
            )

    def send_400_response(self, msg: str) -> None:
        """Answers what is no request."""
        self._refuse(
            "the HTTP request is malformed or above a limit",
            f"end lines with CR and LF; send at most {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes "
            f"together, one length of the body, and chunks of {MIN_CHUNK_BYTES} bytes or more",
        )

    def _refuse(self, why: str, hint: str) -> None:
        """Answers, drops what else comes, and closes once the client has, or soon.

        Closing at once, with input unread, would reset the connection before the client has the answer.
        """
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the request that is being served has no client any more
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun already
            self.transport.abort()
            return
        error = InvalidInput(why, hint=hint, reason="BAD_HTTP")
        response = error_response(error)
        headers = [*response.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=error_status(error), headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        if self.transport.can_write_eof():  # TLS cannot
            self.transport.write_eof()
        self._watch_headers()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Has the application answer. A connection whose answer it gives up is cut off: to close it would
        wait until the client reads."""
        cycle = self.cycle
        await self._application(scope, receive, send)
        if cycle.response_started and not (cycle.response_complete or cycle.disconnected):
            cycle.disconnected = True
            self.transport.abort()

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
