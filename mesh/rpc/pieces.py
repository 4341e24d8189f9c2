"""Long messages of a stream, sent in pieces, so that short ones do not wait for them.

A message of gRPC takes a stream for itself until its last byte has gone. At 100 Mbit/s, 32 MiB take three
seconds, and a member that does not answer for five is taken for lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import cast

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.validate import MAX_ENVELOPE_BYTES
from sealring.v1 import control_pb2 as control

PIECE_BYTES = 256 << 10
MAX_WHOLE = MAX_ENVELOPE_BYTES + (4 << 20)
"""Bytes of a message in pieces: a prompt, and the answer so far of one that goes on after a fault."""

Written = Callable[[], None]


class Outgoing:
    """The messages that a stream has to send. Of those that may be long only pieces are sent, between the
    others; both kinds keep their order."""

    def __init__(self, wrap: Callable[[control.Piece], bytes]) -> None:
        """`wrap` makes a message of a piece."""
        self._wrap = wrap
        self._others: deque[tuple[bytes, Written | None]] = deque()
        self._long: deque[tuple[str, bytes, Written | None]] = deque()
        self._sent = 0  # bytes of the first long one

    def __bool__(self) -> bool:
        return bool(self._others or self._long)

    def put(self, message: bytes, written: Written | None = None) -> None:
        """Queues a short message."""
        self._others.append((message, written))

    def put_long(self, message: bytes, written: Written | None = None, *, key: str = "") -> None:
        """Queues a message that may be long, or one that must not overtake such a one. By its `key` it can be
        taken out again."""
        self._long.append((key, message, written))

    def withdraw(self, key: str) -> bool:
        """Takes a message out of which nothing has left yet; whether it was there."""
        for place, (one, _, _) in enumerate(self._long):
            if one == key and (place or not self._sent):
                del self._long[place]
                return True
        return False

    def shorten(self) -> None:
        """Forgets what has to go in pieces: the stream is about to end."""
        self._others += [(message, done) for _, message, done in self._long if len(message) <= PIECE_BYTES]
        self._long.clear()
        self._sent = 0

    def take(self) -> tuple[bytes, Written | None]:
        """The next message, and what to call when it is on its way. Raises IndexError for none."""
        if self._others or not self._long:
            return self._others.popleft()
        _, message, written = self._long[0]
        if len(message) <= PIECE_BYTES:
            self._long.popleft()
            return message, written
        data = message[self._sent : self._sent + PIECE_BYTES]
        self._sent += len(data)
        if self._sent < len(message):
            return self._wrap(control.Piece(data=data)), None
        self._long.popleft()
        self._sent = 0
        return self._wrap(control.Piece(data=data, last=True)), written


class Joiner:
    """Joins the pieces of one message after the other."""

    def __init__(self, most: int = MAX_WHOLE) -> None:
        """`most`: bytes of a whole message."""
        self._most = most
        self._data = bytearray()

    def add(self, piece: control.Piece) -> bytes | None:
        """The whole message, with its last piece. Raises InvalidInput (BAD_MESSAGE) for one that is too long,
        and for a piece that is empty."""
        if not piece.data or len(self._data) + len(piece.data) > self._most:
            raise InvalidInput("a message in pieces is malformed", reason="BAD_MESSAGE")
        self._data += piece.data
        if not piece.last:
            return None
        whole, self._data = self._data, bytearray()
        return cast("bytes", whole)  # protobuf parses it as it is; a copy may take 36 MiB more
