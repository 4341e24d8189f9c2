"""The ways to the next member of a ring, measured: each of its addresses, from each own address beside it.

A Mac has Thunderbolt, Ethernet and Wi-Fi at once, and its routes prefer one of them without knowing which is
fast. So the caller measures each way when an epoch forms, over connections like the ring's own: the time of
an empty round trip, and the rate of blocks that grow until one takes long enough. Only a caller with the
link's pass is answered, and nothing but zeros travels.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_WAYS = 16
HALF_PASS_BYTES = TAG_BYTES = 32
SOCKET_BYTES = 4 << 20
"""Send and receive buffers on a Mac, as large as macOS makes them by itself at most (`autorcvbufmax` in xnu's
tcp_input.c). It begins with 128 KiB, so that each 128 KiB of a long record would wake both ends once."""

_BLOCKS = (1 << 16, 1 << 19, 1 << 22)
_LONG_SECONDS = 0.05
"""A block that takes this long has measured its way: a round trip and a wake-up are a small part of it."""

_BLOCK_SECONDS = 1.0
_OTHERS_SECONDS = 0.5
"""How long the other ways may take to answer at all once one has."""

_PINGS = 5
_ROUNDS, _NEAR = 3, 4.0
_RECORD_BYTES = 1 << 18
"""Ways are compared by the time of a record of this length, between a step's (a few KiB a row) and a
prompt's chunk (MiB)."""

_MOST_BYTES = 32 << 20
_LENGTH = struct.Struct(">I")
_ACK = b"\x06"


@dataclass(frozen=True)
class Way:
    """The next member's address, and the own address to call from; "" leaves that to the routing table.

    From its own address a call uses the chosen interface also on a Mac with cables to several others in one
    network.
    """

    address: tuple[str, int]
    source: str = ""

    def connect(self, seconds: float) -> socket.socket:
        """A connection with that time limit for each of its calls. Raises OSError."""
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            widen(connection)
            connection.settimeout(seconds)
            if self.source:
                connection.bind((self.source, 0))
            connection.connect(self.address)
            configure(connection)
        except OSError:
            connection.close()
            raise
        return connection


@dataclass(frozen=True)
class Measured:
    """A way with the seconds of its empty round trip and its bytes a second; 0 where they are unknown."""

    way: Way
    round_trip: float = 0.0
    rate: float = 0.0

    @property
    def seconds(self) -> float:
        """The time of one record, for comparison."""
        return self.round_trip / 2 + (_RECORD_BYTES / self.rate if self.rate else _BLOCK_SECONDS)


def probe_tag(link_pass: bytes) -> bytes:
    """How a caller begins that only measures: only the two ends of the link can compute it."""
    return hashlib.sha256(b"sealring/v1 ring probe\x00" + link_pass[:HALF_PASS_BYTES]).digest()


def measure(ways: Sequence[Way], tag: bytes, until: Callable[[], float]) -> list[Measured]:
    """The ways that answer, the fastest first. Waits for the first one until the monotonic time of `until`.

    They are asked at once, and measured one after the other, since some may share a cable.
    """
    answers: queue.Queue[tuple[Way, socket.socket] | None] = queue.Queue()
    over = threading.Event()

    def ask(way: Way) -> None:
        try:
            connection = way.connect(max(_OTHERS_SECONDS, min(_BLOCK_SECONDS, until() - time.monotonic())))
        except OSError:
            answers.put(None)
            return
        try:
            connection.sendall(tag)
            connection.settimeout(max(_OTHERS_SECONDS, until() - time.monotonic()))
            _acknowledged(connection)  # once its carrier waits for this one's
            connection.settimeout(_BLOCK_SECONDS)
        except OSError:
            connection.close()
            answers.put(None)
            return
        if over.is_set():
            connection.close()
        else:
            answers.put((way, connection))

    for way in ways[:MAX_WAYS]:
        threading.Thread(target=ask, args=(way,), name="ask", daemon=True).start()
    found: list[tuple[Way, socket.socket]] = []
    deadline = until()
    for _ in ways[:MAX_WAYS]:
        with contextlib.suppress(queue.Empty):
            answer = answers.get(timeout=max(0.0, min(deadline, until()) - time.monotonic()))
            if answer is not None:
                deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS) if not found else deadline
                found.append(answer)
    over.set()
    with contextlib.ExitStack() as stack:
        for _, connection in found:
            stack.enter_context(connection)
        return _compared(found, until)


def _compared(found: Sequence[tuple[Way, socket.socket]], until: Callable[[], float]) -> list[Measured]:
    """The fastest first. Those that come near it are measured again, and count by their best: whatever else a
    machine does makes a way look slower, and none faster. Each is measured once, whatever `until` says."""
    best: dict[Way, Measured] = {}
    left = dict(found)
    for _ in range(_ROUNDS):
        for way, connection in list(left.items()):
            try:
                now = _measured(way, connection)
            except OSError:  # it does not answer any more
                best.pop(way, None)
                del left[way]
                continue
            if connection.fileno() < 0:
                del left[way]
            before = best.get(way, now)
            best[way] = Measured(way, min(before.round_trip, now.round_trip), max(before.rate, now.rate))
        first = min((one.seconds for one in best.values()), default=0.0)
        left = {way: one for way, one in left.items() if best[way].seconds <= _NEAR * first}
        if len(left) < 2 or time.monotonic() >= until():
            break
    return sorted(best.values(), key=lambda one: one.seconds)


def _measured(way: Way, connection: socket.socket) -> Measured:
    """Raises OSError where it does not answer any more."""
    round_trip = min(_timed(connection, 0) for _ in range(_PINGS))
    rate = 0.0
    for size in _BLOCKS:
        try:
            took = _timed(connection, size)
        except TimeoutError:  # slower than that, and the rest of the block is still under way
            connection.close()
            return Measured(way, round_trip, rate or size / _BLOCK_SECONDS)
        rate = size / max(took - round_trip, 1e-6)
        if took >= _LONG_SECONDS:
            break
    return Measured(way, round_trip, rate)


def _timed(connection: socket.socket, size: int) -> float:
    begun = time.perf_counter()
    connection.sendall(_LENGTH.pack(size) + bytes(size))
    _acknowledged(connection)
    return time.perf_counter() - begun


def _acknowledged(connection: socket.socket) -> None:
    if received(connection, len(_ACK)) != _ACK:
        raise ConnectionError


class Probed:
    """The other end: it takes blocks and acknowledges each, up to 32 MiB in all."""

    def __init__(self) -> None:
        self._header = b""
        self._left = 0
        self._total = 0

    def listen(self, connection: socket.socket) -> bool:
        """Takes what has arrived on a connection that does not block. False once it is over."""
        try:
            wanted = min(self._left, 1 << 18) if self._left else _LENGTH.size - len(self._header)
            part = connection.recv(wanted)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not part:
            return False
        if self._left:
            self._left -= len(part)
            return self._left > 0 or self.answer(connection)
        self._header += part
        if len(self._header) < _LENGTH.size:
            return True
        (self._left,), self._header = _LENGTH.unpack(self._header), b""
        self._total += self._left
        if self._total > _MOST_BYTES:
            return False
        return self._left > 0 or self.answer(connection)

    def answer(self, connection: socket.socket) -> bool:
        """Acknowledges what was taken. False if the caller does not read."""
        try:
            return connection.send(_ACK) == len(_ACK)
        except OSError:
            return False


def received(connection: socket.socket, size: int) -> bytes:
    """The next `size` bytes. Raises OSError, also at the end of the stream."""
    said = b""
    while len(said) < size:
        part = connection.recv(size - len(said))
        if not part:
            raise ConnectionError
        said += part
    return said


def configure(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def widen(unconnected: socket.socket) -> None:
    """Gives a connection's future socket, or the listener that it comes from, room for a long record.

    Before it listens or connects, because the window's scale is agreed upon then (RFC 7323, section 2.2).
    Linux lets buffers grow further by itself, but not those that were set.
    """
    if sys.platform == "darwin":
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):  # above kern.ipc.maxsockbuf
                unconnected.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
