"""Connections to the HTTP edge in memory: the product's protocols, over transports without sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import h11
from memorynetwork import Network, process
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from sealring.edge.http.pieces import TURN_BYTES
from sealring.edge.http.server import HttpServer
from sealring.mesh.errors import Unavailable
from sealring.mesh.rpc import Crowd

Object = dict[str, Any]

BUFFER_BYTES = 4096
"""Bytes on the way to a client before the server has to wait: few, so that short answers fill them."""

_LOOK_SECONDS = 5.0
"""How long a client takes to find that its gateway has ended."""

_LAST = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
"""The kinds of messages after which none comes."""

_PORTS = itertools.count(50_000)


class EdgeInMemory(HttpServer):
    """The HTTP server of a gateway, which gets its connections in memory."""

    def __init__(self, app: Any, *, tls: object = None) -> None:
        del tls
        super().__init__(app)
        self.process = process.get()
        self.places: dict[Any, Any] = {}
        self.crowd = Crowd(sys.maxsize)
        config = self._server.config
        config.load()
        self._server.lifespan = config.lifespan_class(config)

    def listen(self, address: str) -> int:
        return int(address.rpartition(":")[2])

    async def start(self) -> None: ...

    async def stop(self) -> None:
        for one in list(self._server.server_state.connections):
            one.transport.abort()

    @property
    def connections(self) -> int:
        """Those that are open."""
        return len(self._server.server_state.connections)

    def protocol(self) -> Any:
        """The protocol of a new connection."""
        return self._server._protocol(self.places)  # noqa: SLF001 - what its listener would call

    async def post(self, network: Network, path: str, key: str, body: Object) -> AsyncIterator[Object]:
        """The messages of an answer, as in ASGI. Raises Unavailable when the connection ends before it."""
        connection, parser = Connection(self, network), h11.Connection(h11.CLIENT)
        try:
            connection.write(request_of(parser, path, key, body))
            while True:
                event = parser.next_event()
                if event is h11.NEED_DATA:
                    try:
                        parser.receive_data(await connection.read())
                    except h11.RemoteProtocolError:
                        raise Unavailable("the connection ended in the middle of an answer") from None
                elif isinstance(event, h11.Response):
                    yield {"type": "http.response.start", "status": event.status_code}
                elif isinstance(event, h11.Data):
                    yield {"type": "http.response.body", "body": bytes(event.data), "more_body": True}
                elif isinstance(event, h11.EndOfMessage):
                    yield {"type": "http.response.body", "body": b"", "more_body": False}
                    return
                else:
                    raise Unavailable("the connection ended without an answer")
        finally:
            connection.close()

    async def converse(self, network: Network, path: str, key: str, body: Object) -> AsyncIterator[Object]:
        """As `post`, over a WebSocket: each message of it is a line of the body."""
        connection, parser = Connection(self, network), ClientProtocol(parse_uri(f"ws://gateway{path}"))
        try:
            request = parser.connect()
            request.headers["authorization"] = f"Bearer {key}"
            parser.send_request(request)
            said = json.dumps({"type": "response.create"} | body).encode()
            while True:
                for event in parser.events_received():
                    if isinstance(event, Response):
                        yield {"type": "http.response.start", "status": event.status_code}
                        parser.send_text(said)
                    elif isinstance(event, Frame) and event.opcode is Opcode.TEXT:
                        done = json.loads(event.data)["type"] in _LAST
                        yield {
                            "type": "http.response.body",
                            "body": event.data + b"\n",
                            "more_body": not done,
                        }
                        if done:
                            return
                if parser.close_expected() or parser.handshake_exc is not None:
                    raise Unavailable("the WebSocket ended before its answer")
                connection.write(b"".join(parser.data_to_send()))
                data = await connection.read()
                if data:
                    parser.receive_data(data)
                else:
                    parser.receive_eof()
        finally:
            connection.close()


def request_of(parser: h11.Connection, path: str, key: str, body: Object) -> bytes:
    """The bytes of a request."""
    content = json.dumps(body).encode()
    headers = {"host": "gateway", "authorization": f"Bearer {key}", "content-type": "application/json"}
    request = h11.Request(
        method="POST", target=path, headers=[*headers.items(), ("content-length", str(len(content)))]
    )
    parts = request, h11.Data(data=content), h11.EndOfMessage()
    return b"".join(parser.send(part) or b"" for part in parts)


class _Came(deque[bytes]):
    """What a client has not read, which also names the way there for the network."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Connection:
    """A connection as its client has it."""

    def __init__(self, edge: EdgeInMemory, network: Network) -> None:
        self._here, self._there, self._network = process.get(), edge.process, network
        self._came = _Came()
        self._wakes = asyncio.Event()
        self._transport = _Transport(self, edge)
        self._closed = False
        self._to_edge(self._transport.open)

    def write(self, data: bytes) -> None:
        if data:
            self._to_edge(lambda: self._transport.fed(data))

    async def read(self) -> bytes:
        """Waits for the next bytes; none come once the server has closed. Raises Unavailable when its process
        has ended."""
        while not self._came:
            self._wakes.clear()
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._wakes.wait()
            except TimeoutError:
                if self._there.ended:
                    raise Unavailable("the gateway has ended") from None
        data = self._came[0]
        if data:  # the end is there to be read again
            self._came.popleft()
            self._transport.taken += len(data)
            if self._transport.full:
                self._to_edge(self._transport.room)
        return data

    def close(self) -> None:
        """The client reads and writes no more."""
        if not self._closed:
            self._closed = True
            self._to_edge(self._transport.left)

    def _to_edge(self, do: Callable[[], object]) -> None:
        self._network.send(self._here.host, self._there.host, do, self._there.context, self._wakes)

    # As the transport calls it

    def sent(self, data: bytes) -> None:
        self._network.send(
            self._there.host, self._here.host, lambda: self._arrived(data), self._here.context, self._came
        )

    def _arrived(self, data: bytes) -> None:
        self._came.append(data)
        self._wakes.set()


class _Transport(asyncio.Transport):
    """The server's end. `taken` counts the bytes that the client has read."""

    def __init__(self, connection: Connection, edge: EdgeInMemory) -> None:
        super().__init__()
        self._connection, self._edge = connection, edge
        self._address = process.get().host, next(_PORTS)
        self._protocol: Any = None
        self._unfed: deque[bytes] = deque()
        self._reads, self._closing, self._over = True, False, False
        self._written = self.taken = 0
        self.full = False
        """Whether the protocol waits until the client has read."""

    # The network

    def open(self) -> None:
        place = self._edge.crowd.enter(self._address[0], self.abort)
        self._edge.places[self._address] = place
        self._protocol = self._edge.protocol()
        self._protocol.connection_made(self)

    def fed(self, data: bytes) -> None:
        self._unfed.extend(data[at : at + TURN_BYTES] for at in range(0, len(data), TURN_BYTES))
        self._feed()

    def room(self) -> None:
        """The client has read."""
        if self.full and self._waiting <= BUFFER_BYTES // 2:
            self.full = False
            if self._closing:
                self._lost(None)
            elif not self._over:
                self._protocol.resume_writing()

    def left(self) -> None:
        """The client has closed its end."""
        if not self._over:
            self._protocol.eof_received()
            self._lost(None)

    @property
    def _waiting(self) -> int:
        return self._written - self.taken

    def _feed(self) -> None:
        while self._unfed and self._reads and not (self._over or self._closing):
            self._protocol.data_received(self._unfed.popleft())

    def _lost(self, error: Exception | None) -> None:
        if self._over:
            return
        self._over = self._closing = True
        self._connection.sent(b"")
        self._edge.places.pop(self._address).close()
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, error)

    # As asyncio's

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not data or self._over:
            return
        self._written += len(data)
        self._connection.sent(bytes(data))
        if self._waiting > BUFFER_BYTES and not self.full:
            self.full = True
            self._protocol.pause_writing()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self.full:  # else it is closed once the client has read
                self._lost(None)

    def abort(self) -> None:
        self._lost(None)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        if not self._reads:
            self._reads = True
            asyncio.get_running_loop().call_soon(self._feed)

    def get_write_buffer_size(self) -> int:
        return self._waiting if self.full else 0

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._connection.sent(b"")

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": self._address, "sockname": ("10.0.2.1", 8000)}.get(name, default)
