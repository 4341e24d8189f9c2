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
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network

from sealring.mesh.errors import EpochEnded, Unavailable
from sealring.node.link.records import CONFIRMATION_BYTES

HALF_PASS_BYTES = 32
PASS_BYTES = 2 * HALF_PASS_BYTES
"""The caller sends the first half, the listener answers with the second."""

GUEST_SECONDS = 3.0
"""Timeout for a caller's greeting, and for the answer to the own greeting."""

MAX_GUESTS = 64
SOCKET_BYTES = 4 << 20
"""Send and receive buffers on a Mac, as large as macOS makes them by itself at most (`autorcvbufmax` in xnu's
tcp_input.c). It begins with 128 KiB, so that each 128 KiB of a long record would wake both ends once."""

_GREETING_BYTES = HALF_PASS_BYTES + CONFIRMATION_BYTES
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Connections:
    """The confirmed connections to the next member and from the previous one."""

    outgoing: socket.socket
    incoming: socket.socket


def listen(host: str, backlog: int) -> socket.socket:
    """A socket that listens at a free port of `host`, an IPv4 address or name. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        _widen(listener)
        listener.bind((host, 0))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def meet(
    listener: socket.socket,
    next_address: tuple[str, int],
    *,
    confirmation: bytes,
    outgoing_pass: bytes,
    incoming_pass: bytes,
    open_confirmation: Callable[[bytes], None],
    seconds: float,
    network: IPv4Network | None = None,
) -> Connections:
    """Connects to the next member while waiting for the previous one; closes `listener` at the end.

    `confirmation` is the sealed record for the next member, the same bytes in every attempt.
    `open_confirmation` receives the previous member's record, once. `network` is that of the `listener`: a
    next member in it is called from the listener's address. Thus the ring uses its chosen interface also on a
    Mac with cables to several others in one network.

    Raises EpochEnded (NO_CONFIRMATION), Unavailable (RING_FAILED), and what `open_confirmation` raises.
    """
    until = time.monotonic() + seconds
    source = _source(listener.getsockname()[0], next_address[0], network)
    call = _Call(next_address, outgoing_pass, confirmation, until, source)
    calling = threading.Thread(target=call.run, name="call", daemon=True)
    calling.start()
    try:
        with listener:
            incoming = Reception(listener, incoming_pass, open_confirmation).run(until, calling.is_alive)
    finally:
        call.give_up()
    calling.join()
    if call.connection is None:
        raise Unavailable(
            "the next member does not accept the ring's connection",
            hint="check that members reach each other",
            reason="RING_FAILED",
        )
    return Connections(call.connection, incoming)


class _Call:
    """Connects to the next member until it answers; each attempt is a new connection."""

    def __init__(
        self,
        address: tuple[str, int],
        link_pass: bytes,
        confirmation: bytes,
        until: float,
        source: tuple[str, int] | None = None,
    ) -> None:
        self.connection: socket.socket | None = None
        self._address, self._source = address, source
        self._greeting = link_pass[:HALF_PASS_BYTES] + confirmation
        self._answer = link_pass[HALF_PASS_BYTES:]
        self._until = until

    def give_up(self) -> None:
        self._until = min(self._until, time.monotonic())

    def run(self) -> None:
        pause = _FIRST_PAUSE
        while self.connection is None and time.monotonic() < self._until:
            with contextlib.suppress(OSError):
                self.connection = self._attempt()
                return
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)

    def _attempt(self) -> socket.socket:
        patience = max(_LOOK_SECONDS, min(GUEST_SECONDS, self._until - time.monotonic()))
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            _widen(connection)
            connection.settimeout(patience)
            if self._source is not None:
                connection.bind(self._source)
            connection.connect(self._address)
            _configure(connection)
            connection.sendall(self._greeting)
            answer = b""
            while len(answer) < HALF_PASS_BYTES:
                part = connection.recv(HALF_PASS_BYTES - len(answer))
                if not part:
                    raise ConnectionError
                answer += part
            if not hmac.compare_digest(answer, self._answer):
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


class Reception:
    """Accepts callers, each for a few seconds, and keeps the one with the pass."""

    def __init__(
        self, listener: socket.socket, link_pass: bytes, open_confirmation: Callable[[bytes], None]
    ) -> None:
        self._listener = listener
        self._pass, self._answer = link_pass[:HALF_PASS_BYTES], link_pass[HALF_PASS_BYTES:]
        self._open_confirmation = open_confirmation
        self._opened = b""
        self._neighbour: socket.socket | None = None
        self._guests: list[_Guest] = []
        self._selector = selectors.DefaultSelector()

    def run(self, until: float, more_to_come: Callable[[], bool]) -> socket.socket:
        """The connection of the previous member, once the own call has ended too.

        Until then the neighbour may call again, because the answer to it may have been lost.
        """
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        try:
            while self._neighbour is None or more_to_come():
                if time.monotonic() >= until:
                    break
                for key, _ in self._selector.select(_LOOK_SECONDS):
                    self._accept() if key.data is None else self._listen_to(key.data)
                for guest in [one for one in self._guests if one.until <= time.monotonic()]:
                    self._dismiss(guest)
        finally:
            for guest in list(self._guests):
                self._dismiss(guest)
            self._selector.close()
        if self._neighbour is None:
            raise EpochEnded("the previous member did not connect", reason="NO_CONFIRMATION")
        return self._neighbour

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
        try:
            part = guest.connection.recv(_GREETING_BYTES - len(guest.said))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        guest.said += part
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
            _configure(connection)
            connection.sendall(self._answer)
        except OSError:
            connection.close()
            return
        # The newest connection counts: a neighbour calls again only after giving up its last one.
        if self._neighbour is not None:
            self._neighbour.close()
        self._neighbour = connection


def _source(own: str, other: str, network: IPv4Network | None) -> tuple[str, int] | None:
    """The source address for a call to `other`; None leaves it to the routing table."""
    try:
        return (own, 0) if network is not None and IPv4Address(other) in network else None
    except ValueError:  # a name
        return None


def _configure(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _widen(unconnected: socket.socket) -> None:
    """Gives a connection's future socket, or the listener that it comes from, room for a long record.

    Before it listens or connects, because the window's scale is agreed upon then (RFC 7323, section 2.2).
    Linux lets buffers grow further by itself, but not those that were set.
    """
    if sys.platform == "darwin":
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):  # above kern.ipc.maxsockbuf
                unconnected.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
