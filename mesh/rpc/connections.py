"""A crowd of the connections that wait at a port of gRPC, as at the HTTP edge.

gRPC limits only the total, half-open connections included, and runs no code of ours before the first call.
Strangers could take all connections. This process therefore looks at its own sockets, and shuts down those of
the crowd that are sent away. To gRPC this looks as if the peer had ended them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import urllib.parse
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import ClassVar, TypeAlias

import structlog

from sealring.mesh.errors import ResourceExhausted
from sealring.mesh.rpc.crowd import Crowd, Place
from sealring.mesh.rpc.holding import Holding, Share
from sealring.mesh.rpc.limits import peer_name

QUIET_SECONDS = 1.0
BUSY_SECONDS = 0.1
"""The least time between two looks, while nobody is sent away and while somebody is. A look costs about 10 us
per descriptor. Half of a port's connections are hardly opened again within the shorter time."""

UNANNOUNCED_SECONDS = 20.0
"""The longest time between two looks at a port whose connections are announced (`announce`)."""

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

    def __init__(self, most: int) -> None:
        """`most`: connections that may wait, and as many that are let in by a key or a certificate."""
        self._crowd = Crowd(most)
        self._let_in = Holding(most)
        self._places: dict[_End, Place] = {}
        self._vouched: dict[_End, contextlib.ExitStack] = {}
        self._leaving: set[_End] = set()
        self._refusing = False
        self._stirred = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Opened in advance: a crowd may have taken all other descriptors when one is needed.
        self._copy, self._nothing = (os.open(os.devnull, os.O_RDONLY) for _ in range(2))
        for descriptor in (self._copy, self._nothing):
            weakref.finalize(self, os.close, descriptor)

    def vouch(self, peer: str, name: str) -> None:
        """Charges this peer's connection to a name from now on: a caller with its certificate has called.

        It does not wait. A name with more connections than are left for others goes on waiting.
        """
        end = _end(peer)
        if end is not None and end not in self._vouched:
            with contextlib.suppress(ResourceExhausted), contextlib.ExitStack() as stack:
                self._charge(end, name, stack)
                self._vouched[end] = stack.pop_all()

    @contextlib.contextmanager
    def let_in(self, peer: str, name: str) -> Iterator[None]:
        """Within the block, a call of a caller with this name, the peer's connection does not wait.

        Afterwards it is charged to the name. A name with more calls than are left for others goes
        on waiting.
        """
        end = _end(peer)
        with contextlib.ExitStack() as stack:
            if end is not None:
                with contextlib.suppress(ResourceExhausted):
                    self._charge(end, name, stack)
            yield

    def _charge(self, end: _End, name: str, stack: contextlib.ExitStack) -> None:
        """Until the stack is closed. Raises ResourceExhausted."""
        stack.enter_context(Share(self._let_in, name)).take(1)
        stack.enter_context(self._place(end).let_in(name))

    def _place(self, end: _End) -> Place:
        place = self._places.get(end)
        if place is None:
            leave = partial(self._leaving.add, end)
            place = self._places[end] = self._crowd.enter(peer_name(end[0]), leave)
        return place

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
        """Shuts down the connections that were sent away, again if need be, and returns their number."""
        found = dict(_connections(port))
        for end in self._places.keys() - found.keys():
            self._places.pop(end).close()
            self._vouched.pop(end, contextlib.ExitStack()).close()
        for end in found:
            self._place(end)
        self._leaving.intersection_update(found)
        if self._leaving and not self._refusing:
            log.warning("connections_refused", port=port, waiting=len(self._crowd))
        self._refusing = bool(self._leaving)
        for end in self._leaving:
            self._shut(found[end], end)
        return len(self._leaving)

    def _shut(self, descriptor: int, end: _End) -> None:
        """Shuts down the connection to `end`, if the descriptor still belongs to it.

        gRPC's threads may have closed it and reused its number, so the peer of a duplicate is checked first.
        """
        with contextlib.suppress(OSError, IndexError):
            os.dup2(descriptor, self._copy, inheritable=False)
            try:
                copy = socket.socket(fileno=self._copy)
                try:
                    peer = copy.getpeername()
                    if (_plain(peer[0]), peer[1]) == end:
                        copy.shutdown(socket.SHUT_RDWR)
                finally:
                    copy.detach()
            finally:
                os.dup2(self._nothing, self._copy, inheritable=False)


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
