"""uvicorn inside our own event loop: no signal handlers of its own, no access log, no headers believed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp

from sealring.edge.access.edge_tls import EdgeTls
from sealring.edge.http.body import MAX_BODY
from sealring.edge.http.protocol import EdgeProtocol
from sealring.edge.http.websocket import PING_SECONDS, WebSocketProtocol
from sealring.mesh.errors import ConfigError
from sealring.mesh.rpc.limits import peer_name
from sealring.mesh.system.addresses import is_loopback, listen_error, parse_address, require_loopback

KEEP_ALIVE_SECONDS = 75
HANDSHAKE_SECONDS = 10.0
MAX_CONNECTIONS = 8192
SHARE = MAX_CONNECTIONS // 4
"""Connections that one address may have of a port that the network reaches: far more than a proxy for a
household has open, and three others like it find room. On loopback one proxy may speak for everybody, so an
address may have all there."""

_BACKLOG = 1024

log = structlog.get_logger()


class Listener(socket.socket):
    """A listening socket that bounds its connections, those of one address, and TLS handshakes with them.

    A connection beyond a bound is closed as soon as it is accepted, before any of it is read.
    """

    def __init__(self, family: int, *, most: int = MAX_CONNECTIONS, share: int = SHARE) -> None:
        """`share`: the most connections of one IPv4 address, or IPv6 network of 64 bits."""
        super().__init__(family, socket.SOCK_STREAM)
        self._most = most
        self._share = share
        self._open: Counter[str] = Counter()
        self._crowded: set[str] = set()

    def accept(self) -> tuple[socket.socket, Any]:
        """As that of any socket, for the next connection within the bounds."""
        while True:
            accepted, address = super().accept()
            peer = peer_name(address[0])
            if self._open.total() < self._most and self._open[peer] < self._share:
                self._open[peer] += 1
                return _Accepted(accepted, partial(self._release, peer)), address
            accepted.close()
            if peer not in self._crowded:
                self._crowded.add(peer)
                log.warning("connections_refused", peer=peer, most=self._most, share=self._share)

    def _release(self, peer: str) -> None:
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]
            self._crowded.discard(peer)


class _Accepted(socket.socket):
    """A connection that says when it is closed."""

    def __init__(self, accepted: socket.socket, closed: Callable[[], None]) -> None:
        super().__init__(fileno=accepted.detach())
        self._tell: Callable[[], None] | None = closed

    def close(self) -> None:
        super().close()
        if self._tell is not None:
            tell, self._tell = self._tell, None
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
                self._protocol,
                sock=one,
                ssl=self.config.ssl,
                ssl_handshake_timeout=timeout,
                backlog=self.config.backlog,
            )
            self.servers.append(server)
        self.begun.set()

    def _protocol(self) -> EdgeProtocol:
        return EdgeProtocol(self.config, self.server_state, self.lifespan.state)

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
        bound = Listener(family, share=MAX_CONNECTIONS if is_loopback(host) else SHARE)
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
