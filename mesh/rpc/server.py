"""gRPC servers and clients as all of sealring's processes use them.

`mesh/rpc/status.py` maps the exception tree to gRPC status and back; `mesh/rpc/interceptor.py` applies it
to every handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sealring.mesh.prompt.validate import MAX_ENVELOPE_BYTES
from sealring.mesh.rpc.connections import ConnectionWatch
from sealring.mesh.rpc.heads import bound_heads
from sealring.mesh.rpc.interceptor import ErrorInterceptor
from sealring.mesh.rpc.transport import transport
from sealring.mesh.system.addresses import listen_error, parse_address, require_loopback

MAX_MESSAGE = 16 << 20


CALL_SECONDS = 2.0
"""Between gRPC's pings on connections that have calls only under work: clients' to a gateway."""

REST_SECONDS = 20.0
"""Between gRPC's pings on connections that stand day and night. Each ping wakes a dozen times threads of gRPC
at both ends. Under work the ends find each other silent sooner, by what they say (`mesh/rpc/silence.py`)."""


@dataclass(frozen=True)
class Port:
    """The limits of a server's port, for any caller.

    `connections` is the total. Half of them may wait, over which nobody with a certificate has called and
    nobody with a key is calling (`mesh/rpc/connections.py`). A connection has at most `streams` at
    once; clients queue further calls by themselves. A message has at most `message` bytes and, with
    `counting`, at most as many fields as `mesh/rpc/wire.py` allows. A connection ends after `idle` seconds
    without a call, and after `age` seconds with calls; 0: never. After `ping` seconds without a byte the
    server pings. With `reflects`, callers may list the services.
    """

    connections: int = 2048
    streams: int = 32
    message: int = MAX_MESSAGE
    counting: bool = False
    idle: float = 0.0
    age: float = 0.0
    ping: float = REST_SECONDS
    reflects: bool = True

    @property
    def options(self) -> list[tuple[str, Any]]:
        """The limits as gRPC's channel arguments."""
        times = {
            "grpc.max_connection_idle_ms": self.idle,
            "grpc.max_connection_age_ms": self.age,
            "grpc.keepalive_time_ms": self.ping,
        }
        return [
            ("grpc.max_allowed_incoming_connections", self.connections),
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.max_receive_message_length", self.message),
            *((name, int(seconds * 1000)) for name, seconds in times.items() if seconds),
            *([("grpc.max_connection_age_grace_ms", int(self.age * 1000))] if self.age else []),
        ]


JOINING = Port(streams=4, message=1 << 18, counting=True, idle=10.0, age=20.0, reflects=False)
"""Open to strangers, for two calls within seconds: machines join and renew certificates here."""

INFERENCE = Port(
    connections=4096,
    streams=256,
    message=MAX_ENVELOPE_BYTES + (1 << 16),
    counting=True,
    ping=CALL_SECONDS,
)
"""The port for clients with many requests at once."""

SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.settings_timeout", 10_000),
    ("grpc.max_metadata_size", 2048),
    ("grpc.absolute_max_metadata_size", 4096),  # of each frame; one call's headers may take several
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 8),
]
"""Clients ping every two seconds at most, and once more while gRPC measures their receive bandwidth. A peer
that sends eight early pings, and no data between them, is no client of ours."""

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", INFERENCE.message),
    ("grpc.keepalive_time_ms", int(CALL_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5000),
]
"""For channels to a gateway."""


class Server:
    """A grpc.aio server with health, reflection and masked errors.

    `services` are (add_to_server function, servicer, full service name).
    """

    def __init__(
        self,
        services: Sequence[tuple[Callable[[Any, Any], None], Any, str]],
        *,
        port: Port = Port(),
        options: Sequence[tuple[str, Any]] = (),
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        bound_heads()
        self._transport = transport.get()
        self._watch = watch = ConnectionWatch(port.connections // 2)
        self._port = 0
        self._announced = False
        self._watching: asyncio.Task[None] | None = None
        self._server = self._transport.server(
            [
                ErrorInterceptor(counting=port.counting, vouch=watch.vouch, let_in=watch.let_in),
                *interceptors,
            ],
            [*SERVER_OPTIONS, *port.options, *options],
        )
        self._health = health.aio.HealthServicer()
        names = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        for add, servicer, name in services:
            add(servicer, self._server)
            names.append(name)
        self._names = names[2:]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if port.reflects:
            reflection.enable_server_reflection(names, self._server)

    def listen(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        """Binds and returns the port; without credentials on loopback only.

        Raises InvalidInput (BAD_ADDRESS), ConfigError (CANNOT_LISTEN, LOOPBACK_ONLY).
        """
        parse_address(address)
        if credentials is None:
            require_loopback(address)
        try:
            if credentials is None:
                self._port = self._server.add_insecure_port(address)
            else:
                self._port = self._server.add_secure_port(address, credentials)
                self._announced = True  # by `server_credentials` and `EdgeTls`
        except RuntimeError:
            raise listen_error(address) from None
        return self._port

    async def start(self) -> None:
        """Starts to serve, and reports SERVING. A cancelled start leaves the server stopped."""
        starting = asyncio.ensure_future(self._server.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:  # grpc.aio can only be stopped once it has started
            await starting
            await self._server.stop(None)
            raise
        if self._transport.watches:
            self._watching = asyncio.create_task(self._watch.watch(self._port, announced=self._announced))
        await self.set_serving(True)

    async def set_serving(self, serving: bool) -> None:
        """Sets the health of the server and of each of its services."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ["", *self._names]:
            await self._health.set(name, status)

    async def stop(self, grace: float) -> None:
        """Reports NOT_SERVING, then stops. Handlers must have ended their streams before."""
        await self.set_serving(False)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait((self._watching,))
        await self._server.stop(grace)

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self._server.wait_for_termination()
