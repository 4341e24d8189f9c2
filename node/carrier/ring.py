"""The MLX ring group of one epoch, as a byte pipe to the next member and from the previous one.

A receive that MLX has begun can neither be given up nor timed out and burns a core while it waits, so none
is begun before the socket has data: the sockets of the group are found by their addresses after `init`,
and waited on with poll. The group cannot be left; the process ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

from mesh.addresses import parse_address
from mesh.errors import EpochEnded, Unavailable

_LAST_RANK_DELAY = 0.1  # seconds; the last rank connects first, and a refused connection costs MLX a second


class RingGroup:
    """Point-to-point bytes along the ring. One thread may send while another receives."""

    def __init__(self, rank: int, size: int, own_address: str, next_address: str) -> None:
        """Forms the group; waits without limit, so the caller's watchdog must end the process.

        Raises Unavailable when the next member cannot be reached.
        """
        self._rank, self._size = rank, size
        self._next, self._previous = (rank + 1) % size, (rank - 1) % size
        before = _socket_descriptors()
        self._group = _init(rank, size, own_address, next_address)
        self._incoming = _incoming_socket(before, parse_address(own_address)[1])
        self._send_buffers: dict[int, tuple[mx.array, memoryview]] = {}
        self._streams = threading.local()  # a stream can be used by the thread that made it only

    @property
    def incoming(self) -> socket.socket:
        """The connection from the previous member, for poll only."""
        return self._incoming

    def send_buffer(self, length: int) -> memoryview:
        """Writable memory that the next `send(length)` puts on the ring."""
        if length not in self._send_buffers:
            if len(self._send_buffers) >= 8:
                self._send_buffers.clear()
            array = mx.zeros((length,), dtype=mx.uint8)
            mx.eval(array)
            self._send_buffers[length] = (array, _bytes_of(array))
        return self._send_buffers[length][1]

    def send(self, length: int) -> None:
        """Sends the buffer of that length; returns when the kernel has all of it. Raises EpochEnded."""
        array = self._send_buffers[length][0]
        with _losses():
            mx.eval(mx.distributed.send(array, self._next, group=self._group, stream=self._stream()))

    def receive(self, length: int) -> memoryview:
        """`length` bytes from the previous member, which must have begun to send. Raises EpochEnded."""
        with _losses():
            array = mx.distributed.recv(
                (length,), mx.uint8, self._previous, group=self._group, stream=self._stream()
            )
            mx.eval(array)
        return _bytes_of(array)

    def wait_readable(self, timeout: float | None, *others: int) -> set[int]:
        """Waits for bytes from the previous member or on other descriptors; the descriptors that are ready.

        Raises EpochEnded when the previous member has closed its end and nothing is left to read.
        """
        poll = select.poll()
        for descriptor in (self._incoming.fileno(), *others):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(None if timeout is None else timeout * 1000)}
        if self._incoming.fileno() in ready:
            try:
                if not self._incoming.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    raise _lost()
            except BlockingIOError:
                ready.discard(self._incoming.fileno())
            except OSError:
                raise _lost() from None
        return ready

    def _stream(self) -> mx.Stream:
        stream: mx.Stream | None = getattr(self._streams, "own", None)
        if stream is None:
            stream = self._streams.own = mx.new_stream(mx.cpu)
        return stream


def _bytes_of(array: mx.array) -> memoryview:
    """The memory of an evaluated uint8 array itself, writable."""
    return np.array(array, copy=False).data.cast("B")


@contextlib.contextmanager
def _losses() -> Iterator[None]:
    """MLX's word for a lost peer as ours; any other error stays what it is."""
    try:
        yield
    except RuntimeError as error:
        if "peer was lost" in str(error):
            raise _lost() from None
        raise


def _init(rank: int, size: int, own_address: str, next_address: str) -> mx.distributed.Group:
    addresses = ["127.0.0.1:1"] * size  # entries of other ranks are never used
    addresses[rank], addresses[(rank + 1) % size] = own_address, next_address
    with tempfile.TemporaryDirectory(prefix="sealring-") as folder:
        hostfile = Path(folder, "hosts.json")
        hostfile.write_text(json.dumps([[address] for address in addresses]))
        os.environ["MLX_RANK"], os.environ["MLX_HOSTFILE"] = str(rank), str(hostfile)
        if rank == size - 1:
            time.sleep(_LAST_RANK_DELAY)
        try:
            return mx.distributed.init(strict=True, backend="ring")
        except (RuntimeError, ValueError):
            raise Unavailable(
                "the ring could not be formed",
                hint="check that members reach each other",
                reason="RING_FAILED",
            ) from None


def _socket_descriptors() -> set[int]:
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return {int(name) for name in os.listdir(folder)}


def _incoming_socket(before: set[int], own_port: int) -> socket.socket:
    """A duplicate of the group's accepted socket: the new connection whose local port is our own."""
    for descriptor in sorted(_socket_descriptors() - before):
        with contextlib.suppress(OSError):
            candidate = socket.socket(fileno=os.dup(descriptor))
            with contextlib.suppress(OSError):
                candidate.getpeername()
                if candidate.getsockname()[1] == own_port:
                    return candidate
            candidate.close()
    raise Unavailable("the ring has no connection from the previous member", reason="RING_FAILED")


def _lost() -> EpochEnded:
    return EpochEnded("the connection to a neighbour on the ring was lost", reason="PEER_LOST")
