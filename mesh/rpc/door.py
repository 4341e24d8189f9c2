"""Bounds how many of a port's connections one address has, which gRPC for Python leaves to its callers.

gRPC counts the connections of all together, half-open ones included, and calls no code of ours before a call
has come. One address could have them all. So this process looks at its own sockets, and shuts down what an
address has beyond its share; gRPC sees a connection that its peer has ended.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import stat
import urllib.parse
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import structlog

from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.rpc.limits import peer_name

QUIET_SECONDS = 1.0
BUSY_SECONDS = 0.1
"""Between two looks, while no address has too much and while one has. A look costs about 10 us a descriptor,
and 2,048 connections, which a port takes at most, cannot be opened again in the shorter time."""

LATE_SECONDS = 3.0
"""A caller that keeps to the protocol has a handshake and a call behind it by then, on a slow machine too."""

_DESCRIPTORS = "/dev/fd"
"""Lists a process's own descriptors, on Linux and on macOS."""

_MOST_DESCRIPTORS = 1 << 16
"""Of those that are tried one by one; more than a process asks for (`mesh/system/processes.py`)."""

log = structlog.get_logger()

_End: TypeAlias = tuple[str, int]
"""Address and port."""


class Door:
    """Watches the connections of one listening port."""

    def __init__(self, share: int, *, clock: Clock = monotonic_clock) -> None:
        """`share`: connections of one IPv4 address, or IPv6 network of 64 bits, that nobody vouches for."""
        self._share = share
        self._clock = clock
        self._vouched: set[_End] = set()
        self._welcome: set[_End] = set()
        self._gone: set[_End] = set()  # shut down, and not closed by gRPC yet
        self._seen: dict[_End, float] = {}
        self._crowded: set[str] = set()
        # held from the start: where a crowd has taken all descriptors no other is to be had
        self._copy, self._nothing = (os.open(os.devnull, os.O_RDONLY) for _ in range(2))
        for descriptor in (self._copy, self._nothing):
            weakref.finalize(self, os.close, descriptor)

    def vouch(self, peer: str) -> None:
        """A caller with a certificate has called over the connection of this peer, which counts no more."""
        end = _end(peer)
        if end is not None:
            self._vouched.add(end)

    def welcome(self, peer: str) -> None:
        """A caller with an API key has called over this connection. It counts, and goes after all others of
        its address: a crowd of strangers behind the same router does not end a client's answers."""
        end = _end(peer)
        if end is not None:
            self._welcome.add(end)

    async def watch(self, port: int) -> None:
        """Looks until it is cancelled."""
        while True:  # nothing tells of a connection
            try:
                busy = self.look(port) > 0
            except Exception:  # a defect, after which whoever looked no more would let everybody in
                log.exception("connections_not_counted", port=port)
                busy = False
            await asyncio.sleep(BUSY_SECONDS if busy else QUIET_SECONDS)

    def look(self, port: int) -> int:
        """Shuts down what is too much, and returns how many connections that were.

        What has shown nothing in time goes first, and then the newest: of many members that come at once from
        one address those that are nearly through stay. Whoever is `welcome` goes last.
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
        """Shuts down the connection to `end`, if the descriptor still is of that.

        gRPC may have closed it in another thread, and its number may be another's: a copy is looked at.
        """
        try:
            os.dup2(descriptor, self._copy, inheritable=False)
        except OSError:
            return False
        try:
            copy = socket.socket(fileno=self._copy)
        except OSError:  # no socket any more
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
    except OSError:  # all are in use, and none is left to read the list with
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MOST_DESCRIPTORS))


def _connections(port: int) -> Iterator[tuple[_End, int]]:
    """The other ends of the connections to a port of this process, each with its descriptor."""
    for descriptor in _descriptors():
        end = _peer_of(descriptor, port)
        if end is not None:
            yield end, descriptor


def _peer_of(descriptor: int, port: int) -> _End | None:
    """The other end of a connection to the port; None of any other descriptor, and of one that was closed
    meanwhile."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        one = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.getsockname()[1] != port:
            return None
        peer = one.getpeername()
        return _plain(peer[0]), peer[1]
    except OSError:
        return None
    finally:
        one.detach()


def _plain(address: str) -> str:
    """The address without its zone, and without the prefix that a socket for both versions gives IPv4."""
    address = address.partition("%")[0]
    return address.removeprefix("::ffff:") if "." in address else address


def _end(peer: str) -> _End | None:
    """Parses what gRPC calls a peer, such as "ipv4:192.0.2.7:41234" or "ipv6:%5B::1%5D:41234"."""
    kind, _, rest = urllib.parse.unquote(peer).partition(":")
    address, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _plain(address.strip("[]")), int(port)
