"""uvicorn's WebSocket protocol with what it lacks: a count of its bytes, and limits of small frames."""

from __future__ import annotations

import logging
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import ProtocolError
from websockets.frames import CTRL_OPCODES, CloseCode, Frame
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from sealring.edge.http.pieces import InPieces
from sealring.mesh.errors import ResourceExhausted
from sealring.mesh.rpc.holding import Share
from sealring.mesh.rpc.limits import Buckets

MIN_FRAME_BYTES = 64
"""The least size of a frame that is not counted as a small one. To parse a frame costs as much as to read
thousands of bytes, whatever it carries."""

FRAMES_AT_ONCE = 128
FRAMES_PER_SECOND = 16.0
"""Small frames of a connection, and those that control it: pings, pongs, and the end."""

PING_SECONDS = 20.0
"""How often a silent connection is sent something, for the proxies between."""

SILENT_PINGS = 30
"""Pings after which a client that sends nothing at all has left: ten minutes, as with HTTP (`protocol.py`).
They are counted, and not the time, in which this machine may have slept."""

_LOGGER = logging.getLogger("uvicorn.websocket")
_LOGGER.setLevel(logging.CRITICAL)
"""uvicorn and websockets log each connection, and each mistake of a client."""


class _Connection(ServerProtocol):
    """A parser that takes no more small frames than it should."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.small = Buckets(FRAMES_PER_SECOND, FRAMES_AT_ONCE, size=1)

    def recv_frame(self, frame: Frame) -> None:
        """As websockets', but it ends the connection at one small frame too many, whatever comes behind."""
        small = frame.opcode in CTRL_OPCODES or len(frame.data) < MIN_FRAME_BYTES
        if small and self.small.take("frames"):
            self.parser_exc = ProtocolError("too many small frames")
            self.fail(CloseCode.POLICY_VIOLATION, str(self.parser_exc))
        else:
            super().recv_frame(frame)


class WebSocketProtocol(WebSocketsSansIOProtocol, InPieces):
    """One connection after its upgrade. It reads nothing until it is admitted, nor while its client does not
    read: it would have to keep the answers to pings."""

    share: Share | None = None
    """The count of bytes that the application has not taken yet; None until the connection is admitted."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger = _LOGGER
        self.conn = _Connection(max_size=self.config.ws_max_size, logger=_LOGGER)
        self._counted = self._unheard = 0

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            self.scope["state"]["protocol"] = self
            self.read_paused = True  # until the application takes the event that there is a connection
            self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self._unheard = 0
        if self.share is not None:
            try:
                self.share.take(len(data))
            except ResourceExhausted as error:
                self._fail(CloseCode.TRY_AGAIN_LATER, str(error))
                return
            self._counted += len(data)
        super().data_received(data)
        self._discount()

    def send_keepalive_ping(self) -> None:
        """Ends the connection of a client that has left; while nothing is read, nothing can be heard."""
        self._unheard += not self.read_paused
        if self._unheard > SILENT_PINGS:
            self.transport.abort()
        else:
            super().send_keepalive_ping()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> Any:
        message = await super().receive()
        if not self.writable.is_set():
            self.transport.pause_reading()
        self._discount()
        return message

    def send_away(self) -> None:
        """Ends a connection that asks for nothing, for others that come."""
        if self.conn.state is State.OPEN:
            self._fail(CloseCode.TRY_AGAIN_LATER, "too many connections ask for nothing")
        if self.conn.state is not State.CLOSING or self.transport.get_write_buffer_size():
            self.transport.abort()  # to close it would wait until the client reads

    def _discount(self) -> None:
        """Counts nothing once the application has taken all messages and none has begun."""
        if self.share is not None and not (self.frames or self.conn.reader.buffer or self.queue.qsize()):
            self.share.give_back(self._counted)
            self._counted = 0

    def _fail(self, code: CloseCode, reason: str) -> None:
        self.frames = []
        self.conn.fail(code, reason)
        self.handle_parser_exception()
