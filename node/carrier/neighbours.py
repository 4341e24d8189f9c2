"""The connections to both neighbours on the ring, made and authenticated before MLX sees them.

MLX accepts any first TCP connection to its port, and waits for it without limit. It therefore never sees a
port of the network. This module listens and connects, with deadlines, and drops callers that do not begin
with the link's pass.

Both ends derive the pass in the handshake. It only selects a connection: with a stolen pass an attacker on
the path can break the connection, as any attacker there can. The confirmation record after the pass
authenticates the link.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sealring.mesh.errors import EpochEnded, Unavailable
from sealring.node.carrier.ways import (
    HALF_PASS_BYTES,
    Measured,
    Probed,
    Way,
    configure,
    measure,
    probe_tag,
    received,
    widen,
)
from sealring.node.link.records import CONFIRMATION_BYTES

PASS_BYTES = 2 * HALF_PASS_BYTES
"""The caller sends the first half, the listener answers with the second."""

GUEST_SECONDS = 3.0
"""Timeout for a caller's greeting, and for the answer to the own greeting."""

PROBE_SECONDS = 10.0
"""Time for a caller with the link's pass that measures one way after the other."""

MAX_GUESTS = 64
_GREETING_BYTES = HALF_PASS_BYTES + CONFIRMATION_BYTES
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Connections:
    """The confirmed connections to the next member, over `way`, and from the previous one."""

    outgoing: socket.socket
    incoming: socket.socket
    way: Measured | None = None


def listen(host: str, backlog: int) -> socket.socket:
    """A socket that listens at a free port of `host`, an IPv4 address or name. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        widen(listener)
        listener.bind((host, 0))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def meet(
    listener: socket.socket,
    ways: Sequence[Way],
    *,
    confirmation: bytes,
    outgoing_pass: bytes,
    incoming_pass: bytes,
    open_confirmation: Callable[[bytes], None],
    seconds: float,
) -> Connections:
    """Connects to the next member while waiting for the previous one; closes `listener` at the end.

    Of several `ways` it takes the fastest, and the next where that fails. `confirmation` is the sealed record
    for the next member, the same bytes in every attempt. `open_confirmation` receives the previous member's
    record, once.

    Raises EpochEnded (NO_CONFIRMATION), Unavailable (RING_FAILED), and what `open_confirmation` raises.
    """
    until = time.monotonic() + seconds
    call = _Call(ways, outgoing_pass, confirmation, until)
    calling = threading.Thread(target=call.run, name="call", daemon=True)
    calling.start()
    try:
        with listener:
            incoming = Reception(listener, incoming_pass, open_confirmation).run(until, calling.is_alive)
    finally:
        call.give_up()
    calling.join()
    if call.connection is None or call.way is None:
        raise Unavailable(
            "the next member does not accept the ring's connection",
            hint="check that members reach each other",
            reason="RING_FAILED",
        )
    return Connections(call.connection, incoming, call.way)


class _Call:
    """Connects to the next member until it answers; each attempt is a new connection."""

    def __init__(self, ways: Sequence[Way], link_pass: bytes, confirmation: bytes, until: float) -> None:
        self.connection: socket.socket | None = None
        self.way: Measured | None = None
        self._ways = ways
        self._tag = probe_tag(link_pass)
        self._greeting = link_pass[:HALF_PASS_BYTES] + confirmation
        self._answer = link_pass[HALF_PASS_BYTES:]
        self._until = until

    def give_up(self) -> None:
        self._until = min(self._until, time.monotonic())

    def run(self) -> None:
        pause = _FIRST_PAUSE
        while time.monotonic() < self._until:
            for measured in self._ordered():
                with contextlib.suppress(OSError):
                    self.connection, self.way = self._attempt(measured.way), measured
                    return
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)

    def _ordered(self) -> Sequence[Measured]:
        if len(self._ways) == 1:
            return [Measured(self._ways[0])]
        return measure(self._ways, self._tag, lambda: self._until)

    def _attempt(self, way: Way) -> socket.socket:
        patience = max(_LOOK_SECONDS, min(GUEST_SECONDS, self._until - time.monotonic()))
        connection = way.connect(patience)
        try:
            connection.sendall(self._greeting)
            if not hmac.compare_digest(received(connection, HALF_PASS_BYTES), self._answer):
                raise ConnectionError
            return connection
        except OSError:
            connection.close()
            raise


@dataclass
class _Guest:
    connection: socket.socket
    until: float
    said: bytearray = field(default_factory=bytearray)
    probe: Probed | None = None


class Reception:
    """Accepts callers, each for a few seconds, and keeps the one with the pass."""

    def __init__(
        self, listener: socket.socket, link_pass: bytes, open_confirmation: Callable[[bytes], None]
    ) -> None:
        self._listener = listener
        self._pass, self._answer = link_pass[:HALF_PASS_BYTES], link_pass[HALF_PASS_BYTES:]
        self._tag = probe_tag(link_pass)
        self._open_confirmation = open_confirmation
        self._opened = b""
        self._neighbour: socket.socket | None = None
        self._guests: list[_Guest] = []
        self._selector = selectors.DefaultSelector()

    def run(self, until: float, more_to_come: Callable[[], bool]) -> socket.socket:
        """The connection of the previous member, once the own call has ended too.

        Until then the neighbour may call again, because the answer to it may have been lost.
        """
        self._serve(lambda: time.monotonic() < until and (self._neighbour is None or more_to_come()))
        if self._neighbour is None:
            raise EpochEnded("the previous member did not connect", reason="NO_CONFIRMATION")
        return self._neighbour

    def answer_probes(self, going: Callable[[], bool]) -> None:
        """Answers callers that measure for as long as `going` says, where nobody has the pass itself."""
        self._serve(going)

    def _serve(self, going: Callable[[], bool]) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        try:
            while going():
                for key, _ in self._selector.select(_LOOK_SECONDS):
                    self._accept() if key.data is None else self._listen_to(key.data)
                for guest in [one for one in self._guests if one.until <= time.monotonic()]:
                    self._dismiss(guest)
        finally:
            for guest in list(self._guests):
                self._dismiss(guest)
            self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            # The oldest guest goes first: many silent strangers must not keep the neighbour out.
            if len(self._guests) >= MAX_GUESTS:
                self._dismiss(self._guests[0])
            guest = _Guest(connection, time.monotonic() + GUEST_SECONDS)
            self._guests.append(guest)
            self._selector.register(connection, selectors.EVENT_READ, guest)

    def _dismiss(self, guest: _Guest, *, close: bool = True) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.connection)
        if close:
            guest.connection.close()

    def _listen_to(self, guest: _Guest) -> None:
        if guest.probe is not None:
            if not guest.probe.listen(guest.connection):
                self._dismiss(guest)
            return
        try:
            part = guest.connection.recv(_GREETING_BYTES - len(guest.said))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        guest.said += part
        if hmac.compare_digest(guest.said, self._tag):  # it sends nothing more before it is answered
            guest.probe, guest.until = Probed(), time.monotonic() + PROBE_SECONDS
            configure(guest.connection)
            if not guest.probe.answer(guest.connection):
                self._dismiss(guest)
            return
        # only a whole pass is compared: a part would show how much of a guess is right
        introduced = len(guest.said) >= HALF_PASS_BYTES
        if not part or (introduced and not hmac.compare_digest(guest.said[:HALF_PASS_BYTES], self._pass)):
            self._dismiss(guest)
        elif len(guest.said) == _GREETING_BYTES:
            self._welcome(guest)

    def _welcome(self, guest: _Guest) -> None:
        """Opens the record once. The same bytes again mean that the neighbour missed the answer."""
        record = bytes(guest.said[HALF_PASS_BYTES:])
        if not self._opened:
            self._open_confirmation(record)
            self._opened = record
        elif not hmac.compare_digest(record, self._opened):
            self._dismiss(guest)
            return
        connection = guest.connection
        self._dismiss(guest, close=False)
        try:
            configure(connection)
            connection.sendall(self._answer)
        except OSError:
            connection.close()
            return
        # The newest connection counts: a neighbour calls again only after giving up its last one.
        if self._neighbour is not None:
            self._neighbour.close()
        self._neighbour = connection
