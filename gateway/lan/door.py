"""The LAN door's port: open while one of its keys is good, at the addresses of a house alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import structlog

from sealring.edge.access.gate import Gate
from sealring.edge.http.server import HttpServer
from sealring.gateway.lan.certificate import LanTls, local_names
from sealring.mesh.errors import ConfigError
from sealring.mesh.system.addresses import format_address, parse_address
from sealring.mesh.system.networks import ANY_HOST, house_addresses
from sealring.mesh.system.processes import first_of

log = structlog.get_logger()

LOOK_SECONDS = 2.0
LAN_CONNECTIONS = 512
"""Connections of the door. TLS of each may take a millisecond of a turn of the event loop."""

_MOST_ADDRESSES = 4
_LOOPBACK = "127.0.0.1"


class LanDoor:
    """An HTTPS server that comes and goes with its keys: to revoke the last one closes it."""

    def __init__(
        self, folder: Path, listen: str | None, cluster: str, gate: Gate, serve: Callable[..., HttpServer]
    ) -> None:
        """Without `listen` it never opens. `serve` makes the server, of its `tls`. Raises as LanTls."""
        self._host, self._port = parse_address(listen) if listen else ("", 0)
        self._gate = gate
        self._serve = serve
        self._server: HttpServer | None = None
        self._failed = ""
        self._hosts: list[str] = []
        self._tls: LanTls | None = None
        if listen:
            self._look()
            self._tls = LanTls(folder, f"sealring {cluster}", lambda: self._hosts)

    def addresses(self) -> list[str]:
        """At most four host:port at which others ask now; none while it is closed."""
        return [format_address(one, self._port) for one in self._hosts[:_MOST_ADDRESSES] if self._server]

    async def run(self) -> None:
        """Opens and closes it, and renews its certificate, for ever."""
        if self._tls is None:
            await asyncio.Event().wait()
        else:
            await first_of(self._follow(), self._tls.run(), self._gate.run())

    async def stop(self) -> None:
        """Closes it."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop()
            log.info("lan_door_closed")

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # an interface that has just gone
                self._look()
            if not self._gate.usable_keys:
                await self.stop()
            elif self._server is None:
                await self._open()
            await asyncio.sleep(LOOK_SECONDS)

    async def _open(self) -> None:
        server = self._serve(tls=self._tls)
        at = format_address(self._host, self._port)
        try:
            self._port = server.listen(
                at, lambda host: host in self._hosts or host == _LOOPBACK, LAN_CONNECTIONS
            )
            await server.start()
        except ConfigError as error:
            if str(error) != self._failed:
                self._failed = str(error)
                log.error("lan_door_not_opened", error=error)
            return
        self._server = server
        log.info("lan_door_opened", addresses=self.addresses())

    def _look(self) -> None:
        """Notes at which names and addresses others reach this machine now."""
        found = [*local_names(), *(one.host for one in house_addresses())]
        own = [self._host] if self._host in (*found, _LOOPBACK) else []
        self._hosts = found if self._host == ANY_HOST else own
