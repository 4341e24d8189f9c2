"""The two loops of a carrier: one seals and sends the engine's records, one receives and opens the ring's.

They start after the exchange of confirmation records. Every failure ends the epoch: no retry, no plaintext.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sealring.mesh.crypto.keys import TAG_BYTES
from sealring.node.carrier.ring import RingGroup
from sealring.node.link.keys import SessionKeys
from sealring.node.link.records import Link
from sealring.node.wire.channel import CarrierChannel, RecordHeader
from sealring.node.wire.timelog import TimeLog, now, process_trace, span
from sealring.v1 import trace_pb2


@dataclass(slots=True)
class Counters:
    """Records sealed, counted when their sending begins, and opened. Times are monotonic seconds, 0 for none.

    `sending_since` and `receiving_since` are the start of a record under way, `waiting_since` is the start of
    the wait for an announced record, and `heard_at` the time of the last bytes.
    """

    sealed: int = 0
    opened: int = 0
    sending_since: float = 0.0
    receiving_since: float = 0.0
    waiting_since: float = 0.0
    heard_at: float = 0.0

    def waiting_seconds(self) -> float:
        """Seconds without a byte of the announced record; 0 while none is announced."""
        since = self.waiting_since
        return time.monotonic() - max(since, self.heard_at) if since else 0.0


class Pump:
    """Moves records between one engine and one ring group. Loops end by raising EpochEnded or RecordError."""

    def __init__(self, group: RingGroup, channel: CarrierChannel, outgoing: Link, incoming: Link) -> None:
        self._group, self._channel = group, channel
        self._outgoing, self._incoming = outgoing, incoming
        self._sends, self._receives = TimeLog(5), TimeLog(5)
        self.counters = Counters()
        self._bytes_received = group.bytes_received()

    def install(self, keys: SessionKeys, *, outgoing: bool, at_step: int) -> None:
        """Prepares the next session of a link. Raises RecordError."""
        (self._outgoing if outgoing else self._incoming).install(keys, at_step)

    def needs_rekey(self, *, outgoing: bool) -> bool:
        """Whether a limit of the link's newest session is reached."""
        return (self._outgoing if outgoing else self._incoming).needs_rekey

    def trace(self, since: int) -> trace_pb2.ProcessTrace:
        """Activities since `since`, nanoseconds on the machine's monotonic clock. Any thread may call it."""
        spans, kept_from = [], []
        for log, activities in (
            (self._sends, (trace_pb2.ACTIVITY_SEAL, trace_pb2.ACTIVITY_SEND)),
            (self._receives, (trace_pb2.ACTIVITY_RECEIVE, trace_pb2.ACTIVITY_OPEN)),
        ):
            entries, lost = log.entries()
            for step, record, begun, between, ended in entries:
                if ended < since:
                    continue
                spans.append(span(activities[0], step, begun, between, record))
                spans.append(span(activities[1], step, between, ended, record))
            if lost:
                kept_from.append(entries[0][2])
        return process_trace(spans, since, kept_from)

    def send_loop(self) -> None:
        while True:
            header, data, slot = self._channel.next_outgoing()
            self._seal_and_send(header, data)
            self._channel.sent(slot, data)

    def receive_loop(self) -> None:
        while True:
            self._wait_for_announcement()
            header = self._channel.next_expected()
            slot, data = self._channel.free_slot(header.length)
            self.counters.waiting_since = time.monotonic()
            while self._group.incoming.fileno() not in self._group.wait_readable(None):
                pass
            self._receive_and_open(header, data)
            self._channel.deliver(header, slot, data)

    def note_progress(self) -> None:
        """Notes whether bytes have arrived since the last call; call it about every second."""
        received = self._group.bytes_received()
        if received != self._bytes_received:
            self._bytes_received = received
            self.counters.heard_at = time.monotonic()

    def _wait_for_announcement(self) -> None:
        """Returns when the engine has announced a record. Raises EpochEnded if the neighbour leaves first."""
        early = False
        while not self._channel.expects():
            if early:  # bytes arrived before their announcement: the engine will announce them in a moment
                return
            ready = self._group.wait_readable(None, self._channel.incoming_descriptor)
            early = self._group.incoming.fileno() in ready

    def _seal_and_send(self, header: RecordHeader, data: memoryview) -> None:
        length = header.length + TAG_BYTES
        begun = now()
        self._outgoing.sealer.seal_into(data, self._group.send_buffer(length), header)
        sealed = now()
        self.counters.sealed += 1
        self.counters.sending_since = time.monotonic()
        self._group.send(length)
        self.counters.sending_since = 0.0
        self._sends.add(header.step, self.counters.sealed, begun, sealed, now())

    def _receive_and_open(self, header: RecordHeader, out: memoryview) -> None:
        begun = now()
        self.counters.receiving_since = time.monotonic()
        if self._bytes_received is None:  # the system does not show how the rest arrives
            self.counters.waiting_since = 0.0
        ciphertext = self._group.receive(header.length + TAG_BYTES)
        self.counters.receiving_since = self.counters.waiting_since = 0.0
        received = now()
        self._incoming.opener.open_into(ciphertext, out, header)
        self.counters.opened += 1
        self._receives.add(header.step, self.counters.opened, begun, received, now())
