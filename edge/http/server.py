"""uvicorn inside our own event loop: no signal handlers of its own, no access log, no headers believed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from sealring.edge.access.edge_tls import EdgeTls
from sealring.edge.http.body import MAX_BODY
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

ACCEPTS = 16
"""Connections that are accepted in one turn of the event loop."""

_BACKLOG = 1024


class Listener(socket.socket):
    """A listening socket that bounds its connections, unfinished TLS handshakes included."""

    def __init__(self, family: int, most: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._most = most
        self._accepted = 0
        self.crowd = Crowd(sys.maxsize)  # `most` counts others too
        self.places: dict[Any, Place] = {}
        """The places of open connections, by the addresses of their clients."""

    def accept(self) -> tuple[socket.socket, Any]:
        """As that of any socket. Raises BlockingIOError after `ACCEPTS` in a turn; the next one goes on."""
        if self._accepted == ACCEPTS:
            raise BlockingIOError
        accepted, address = super().accept()
        if not self._accepted:
            asyncio.get_running_loop().call_soon(self._turn)
        self._accepted += 1
        connection = _Accepted(accepted)
        place = self.places[address] = self.crowd.enter(peer_name(address[0]), connection.end)
        connection.closed = partial(self._release, address, place)
        if len(self.places) > self._most:
            self.crowd.send_away()
        return connection, address

    def _turn(self) -> None:
        self._accepted = 0

    def _release(self, address: Any, place: Place) -> None:
        place.close()
        if self.places.get(address) is place:  # and not of the next connection of the same client
            del self.places[address]


class _Accepted(socket.socket):
    """A connection that says when it is closed."""

    closed: Callable[[], None] | None = None

    def __init__(self, accepted: socket.socket) -> None:
        super().__init__(fileno=accepted.detach())

    def end(self) -> None:
        """Has the event loop close it, as if its client had."""
        with contextlib.suppress(OSError):  # its client has
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        super().close()
        if self.closed is not None:
            tell, self.closed = self.closed, None
            tell()


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
            server = await loop.create_server(
                partial(self._protocol, getattr(one, "places", {})),
                sock=one,
                ssl=self.config.ssl,
                ssl_handshake_timeout=timeout,
                backlog=self.config.backlog,
            )
            self.servers.append(server)
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

    def listen(self, address: str) -> int:
        """Binds and returns the port. Raises ConfigError (LOOPBACK_ONLY, CANNOT_LISTEN)."""
        if self._tls is None:
            require_loopback(address)
        host, port = parse_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = Listener(family, MAX_CONNECTIONS)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
            bound.listen(_BACKLOG)
        except OSError:
            bound.close()
            raise listen_error(address) from None
        bound.setblocking(False)
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
