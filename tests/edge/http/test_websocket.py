"""A WebSocket's protocol over a transport that notes what is asked of it: what is read when, and counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from sealring.edge.http.websocket import WebSocketProtocol
from sealring.edge.inference.holding import Holding, Share

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


class Opened:
    """A protocol after its handshake, whose application leaves the events to the test."""

    def __init__(self, room: int = 1000) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.Event().wait()

        config = uvicorn.Config(app, ws_ping_interval=None, ws_per_message_deflate=False)
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
