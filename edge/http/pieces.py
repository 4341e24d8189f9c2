"""How much of a connection one turn of the event loop takes."""

from __future__ import annotations

import asyncio

TURN_BYTES = 16 << 10
"""Bytes of a connection that are parsed in one turn of the event loop. asyncio reads 256 KiB: that many empty
frames of a WebSocket took 0.13 s, in which no other client was answered."""


class InPieces(asyncio.BufferedProtocol):
    """A protocol that gets at most `TURN_BYTES` at once, also over TLS.

    asyncio reads as much as there is room for in the buffer that it is given, and the rest in the next turn.
    """

    _piece = memoryview(b"")

    def get_buffer(self, sizehint: int) -> memoryview:
        self._piece = memoryview(bytearray(TURN_BYTES))
        return self._piece

    def buffer_updated(self, nbytes: int) -> None:
        piece, self._piece = bytes(self._piece[:nbytes]), memoryview(b"")
        self.data_received(piece)

    def data_received(self, data: bytes) -> None:
        """Takes a piece."""
        raise NotImplementedError
