"""Socket pairs between a daemon and its processes, with room for what is sent before it is read."""

from __future__ import annotations

import contextlib
import socket

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
