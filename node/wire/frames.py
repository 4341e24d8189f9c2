"""Length-prefixed protobuf frames on the private pipes between a daemon and its child processes.

A frame is a 4-byte big-endian length and one serialized message. `FrameSocket` is for child processes and
bare threads; the daemon's end is `sealring.node.daemon.supervisor.Child`. `socket_pair` makes the pipes.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from sealring.mesh.errors import InvalidInput

ENGINE_FORM = "13"
"""The form of an engine's messages, which a daemon names when it starts the engine. An engine ends at once if
its files were replaced under a running daemon. That daemon would let fields pass that it does not know, also
of a sealed answer."""

MAX_FRAME = 64 << 20
LENGTH = struct.Struct(">I")


M = TypeVar("M", bound=Message)


def encode_frame(message: Message) -> bytes:
    """The frame of one message. Raises InvalidInput (FRAME_TOO_LARGE)."""
    body = message.SerializeToString()
    if len(body) > MAX_FRAME:
        raise InvalidInput(f"a frame of {len(body)} bytes is above {MAX_FRAME}", reason="FRAME_TOO_LARGE")
    return LENGTH.pack(len(body)) + body


class FrameSocket:
    """Blocking frames over a connected stream socket. Sends may come from several threads."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._send_lock = threading.Lock()
        self._reader = connected.makefile("rb", buffering=1 << 16)

    def send(self, message: Message) -> None:
        """Raises OSError when the other end is gone."""
        frame = encode_frame(message)
        with self._send_lock:
            self.socket.sendall(frame)

    def receive(self, kind: type[M]) -> M | None:
        """The next message, or None at a clean end. Raises InvalidInput on a broken frame."""
        head = self._reader.read(LENGTH.size)
        if not head:
            return None
        if len(head) < LENGTH.size:
            raise _broken()
        length = _checked_length(head)
        body = self._reader.read(length)
        if len(body) < length:
            raise _broken()
        return _decoded(kind, body)

    def close(self) -> None:
        """Closes the socket and the buffer over it."""
        self._reader.close()
        self.socket.close()


def _checked_length(head: bytes) -> int:
    (length,) = LENGTH.unpack(head)
    if length > MAX_FRAME:
        raise InvalidInput(f"a frame of {length} bytes is above {MAX_FRAME}", reason="FRAME_TOO_LARGE")
    return int(length)


def _decoded(kind: type[M], body: bytes) -> M:
    message = kind()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise InvalidInput("a frame holds no message of its kind", reason="BROKEN_FRAME") from None
    return message


def _broken() -> InvalidInput:
    return InvalidInput("a pipe ended in the middle of a frame", reason="BROKEN_FRAME")


BUFFER_BYTES = 1 << 20
"""macOS gives an end of a pair 8 KiB, which a hundred announced records or one step's events fill."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected stream sockets with buffers of up to BUFFER_BYTES, as far as the system allows.

    Raises OSError.
    """
    pair = socket.socketpair()
    for end in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):  # above the system's limit: it works with less, only slower
                end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    return pair
