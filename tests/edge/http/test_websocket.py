"""A WebSocket's protocol over a transport that notes what is asked of it: what is read when, and counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from sealring.edge.http.pieces import TURN_BYTES
from sealring.edge.http.websocket import (
    FRAMES_AT_ONCE,
    FRAMES_PER_SECOND,
    MIN_FRAME_BYTES,
    SILENT_PINGS,
    WebSocketProtocol,
)
from sealring.mesh.rpc import Buckets, Holding, Share

HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


class Noting(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.paused = self.closed = False
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0


class Opened:
    """A protocol after its handshake, whose application leaves the events to the test."""

    def __init__(self, room: int = 1000) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.Event().wait()

        config = uvicorn.Config(app, ws_ping_interval=1e9, ws_per_message_deflate=False)
        config.load()
        self.protocol = WebSocketProtocol(config, ServerState(), {})
        self.transport, self.holding = Noting(), Holding(2 * room)
        self.protocol.connection_made(self.transport)
        self.protocol.data_received(HANDSHAKE)
        self.share = Share(self.holding, "")

    async def accept(self) -> None:
        self.protocol.share = self.share
        assert (await self.protocol.receive())["type"] == "websocket.connect"
        await self.protocol.send({"type": "websocket.accept"})

    def get(self, data: bytes, opcode: Opcode = Opcode.TEXT, *, fin: bool = True) -> int:
        """Gives a frame of the client to the protocol, and returns its size on the wire."""
        packed = Frame(opcode, data, fin).serialize(mask=True)
        self.protocol.data_received(packed)
        return len(packed)


@pytest.fixture
async def opened() -> Opened:
    made = Opened()
    assert made.transport.paused, "nothing is read from a client that is not admitted"
    await made.accept()
    assert not made.transport.paused
    return made


async def test_bytes_are_counted_from_their_arrival_until_they_are_taken(opened: Opened) -> None:
    begun = opened.get(b"abc", fin=False)
    assert len(opened.holding) == begun
    ended = opened.get(b"def", Opcode.CONT)
    assert len(opened.holding) == begun + ended
    assert (await opened.protocol.receive())["text"] == "abcdef"
    opened.get(b"are you there?", Opcode.PING)
    assert len(opened.holding) == 0


async def test_bytes_beyond_the_room_end_the_connection(opened: Opened) -> None:
    opened.get(b"x" * 500, fin=False)
    opened.get(b"x" * 700, Opcode.CONT)
    assert b"\x03\xf5the requests under way" in opened.transport.written, "1013, try again later"
    assert opened.transport.closed


async def test_nothing_is_read_from_a_client_that_does_not_read(opened: Opened) -> None:
    opened.get(b"one")
    opened.protocol.pause_writing()
    assert (await opened.protocol.receive())["text"] == "one"
    assert opened.transport.paused, "although the application waits for a message"
    opened.protocol.resume_writing()
    assert not opened.transport.paused


@pytest.mark.parametrize(
    ("opcode", "size", "pieces"),
    [(Opcode.PING, 0, 1), (Opcode.PONG, 125, 20), (Opcode.TEXT, 63, 20), (Opcode.CONT, 1, 2)],
)
async def test_frames_that_cost_more_than_their_bytes_are_few(opcode: Opcode, size: int, pieces: int) -> None:
    """The parser counts frames of any kind, and stops at the last one, however many lie ready."""
    opened, taken = Opened(10 * TURN_BYTES), list[Opcode]()
    await opened.accept()
    opened.protocol.conn.small = Buckets(FRAMES_PER_SECOND, FRAMES_AT_ONCE, clock=lambda: 0.0)
    take = opened.protocol.conn.recv_frame
    opened.protocol.conn.recv_frame = lambda frame: (taken.append(frame.opcode), take(frame))
    if opcode == Opcode.CONT:
        opened.get(b"x", fin=False)
    packed = Frame(opcode, b"x" * size, fin=opcode != Opcode.CONT).serialize(mask=True)
    many = packed * (TURN_BYTES // len(packed))
    while not opened.transport.closed and pieces:
        opened.protocol.data_received(many)
        pieces -= 1
    assert opened.transport.closed
    assert len(taken) == FRAMES_AT_ONCE + 1
    assert b"\x03\xf0too many small frames" in opened.transport.written, "1008, policy violation"


async def test_large_frames_are_as_many_as_come(opened: Opened) -> None:
    opened.protocol.share = None
    for _ in range(2 * FRAMES_AT_ONCE):
        opened.get(b"x" * MIN_FRAME_BYTES)
    assert not opened.transport.closed


async def test_a_client_that_sends_nothing_has_left_after_so_many_pings(opened: Opened) -> None:
    """A pong is a sign, and nothing is expected while the connection is not read."""
    for _ in range(3):
        for _ in range(SILENT_PINGS):
            opened.protocol.send_keepalive_ping()
        opened.get(opened.protocol.pending_ping_payload, Opcode.PONG)
    opened.get(b"one more, for which the application has no time")
    for _ in range(2 * SILENT_PINGS):
        opened.protocol.send_keepalive_ping()
    assert not opened.transport.closed
    await opened.protocol.receive()
    for _ in range(SILENT_PINGS + 1):
        assert not opened.transport.closed
        opened.protocol.send_keepalive_ping()
    assert opened.transport.closed


async def test_who_is_sent_away_is_told_or_cut() -> None:
    before = Opened()
    before.protocol.send_away()
    assert before.transport.closed
    opened = Opened()
    await opened.accept()
    opened.protocol.send_away()
    assert opened.transport.closed
    assert b"\x03\xf5too many connections" in opened.transport.written
