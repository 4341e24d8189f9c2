"""A bound on the connections that one address has to a port; gRPC for Python has no such bound.

gRPC limits only the total, half-open connections included, and runs no code of ours before the first call.
One address could take all connections. This process therefore looks at its own sockets, and shuts down an
address's connections beyond its share. To gRPC this looks as if the peer had ended them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import urllib.parse
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import ClassVar, TypeAlias

import structlog

from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.rpc.limits import peer_name

QUIET_SECONDS = 1.0
BUSY_SECONDS = 0.1
"""The least time between two looks, while no address exceeds its share and while one does. A look costs about
10 us per descriptor. A port's 2,048 connections cannot be opened again within the shorter time."""

UNANNOUNCED_SECONDS = 20.0
"""The longest time between two looks at a port whose connections are announced (`announce`)."""

LATE_SECONDS = 3.0
"""The time after which an honest caller has finished its handshake and a call, on a slow machine too."""

_DESCRIPTORS = "/dev/fd"
"""Lists a process's own descriptors, on Linux and on macOS."""

_MOST_DESCRIPTORS = 1 << 16
"""Descriptors to try one by one if the list cannot be read; more than processes ask for
(`mesh/system/processes.py`)."""

log = structlog.get_logger()

_End: TypeAlias = tuple[str, int]
"""Address and port."""


def announce() -> None:
    """A connection was opened to a port with TLS. gRPC's threads call this before each handshake."""
    for watch in ConnectionWatch.running:
        watch.stir()


class ConnectionWatch:
    """Watches the connections of one listening port."""

    running: ClassVar[frozenset[ConnectionWatch]] = frozenset()
    """The watches of this process: replaced as a whole, since other threads read it."""

    def __init__(self, share: int, *, clock: Clock = monotonic_clock) -> None:
        """`share`: connections of one IPv4 address, or IPv6 network of 64 bits, without a caller's
        certificate."""
        self._share = share
        self._clock = clock
        self._vouched: set[_End] = set()
        self._welcome: set[_End] = set()
        self._gone: set[_End] = set()  # shut down here, not yet closed by gRPC
        self._seen: dict[_End, float] = {}
        self._crowded: set[str] = set()
        self._stirred = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Opened in advance: a crowd may have taken all other descriptors when one is needed.
        self._copy, self._nothing = (os.open(os.devnull, os.O_RDONLY) for _ in range(2))
        for descriptor in (self._copy, self._nothing):
            weakref.finalize(self, os.close, descriptor)

    def vouch(self, peer: str) -> None:
        """Stops counting this peer's connection: a caller with a certificate has called over it."""
        end = _end(peer)
        if end is not None:
            self._vouched.add(end)

    def welcome(self, peer: str) -> None:
        """Marks a connection over which a caller with an API key has called: it counts, but is shut down
        last.

        A crowd of strangers behind the same router then does not end a client's answers.
        """
        end = _end(peer)
        if end is not None:
            self._welcome.add(end)

    async def watch(self, port: int, *, announced: bool = False) -> None:
        """Looks until it is cancelled: whenever a connection may have come, if they are `announced`."""
        self._loop = asyncio.get_running_loop()
        ConnectionWatch.running |= {self}
        try:
            await self._watch(port, announced)
        finally:
            ConnectionWatch.running -= {self}

    async def _watch(self, port: int, announced: bool) -> None:
        while True:
            self._stirred.clear()
            try:
                busy = self.look(port) > 0
            except Exception:  # goes on after a defect: without the watch, every connection would stay
                log.exception("connections_not_counted", port=port)
                busy = False
            await asyncio.sleep(BUSY_SECONDS if busy else QUIET_SECONDS)
            if announced and not busy:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(UNANNOUNCED_SECONDS):
                        await self._stirred.wait()

    def stir(self) -> None:
        """A connection may have come. Safe to call from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stirred.set)

    def look(self, port: int) -> int:
        """Shuts down the connections beyond an address's share, and returns their number.

        Connections without a certificate or key after LATE_SECONDS go first, then the newest, then those
        marked by `welcome`. If many members connect at once from one address, those that are nearly through
        stay.
        """
        now, found = self._clock(), dict(_connections(port))
        self._vouched &= found.keys()
        self._welcome &= found.keys()
        self._gone &= found.keys()
        before = {end: since for end, since in self._seen.items() if end in found}
        self._seen = before | {end: now for end in found if end not in before}
        networks: defaultdict[str, list[_End]] = defaultdict(list)
        for end in self._seen:
            if end not in self._vouched and end not in self._gone:
                networks[peer_name(end[0])].append(end)
        crowded = {
            name: self._surplus(ends, now) for name, ends in networks.items() if len(ends) > self._share
        }
        for name in crowded.keys() - self._crowded:
            log.warning("connections_refused", peer=name, port=port, share=self._share)
        self._crowded = set(crowded)
        shut = {end for ends in crowded.values() for end in ends if self._shut(found[end], end)}
        self._gone |= shut
        return len(shut)

    def _surplus(self, ends: list[_End], now: float) -> list[_End]:
        """The connections of one network that go; `ends` are in the order in which they came."""
        strangers = [end for end in ends if end not in self._welcome]
        late = [end for end in strangers if now - self._seen[end] > LATE_SECONDS]
        welcome = [end for end in reversed(ends) if end in self._welcome]
        return [*late, *reversed(strangers[len(late) :]), *welcome][: len(ends) - self._share]

    def _shut(self, descriptor: int, end: _End) -> bool:
        """Shuts down the connection to `end`; returns whether the descriptor still belonged to it.

        gRPC's threads may have closed it and reused its number, so the peer of a duplicate is checked first.
        """
        try:
            os.dup2(descriptor, self._copy, inheritable=False)
        except OSError:
            return False
        try:
            copy = socket.socket(fileno=self._copy)
        except OSError:  # the number now belongs to another kind of file
            os.dup2(self._nothing, self._copy, inheritable=False)
            return False
        try:
            peer = copy.getpeername()
            if (_plain(peer[0]), peer[1]) != end:
                return False
            copy.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError):
            return False
        finally:
            copy.detach()
            os.dup2(self._nothing, self._copy, inheritable=False)
        return True


def _descriptors() -> Iterable[int]:
    """All of this process, and perhaps numbers of none."""
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:  # all descriptors are in use, and reading the list would need one
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MOST_DESCRIPTORS))


def _connections(port: int) -> Iterator[tuple[_End, int]]:
    """The other ends of the connections to a port of this process, each with its descriptor."""
    for descriptor in _descriptors():
        end = _peer_of(descriptor, port)
        if end is not None:
            yield end, descriptor


def _peer_of(descriptor: int, port: int) -> _End | None:
    """The other end of a connection to the port; None for any other descriptor, or one closed meanwhile."""
    try:  # given a family and a kind, Python need not ask; a name of IPv4 is shorter than one of IPv6
        own = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:
        return None
    try:
        here = own.getsockname()
        if not isinstance(here, tuple) or len(here) < 2 or here[1] != port:
            return None
        peer = own.getpeername()
        return _plain(peer[0]), peer[1]
    except OSError:  # without another end
        return None
    finally:
        own.detach()  # gRPC's descriptor stays open


def _plain(address: str) -> str:
    """The address without its zone, and without the prefix that a dual-stack socket gives IPv4."""
    address = address.partition("%")[0]
    return address.removeprefix("::ffff:") if "." in address else address


def _end(peer: str) -> _End | None:
    """Parses gRPC's name of a peer, such as "ipv4:192.0.2.7:41234" or "ipv6:%5B::1%5D:41234"."""
    kind, _, rest = urllib.parse.unquote(peer).partition(":")
    address, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _plain(address.strip("[]")), int(port)
