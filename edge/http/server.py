"""uvicorn inside our own event loop: no signal handlers of its own, no access log, no headers believed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from asyncio.sslproto import SSLProtocol
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from sealring.edge.access.edge_tls import EdgeTls
from sealring.edge.http.body import MAX_BODY
from sealring.edge.http.pieces import TURN_BYTES
from sealring.edge.http.protocol import EdgeProtocol
from sealring.edge.http.websocket import PING_SECONDS, WebSocketProtocol
from sealring.mesh.errors import ConfigError
from sealring.mesh.rpc.crowd import Crowd, Place
from sealring.mesh.rpc.limits import peer_name
from sealring.mesh.system.addresses import listen_error, parse_address, require_loopback

KEEP_ALIVE_SECONDS = 75
HANDSHAKE_SECONDS = 10.0
MAX_CONNECTIONS = 8192
"""Connections of a port, more than requests can be under way. One too many ends the oldest idle one of the
address or API key that has most of these."""

ACCEPTS, TAKEN_IN = 16, 256
"""Connections that a turn of the event loop begins to serve, and that it takes out of the kernel's queue. To
serve one costs ten times as much."""

FULL_SECONDS = 1.0
"""How long a server waits that has no descriptor left."""

_BACKLOG = 1024

SSLProtocol.max_size = TURN_BYTES
"""Bytes of TLS that a turn of the event loop opens. asyncio takes 256 KiB: 11,000 records of one byte, which
were 14 ms for each connection, before anybody has shown a key."""


class Listener(socket.socket):
    """A listening socket that bounds its connections, unfinished TLS handshakes included."""

    def __init__(self, family: int, most: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._most = most
        self.open_at: Callable[[str], bool] = lambda host: True
        """Whether connections to one of this machine's addresses are served."""

        self.waiting: dict[str, deque[_Accepted]] = {}
        """Connections that nobody serves yet, by their addresses, whose turns are in this order."""

        self.crowd = Crowd(sys.maxsize)  # `most` counts others too
        self.places: dict[Any, Place] = {}
        """The places of open connections, by the addresses of their clients."""

    def take_in(self) -> None:
        """Takes connections out of the kernel's queue, which is short, and in the order of arrival.

        Raises OSError where no descriptor is left.
        """
        for _ in range(TAKEN_IN):
            try:
                accepted, address = self.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            connection, name = _Accepted(accepted), peer_name(address[0])
            if not self.open_at(connection.own_host()):
                connection.close()
                continue
            place = self.places[address] = self.crowd.enter(name, connection.end)
            connection.closed = partial(self._release, address, place)
            self.waiting.setdefault(name, deque()).append(connection)
            if len(self.places) > self._most:
                self.crowd.send_away()

    def turns(self) -> Iterator[_Accepted]:
        """The next connections, of which each address has one in its turn."""
        for _ in range(ACCEPTS):
            while self.waiting:
                name = next(iter(self.waiting))
                queue = self.waiting.pop(name)
                connection = queue.popleft()
                if queue:
                    self.waiting[name] = queue
                if not connection.ended:
                    yield connection
                    break
                connection.close()

    def _release(self, address: Any, place: Place) -> None:
        place.close()
        if self.places.get(address) is place:  # and not of the next connection of the same client
            del self.places[address]


class _Accepted(socket.socket):
    """A connection that says when it is closed."""

    closed: Callable[[], None] | None = None
    ended = False

    def __init__(self, accepted: socket.socket) -> None:
        super().__init__(fileno=accepted.detach())

    def own_host(self) -> str:
        """The address of this machine that was called; empty where macOS forgets it with the client."""
        with contextlib.suppress(OSError):
            return str(self.getsockname()[0])
        return ""

    def end(self) -> None:
        """Has the event loop close it, as if its client had."""
        self.ended = True
        with contextlib.suppress(OSError):  # its client has
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        super().close()
        if self.closed is not None:
            tell, self.closed = self.closed, None
            tell()


class Accepting:
    """Serves the connections of a listener, in turns of their addresses; asyncio serves who comes first."""

    def __init__(
        self, listener: Listener, serve: Callable[[socket.socket], Coroutine[Any, Any, Any]]
    ) -> None:
        """Raises OSError."""
        listener.setblocking(False)
        self._listener = listener
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._begun = set[asyncio.Task[None]]()
        self._turn: asyncio.Handle | None = None
        self._listen()

    def close(self) -> None:
        """Takes no more connections, and ends those that are not served yet."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        while self._listener.waiting:
            for connection in self._listener.turns():
                connection.close()
        for task in self._begun:
            task.cancel()

    async def wait_closed(self) -> None:
        """Returns when nothing is begun any more."""
        if self._begun:
            await asyncio.wait(self._begun)

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._take_in)

    def _take_in(self) -> None:
        try:
            self._listener.take_in()
        except OSError:
            self._loop.remove_reader(self._listener)
            self._loop.call_later(FULL_SECONDS, self._listen)
        if self._turn is None:
            self._turns()

    def _turns(self) -> None:
        for connection in self._listener.turns():
            task = self._loop.create_task(self._one(connection))
            self._begun.add(task)
            task.add_done_callback(self._begun.discard)
        self._turn = self._loop.call_soon(self._turns) if self._listener.waiting else None

    async def _one(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # no TLS, or too late: asyncio has closed it
            await self._serve(connection)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.begun = asyncio.Event()
        self.ending = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens by itself: uvicorn would leave a silent TLS client a minute."""
        await super().startup([])
        loop = asyncio.get_running_loop()
        timeout = None if self.config.ssl is None else HANDSHAKE_SECONDS
        for one in sockets or []:
            assert isinstance(one, Listener)
            protocol = partial(self._protocol, one.places)
            serve = partial(
                loop.connect_accepted_socket,
                protocol,
                ssl=self.config.ssl,
                ssl_handshake_timeout=timeout,
            )
            self.servers.append(Accepting(one, serve))  # type: ignore[arg-type]  # closed as asyncio's are
        self.begun.set()

    def _protocol(self, places: Mapping[Any, Place]) -> EdgeProtocol:
        protocol = EdgeProtocol(self.config, self.server_state, self.lifespan.state)
        protocol.places = places
        return protocol

    async def main_loop(self) -> None:
        """Ticks once a second instead of ten times, and ends at once."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.ending.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves one ASGI application on one address; without TLS on loopback only."""

    def __init__(self, app: ASGIApp, *, tls: EdgeTls | None = None) -> None:
        self._tls = tls
        self._server = _Server(
            uvicorn.Config(
                app,
                http=EdgeProtocol,
                ssl_context_factory=None if tls is None else lambda config, default: tls.context,
                ws=WebSocketProtocol,
                ws_max_size=MAX_BODY,
                ws_ping_interval=PING_SECONDS,
                ws_ping_timeout=None,  # as long as any client: see protocol.py
                ws_per_message_deflate=False,
                lifespan="off",
                loop="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
            )
        )
        self.bound: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    def listen(self, address: str, open_at: Callable[[str], bool] = lambda host: True, most: int = 0) -> int:
        """Binds and returns the port; `open_at` is as Listener's, `most` how many connections it has.

        Raises ConfigError (LOOPBACK_ONLY, CANNOT_LISTEN).
        """
        if self._tls is None:
            require_loopback(address)
        host, port = parse_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = Listener(family, most or MAX_CONNECTIONS)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
            bound.listen(_BACKLOG)
        except OSError:
            bound.close()
            raise listen_error(address) from None
        bound.open_at = open_at
        self.bound = bound
        return int(bound.getsockname()[1])

    async def start(self) -> None:
        """Begins to serve; `listen` must have been called. Raises what keeps the server from it."""
        assert self.bound is not None
        self._task = asyncio.create_task(self._server.serve(sockets=[self.bound]))
        begun = asyncio.create_task(self._server.begun.wait())
        await asyncio.wait((self._task, begun), return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            begun.cancel()
            self.bound.close()
            task, self._task = self._task, None
            task.result()
            raise ConfigError("the HTTP server ended before it listened", reason="CANNOT_LISTEN")

    async def stop(self) -> None:
        """Takes no more connections, ends those that are open, and returns when all is closed."""
        self._server.should_exit = True
        self._server.ending.set()
        if self._task is not None:
            await self._task
        elif self.bound is not None:
            self.bound.close()
