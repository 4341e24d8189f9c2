"""The data channel between an engine and the carrier of one epoch: two sockets and two arenas.

Payloads travel through shared memory; fixed-size messages over the sockets name their slots. Each direction
is a queue. The engine announces every incoming record (`expect`): the carrier receives only announced records
and opens each against its announced header.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

from sealring.mesh.errors import EpochEnded, InvalidInput
from sealring.node.wire.arena import SLOTS, Arena, create_arena
from sealring.node.wire.frames import socket_pair
from sealring.node.wire.waiting import Rhythm, polled

MAX_RECORD_BYTES = 16 << 20


class Kind(enum.IntEnum):
    """Content of a record."""

    CONFIRM = 1
    ACTIVATIONS = 2
    TOKENS = 3
    SAMPLING = 4
    CONTROL = 5
    CACHES = 6
    """Keys, values and states of layers that are doubled at a border."""

    __hash__ = int.__hash__


class RecordHeader(NamedTuple):
    """Properties of a record that both ends derive. They are authenticated and never sent.

    `step` is the step's number, `digest` the composition digest (32 bytes), `dtype` a short ASCII name,
    `shape` at most 8 dimensions, `length` the plaintext's length in bytes (at most 16 MiB).
    """

    kind: Kind
    step: int
    digest: bytes
    dtype: str
    shape: tuple[int, ...]
    length: int


MAX_DIMENSIONS = 4
_MESSAGE = struct.Struct(">BQ32s12sB4IiI")
_RELEASE = struct.Struct(">i")
MESSAGE_BYTES = _MESSAGE.size
_READ_BYTES = 64 * MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class ChannelEnds:
    """Descriptors for the two processes: outgoing socket, incoming socket, outgoing and incoming arena."""

    engine: tuple[int, int, int, int]
    carrier: tuple[int, int, int, int]

    def close(self) -> None:
        for descriptor in (*self.engine, *self.carrier):
            os.close(descriptor)


def create_channel() -> ChannelEnds:
    """Both ends of a new data channel; the caller passes them on and then closes its own copies.

    Raises ResourceExhausted (NO_SHARED_MEMORY) or OSError, and leaves nothing open then.
    """
    with contextlib.ExitStack() as undo:

        def keep(descriptor: int) -> int:
            undo.callback(os.close, descriptor)
            return descriptor

        outgoing = [keep(end.detach()) for end in socket_pair()]
        incoming = [keep(end.detach()) for end in socket_pair()]
        arenas = keep(create_arena()), keep(create_arena())
        ends = ChannelEnds(
            engine=(outgoing[0], incoming[0], *arenas),
            carrier=(outgoing[1], incoming[1], keep(os.dup(arenas[0])), keep(os.dup(arenas[1]))),
        )
        undo.pop_all()
    return ends


def encode_message(header: RecordHeader, slot: int) -> bytes:
    dimensions = len(header.shape)
    if dimensions > MAX_DIMENSIONS:
        raise InvalidInput(f"a record has {dimensions} dimensions", reason="BAD_RECORD")
    shape = (*header.shape, *([0] * (MAX_DIMENSIONS - dimensions)))
    return _MESSAGE.pack(
        header.kind,
        header.step,
        header.digest,
        header.dtype.encode(),
        dimensions,
        *shape,
        slot,
        header.length,
    )


def decode_message(message: bytes) -> tuple[RecordHeader, int]:
    """Raises InvalidInput (BAD_RECORD)."""
    kind, step, digest, dtype, dimensions, *rest = _MESSAGE.unpack(message)
    shape, slot, length = tuple(rest[:dimensions]), rest[4], rest[5]
    try:
        header = RecordHeader(Kind(kind), step, digest, dtype.rstrip(b"\0").decode("ascii"), shape, length)
    except ValueError:
        raise InvalidInput("a message of the data channel is malformed", reason="BAD_RECORD") from None
    return header, slot


def split(header: RecordHeader) -> Iterator[RecordHeader]:
    """The headers of the records for one payload: its own, or those of parts of at most MAX_RECORD_BYTES."""
    if header.length <= MAX_RECORD_BYTES:
        yield header
        return
    for start in range(0, header.length, MAX_RECORD_BYTES):
        length = min(MAX_RECORD_BYTES, header.length - start)
        yield header._replace(dtype="uint8", shape=(length,), length=length)


def lay_out(buffers: Iterable[memoryview | bytes], target: memoryview) -> None:
    """Copies the buffers, each contiguous, into `target` one after another.

    Raises InvalidInput (BAD_RECORD) unless they are as long as `target` in all.
    """
    flat = [memoryview(buffer).cast("B") for buffer in buffers]
    if sum(map(len, flat)) != len(target):
        raise InvalidInput("a record's payload is not of its announced length", reason="BAD_RECORD")
    start = 0
    for part in flat:
        target[start : start + len(part)] = part
        start += len(part)


class MessageSocket:
    """Fixed-size messages over one blocking socket, of which one thread reads."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self.socket.setblocking(True)
        self._size = size
        self._unread = b""
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._rhythm = Rhythm()

    def send(self, message: bytes) -> None:
        """Raises EpochEnded when the other process is gone."""
        try:
            self.socket.sendall(message)
        except OSError:
            raise _ended() from None

    def send_some(self, data: bytes | bytearray) -> int:
        """Sends without waiting, and returns the number of bytes sent. Raises EpochEnded as `send`."""
        try:
            return self.socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            raise _ended() from None

    def wait_for_room(self) -> None:
        """Returns when the socket has room, or is closed."""
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        poll.poll()

    def receive(self, timeout: float | None = None) -> bytes:
        """Waits for one message. Raises EpochEnded when the other process is gone or on `shut`, and
        TimeoutError if no byte arrives within `timeout` seconds."""
        if len(self._unread) < self._size and not self._rhythm.wait(self._read, timeout):
            raise TimeoutError
        while len(self._unread) < self._size:
            self._read(None)
        message, self._unread = self._unread[: self._size], self._unread[self._size :]
        return message

    def ready(self) -> bool:
        """Whether a message is there."""
        return len(self._unread) >= self._size or (self._read(0) and len(self._unread) >= self._size)

    def _read(self, seconds: float | None) -> bool:
        """Takes in all that is there, or comes first within some seconds; None waits for ever. Whether
        something has come."""
        if seconds and not polled(self._poll, seconds):
            return False
        try:
            part = self.socket.recv(_READ_BYTES, 0 if seconds is None else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            raise _ended() from None
        if not part:
            raise _ended()
        self._unread += part
        return True

    def shut(self) -> None:
        """Wakes a waiting `receive`."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self.socket.close()


class Announcements:
    """Messages of several threads on one socket, in order. `put` never waits for the other end to read.

    A carrier reads announcements between two records, which takes long behind a slow neighbour. Threads that
    announce records or release slots must go on meanwhile. The thread that sends the backlog starts at once:
    a process without memory could not start it later (`Thread.start` never returns then).
    """

    def __init__(self, messages: MessageSocket) -> None:
        self._messages = messages
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._more = threading.Event()
        self._closed = False
        self._sender = threading.Thread(target=self._run, name="announcements", daemon=True)
        self._sender.start()

    def put(self, message: bytes, *, hold: bool = False) -> None:
        """Sends a message now, or as soon as the socket has room. Raises EpochEnded.

        With `hold` a message for which nothing waits is sent with the next one, which wakes the carrier once
        for both. At most one is held.
        """
        with self._lock:
            held = bool(self._unsent)
            self._unsent += message
            if not (self._more.is_set() or (hold and not held) or self._flush()):
                self._more.set()

    def close(self) -> None:
        """Ends the sending thread; `shut` the socket first."""
        self._closed = True
        self._more.set()
        self._sender.join()

    def _flush(self) -> bool:
        """Sends without waiting; whether the backlog is empty now. Call it with the lock held."""
        while self._unsent:
            count = self._messages.send_some(self._unsent)
            if not count:
                return False
            del self._unsent[:count]
        return True

    def _run(self) -> None:
        """Sends the backlog. It waits for room without the lock, until the socket is closed."""
        while not self._closed:
            self._more.wait()
            self._messages.wait_for_room()
            with self._lock:
                try:
                    if not self._flush():
                        continue
                except EpochEnded:  # the next `put` and `receive` raise it too
                    pass
                self._more.clear()


@dataclass(slots=True)
class Received:
    """One record that the carrier has opened. `data` is valid until `release`."""

    header: RecordHeader
    data: memoryview
    _channel: EngineChannel | None
    _slot: int

    def release(self) -> None:
        """Gives the slot back; must be called once for every record."""
        channel, self._channel = self._channel, None
        self.data.release()
        if channel is not None:
            channel.free_incoming(self._slot)


class EngineChannel:
    """The engine's end. `send`, `expect` and `receive` may be called from three different threads."""

    def __init__(
        self, outgoing_socket: int, incoming_socket: int, outgoing_arena: int, incoming_arena: int
    ) -> None:
        self._outgoing = MessageSocket(outgoing_socket, _RELEASE.size)
        self._incoming = MessageSocket(incoming_socket, MESSAGE_BYTES)
        self._outgoing_arena = Arena(outgoing_arena)
        self._incoming_arena = Arena(incoming_arena)
        self._free = list(reversed(range(SLOTS)))
        self._expected: deque[RecordHeader] = deque()
        self._send_lock = threading.Lock()
        self._announcements = Announcements(self._incoming)
        self._expect_lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, header: RecordHeader, *buffers: memoryview | bytes) -> None:
        """Copies the payload (`buffers` one after another, `header.length` bytes in all) out to the carrier.

        Waits while all slots are in use. Raises EpochEnded when the carrier is gone.
        """
        with self._send_lock:
            if header.length <= MAX_RECORD_BYTES:
                self._send_one(header, buffers)
                return
            whole = memoryview(b"".join(buffers))
            start = 0
            for part in split(header):
                self._send_one(part, (whole[start : start + part.length],))
                start += part.length

    def _send_one(self, header: RecordHeader, buffers: tuple[memoryview | bytes, ...]) -> None:
        slot = self._take_slot()
        with self._outgoing_arena.slot(slot, header.length) as target:
            lay_out(buffers, target)
        self._outgoing.send(encode_message(header, slot))

    def _take_slot(self) -> int:
        while self._outgoing.ready() or not self._free:
            (released,) = _RELEASE.unpack(self._outgoing.receive())
            self._free.append(released)
            self._free.sort(reverse=True)
        return self._free.pop()

    def expect(self, header: RecordHeader) -> None:
        """Announces the next record of the incoming link, without waiting for the carrier.

        Raises EpochEnded when the carrier is gone.
        """
        with self._expect_lock:
            self._expected.append(header)
            self._announcements.put(b"".join(encode_message(part, -1) for part in split(header)))

    def receive(self, timeout: float | None = None) -> Received:
        """The next expected record, opened.

        Raises EpochEnded when the carrier is gone or on `shut`, TimeoutError when none comes.
        """
        message = self._incoming.receive(timeout)
        wanted = self._expected.popleft()
        header, slot = decode_message(message)
        data = self._incoming_arena.slot(slot, header.length)
        if header == wanted:
            return Received(header, data, self, slot)
        return self._receive_parts(wanted, header, slot, data)

    def _receive_parts(
        self, wanted: RecordHeader, header: RecordHeader, slot: int, data: memoryview
    ) -> Received:
        whole = bytearray()
        parts = list(split(wanted))
        for number, part in enumerate(parts):
            if number:
                header, slot = decode_message(self._incoming.receive())
                data = self._incoming_arena.slot(slot, header.length)
            if header != part:
                raise InvalidInput("a record arrived that was not expected", reason="BAD_RECORD")
            whole += data
            data.release()
            self.free_incoming(slot)
        return Received(wanted, memoryview(whole), None, -1)

    def free_incoming(self, slot: int) -> None:
        """Gives a slot back, with the next announcement or the next slot: the carrier has others."""
        self._announcements.put(encode_message(_NOTHING, slot), hold=True)

    def shut(self) -> None:
        """Wakes every waiting call, which then raises EpochEnded. May be called from any thread."""
        self._outgoing.shut()
        self._incoming.shut()

    def close(self) -> None:
        self.shut()
        self._announcements.close()
        self._outgoing.close()
        self._incoming.close()
        self._outgoing_arena.close()
        self._incoming_arena.close()


class CarrierChannel:
    """The carrier's end: one thread takes outgoing records, another delivers incoming ones."""

    def __init__(
        self, outgoing_socket: int, incoming_socket: int, outgoing_arena: int, incoming_arena: int
    ) -> None:
        self._outgoing = MessageSocket(outgoing_socket, MESSAGE_BYTES)
        self._incoming = MessageSocket(incoming_socket, MESSAGE_BYTES)
        self._outgoing_arena = Arena(outgoing_arena)
        self._incoming_arena = Arena(incoming_arena)
        self._free = list(reversed(range(SLOTS)))
        self._expected: deque[RecordHeader] = deque()

    @property
    def incoming_descriptor(self) -> int:
        return self._incoming.socket.fileno()

    def next_outgoing(self) -> tuple[RecordHeader, memoryview, int]:
        """Waits for a payload to seal: header, plaintext (valid until `sent`), slot."""
        header, slot = decode_message(self._outgoing.receive())
        return header, self._outgoing_arena.slot(slot, header.length), slot

    def sent(self, slot: int, data: memoryview) -> None:
        data.release()
        self._outgoing.send(_RELEASE.pack(slot))

    def next_expected(self) -> RecordHeader:
        """Waits for the next announcement."""
        while not self._expected:
            self._read_incoming()
        return self._expected.popleft()

    def expects(self) -> bool:
        """Whether an announcement is there, without waiting."""
        while self._incoming.ready():
            self._read_incoming()
        return bool(self._expected)

    def free_slot(self, length: int) -> tuple[int, memoryview]:
        """Waits until the engine has released a slot."""
        while not self._free:
            self._read_incoming()
        slot = self._free.pop()
        return slot, self._incoming_arena.slot(slot, length)

    def deliver(self, header: RecordHeader, slot: int, data: memoryview) -> None:
        data.release()
        self._incoming.send(encode_message(header, slot))

    def shut(self) -> None:
        """Wakes every waiting call of both ends, which then raises EpochEnded."""
        self._outgoing.shut()
        self._incoming.shut()

    def close(self) -> None:
        self.shut()
        for part in (self._outgoing, self._incoming, self._outgoing_arena, self._incoming_arena):
            part.close()

    def _read_incoming(self) -> None:
        header, slot = decode_message(self._incoming.receive())
        if slot < 0:
            self._expected.append(header)
        else:
            self._free.append(slot)
            self._free.sort(reverse=True)


_NOTHING = RecordHeader(Kind.CONTROL, 0, bytes(32), "", (), 0)


def _ended() -> EpochEnded:
    return EpochEnded("the data channel was closed", hint="the epoch is over; a new one is formed")
