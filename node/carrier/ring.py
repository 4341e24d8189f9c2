"""The MLX ring group of one epoch, as a byte pipe to the next member and from the previous one.

MLX forms its group over two connections inside this machine, which lead nowhere. Then the connections to the
neighbours, made and confirmed by `node/carrier/neighbours.py`, replace them under the same descriptors.

MLX puts only the bytes themselves on its connections, so records are written and read here, without MLX
(docs/decisions/0009-records-without-mlx.md). Its two threads for each direction take longer to wake up than
the record of a decode step takes to travel, and on a Mac its buffers are the GPU's. A process cannot leave
the group; it ends with it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import stat
import struct
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx

from sealring.mesh.errors import EpochEnded, Unavailable
from sealring.mesh.system.addresses import free_port
from sealring.node.carrier.neighbours import Connections
from sealring.node.wire.arena import SLOT_BYTES
from sealring.node.wire.waiting import Rhythm, polled

_LOOPBACK = "127.0.0.1"
_PREVIOUS, _OWN, _NEXT = range(3)
"""Ranks in MLX's group: each member is in the middle of three, whatever the size of the ring."""

_BYTES_RECEIVED = struct.Struct("=128xQ")
"""`tcpi_bytes_received` of Linux's struct tcp_info."""

_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)

_DARWIN_CONNECTION_INFO = 0x106
_DARWIN_BYTES_RECEIVED = struct.Struct("=88xQ")
"""`tcpi_rxbytes` of macOS's struct tcp_connection_info (netinet/tcp.h), option TCP_CONNECTION_INFO."""


class RingGroup:
    """Point-to-point bytes along the ring. One thread may send while another receives."""

    def __init__(self, connections: Connections, knock: Callable[[int], None]) -> None:
        """Takes over the connections. MLX holds the interpreter and waits without limit for a connection to
        the loopback port that `knock` receives. Another process must connect; otherwise the caller's
        watchdog ends this one.

        Raises Unavailable (RING_FAILED).
        """
        self._group = _form(connections, knock)
        self._incoming, self._outgoing = connections.incoming, connections.outgoing
        self._received, self._to_send = _record_buffer(), _record_buffer()
        self._rhythm = Rhythm()

    @property
    def incoming(self) -> socket.socket:
        """The connection from the previous member, for `select.poll`."""
        return self._incoming

    def send_buffer(self, length: int) -> memoryview:
        """Writable memory that the next `send(length)` sends."""
        return self._to_send[:length]

    def send(self, length: int) -> None:
        """Sends `length` bytes of the buffer; returns when the kernel has them all. Raises EpochEnded."""
        rest = self._to_send[:length]
        while rest:
            try:
                rest = rest[self._outgoing.send(rest) :]
            except BlockingIOError:
                _until(self._outgoing, select.POLLOUT)
            except OSError:
                raise _lost() from None

    def receive(self, length: int) -> memoryview:
        """`length` bytes from the previous member, valid until the next call. Raises EpochEnded."""
        whole = rest = self._received[:length]
        while rest:
            try:
                count = self._incoming.recv_into(rest)
            except BlockingIOError:
                _until(self._incoming, select.POLLIN)
                continue
            except OSError:
                raise _lost() from None
            if not count:
                raise _lost()
            rest = rest[count:]
        return whole

    def bytes_received(self) -> int | None:
        """Bytes received from the previous member in all; None if the system does not show them."""
        return bytes_received(self._incoming)

    def wait_readable(self, timeout: float | None, *others: int) -> set[int]:
        """Waits for bytes from the previous member or on other descriptors; the descriptors that are ready.
        Bytes for which it waits alone are those of an announced record, which may be due.

        Raises EpochEnded when the previous member has closed its end and nothing is left to read.
        """
        poll = select.poll()
        for descriptor in (self._incoming.fileno(), *others):
            poll.register(descriptor, select.POLLIN)
        sleep = partial(polled, poll)
        ready = {each for each, _ in (sleep(timeout) if others else self._rhythm.wait(sleep, timeout))}
        if self._incoming.fileno() in ready:
            # Readable with nothing to read means that the other end has closed.
            try:
                if not self._incoming.recv(1, _LOOK):
                    raise _lost()
            except BlockingIOError:
                ready.discard(self._incoming.fileno())
            except OSError:
                raise _lost() from None
        return ready


def _record_buffer() -> memoryview:
    """Memory for the longest record; its pages are taken when they are first written."""
    return memoryview(mmap.mmap(-1, SLOT_BYTES))


def bytes_received(connection: socket.socket) -> int | None:
    """Payload bytes that a TCP connection has received in all; None if the system does not show them."""
    option, layout = _DARWIN_CONNECTION_INFO, _DARWIN_BYTES_RECEIVED
    if hasattr(socket, "TCP_INFO"):
        option, layout = socket.TCP_INFO, _BYTES_RECEIVED
    try:
        return int(layout.unpack(connection.getsockopt(socket.IPPROTO_TCP, option, layout.size))[0])
    except (OSError, struct.error):
        return None


def _until(connection: socket.socket, event: int) -> None:
    poll = select.poll()
    poll.register(connection.fileno(), event)
    poll.poll()


def _form(connections: Connections, knock: Callable[[int], None]) -> mx.distributed.Group:
    before = _descriptors()
    with socket.create_server((_LOOPBACK, 0)) as decoy, _reserved_port() as own:
        own_address, decoy_address = own.getsockname(), decoy.getsockname()
        knock(own_address[1])
        group = _init(f"{_LOOPBACK}:{own_address[1]}", f"{_LOOPBACK}:{decoy_address[1]}")
        to_next, from_previous = [], []
        for descriptor in _descriptors() - before - {decoy.fileno(), own.fileno()}:
            if not is_socket(descriptor):
                continue  # macOS ends a process that duplicates a guarded descriptor
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as made:
                if made.getpeername() == decoy_address:
                    to_next.append(descriptor)
                elif made.getsockname() == own_address:
                    from_previous.append(descriptor)
        if len(to_next) != 1 or len(from_previous) != 1:
            raise Unavailable("the connections of the ring's group were not found", reason="RING_FAILED")
        _replace(to_next[0], connections.outgoing)
        _replace(from_previous[0], connections.incoming)
    return group


def _init(own_address: str, next_address: str) -> mx.distributed.Group:
    addresses = {_PREVIOUS: f"{_LOOPBACK}:1", _OWN: own_address, _NEXT: next_address}  # the first is not used
    with tempfile.TemporaryDirectory(prefix="sealring-") as folder:
        hostfile = Path(folder, "hosts.json")
        hostfile.write_text(json.dumps([[addresses[rank]] for rank in sorted(addresses)]))
        os.environ["MLX_RANK"], os.environ["MLX_HOSTFILE"] = str(_OWN), str(hostfile)
        try:
            return mx.distributed.init(strict=True, backend="ring")
        except (RuntimeError, ValueError):
            raise Unavailable("the ring could not be formed", reason="RING_FAILED") from None


def _reserved_port() -> socket.socket:
    """A bound loopback port that MLX can share, since it sets SO_REUSEPORT."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        holder.setsockopt(socket.SOL_SOCKET, option, 1)
    holder.bind((_LOOPBACK, free_port(_LOOPBACK)))
    return holder


def _replace(descriptor: int, connection: socket.socket) -> None:
    """Puts another connection under MLX's descriptor. MLX polls, so the connection must not block."""
    connection.setblocking(False)
    os.dup2(connection.fileno(), descriptor, inheritable=False)


def _descriptors() -> set[int]:
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return {int(name) for name in os.listdir(folder)}


def is_socket(descriptor: int) -> bool:
    """Whether an open descriptor is a socket."""
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:  # the descriptor of the listing itself, closed by now
        return False


def _lost() -> EpochEnded:
    return EpochEnded("the connection to a neighbour on the ring was lost", reason="PEER_LOST")
