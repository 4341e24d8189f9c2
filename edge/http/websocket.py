"""uvicorn's WebSocket protocol with what it lacks: a count of its bytes, and limits of small frames."""

from __future__ import annotations

import logging
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from sealring.edge.inference.holding import Share
from sealring.mesh.errors import ResourceExhausted

MIN_FRAME_BYTES = 64
"""The least average size of the frames of a message, once it has this number of them."""

PING_SECONDS = 20.0
"""How often a silent connection is sent something, for the proxies between."""

_LOGGER = logging.getLogger("uvicorn.websocket")
_LOGGER.setLevel(logging.CRITICAL)
"""uvicorn and websockets log each connection, and each mistake of a client."""


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection after its upgrade. It reads nothing until it is admitted, nor while its client does not
    read: it would have to keep the answers to pings."""

    share: Share | None = None
    """The count of bytes that the application has not taken yet; None until the connection is admitted."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger = self.conn.logger = _LOGGER
        self._counted = self._message = 0

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            self.scope["state"]["protocol"] = self
            self.read_paused = True  # until the application takes the event that there is a connection
            self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        if self.share is not None:
            try:
                self.share.take(len(data))
            except ResourceExhausted as error:
                self._fail(CloseCode.TRY_AGAIN_LATER, str(error))
                return
            self._counted += len(data)
        super().data_received(data)
        self._discount()

    def handle_text(self, event: Frame) -> None:
        self._message = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._message = len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        self._message += len(event.data)
        if len(self.frames) > MIN_FRAME_BYTES + self._message // MIN_FRAME_BYTES:
            self._fail(CloseCode.POLICY_VIOLATION, "too many small frames")
        elif not self.close_sent:
            super().handle_cont(event)

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

    def _discount(self) -> None:
        """Counts nothing once the application has taken all messages and none has begun."""
        if self.share is not None and not (self.frames or self.conn.reader.buffer or self.queue.qsize()):
            self.share.give_back(self._counted)
            self._counted = 0

    def _fail(self, code: CloseCode, reason: str) -> None:
        self.frames = []
        self.conn.fail(code, reason)
        self.handle_parser_exception()
