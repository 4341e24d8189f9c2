"""Clients that stay silent, or slow, in the TLS handshake: they hold up nobody, and are cut off.

Every gRPC port is a `sealring.mesh.rpc.server.Server` (the last test checks that): both of the
coordinator's are tried here as they are, the gateway's with its own certificate, and the daemon's by the
same server and credentials.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from edgecert import write_edge_certificate
from grpc_health.v1 import health_pb2, health_pb2_grpc
from leaftest import MEMBER, material

import sealring.edge.http.server as http_server
from sealring.coordinator.init import init
from sealring.coordinator.main import Coordinator
from sealring.coordinator.settings import CoordinatorSettings
from sealring.edge.access.edge_tls import EdgeTls
from sealring.edge.http.server import HttpServer
from sealring.mesh.member import load_machine_state
from sealring.mesh.pki import ClusterCA, Role, role_server_name
from sealring.mesh.rpc import (
    Server,
    TlsStore,
    channel_options,
    joining_channel,
    secure_channel,
    server_credentials,
)
from sealring.mesh.rpc import server as rpc

PORTS = ["coordinator", "joining", "daemon", "gateway grpc", "gateway https"]
STRANGERS = 120
SECONDS = 1.0


@dataclass
class Port:
    """A port under attack, and a call of an honest client."""

    number: int
    ask: Callable[[], Awaitable[None]]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real limits, made shorter."""
    options = dict(rpc.SERVER_OPTIONS)
    assert options["grpc.server_handshake_timeout_ms"] <= 10_000
    assert http_server.HANDSHAKE_SECONDS <= 10
    options["grpc.server_handshake_timeout_ms"] = int(1000 * SECONDS)
    monkeypatch.setattr(rpc, "SERVER_OPTIONS", list(options.items()))
    monkeypatch.setattr(http_server, "HANDSHAKE_SECONDS", SECONDS)


async def healthy(channel: grpc.aio.Channel) -> None:
    async with channel:
        request = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=100)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@contextlib.asynccontextmanager
async def coordinator_port(folder: Path, *, joining: bool) -> AsyncIterator[Port]:
    made = CoordinatorSettings(state_dir=folder / "c", listen="127.0.0.1:0", join_listen="127.0.0.1:0")
    init(made)
    running = Coordinator(made)
    await running.start()
    bundle = load_machine_state(folder / "c" / "operator")
    number = running.join_port if joining else running.port
    address = f"127.0.0.1:{number}"

    async def ask() -> None:
        if joining:
            await healthy(joining_channel(address, bundle.root.authorities))
        else:
            options = channel_options(role_server_name(Role.COORDINATOR))
            await healthy(secure_channel(address, bundle.tls, options))

    yield Port(number, ask)
    await running.stop()


@contextlib.asynccontextmanager
async def daemon_port(folder: Path) -> AsyncIterator[Port]:
    ca = ClusterCA.create(folder, "demo", now=time.time())
    own = material(ca)
    server = Server([])
    number = server.listen("127.0.0.1:0", server_credentials(TlsStore(own)))
    await server.start()

    async def ask() -> None:
        options = channel_options(MEMBER.server_name)
        await healthy(secure_channel(f"127.0.0.1:{number}", own, options))

    yield Port(number, ask)
    await server.stop(0)


@contextlib.asynccontextmanager
async def gateway_grpc_port(folder: Path) -> AsyncIterator[Port]:
    certificate, key = write_edge_certificate(folder)
    server = Server([])
    number = server.listen("127.0.0.1:0", EdgeTls(certificate, key).grpc_credentials())
    await server.start()

    async def ask() -> None:
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        options = [("grpc.ssl_target_name_override", "localhost")]
        await healthy(grpc.aio.secure_channel(f"127.0.0.1:{number}", credentials, options=options))

    yield Port(number, ask)
    await server.stop(0)


@contextlib.asynccontextmanager
async def gateway_https_port(folder: Path) -> AsyncIterator[Port]:
    certificate, key = write_edge_certificate(folder)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    server = HttpServer(app, tls=EdgeTls(certificate, key))
    number = server.listen("127.0.0.1:0")
    await server.start()
    trusted = ssl.create_default_context(cafile=str(certificate))

    async def ask() -> None:
        async with httpx.AsyncClient(verify=trusted, timeout=100) as client:
            assert (await client.get(f"https://localhost:{number}/")).status_code == 204

    yield Port(number, ask)
    await server.stop()


@contextlib.asynccontextmanager
async def port_of(name: str, folder: Path) -> AsyncIterator[Port]:
    opened = {
        "coordinator": lambda: coordinator_port(folder, joining=False),
        "joining": lambda: coordinator_port(folder, joining=True),
        "daemon": lambda: daemon_port(folder),
        "gateway grpc": lambda: gateway_grpc_port(folder),
        "gateway https": lambda: gateway_https_port(folder),
    }[name]()
    async with opened as port:
        yield port


def client_hello() -> bytes:
    """A real first flight of TLS."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


async def until_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(4096):
            pass


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", PORTS)
async def test_silent_and_slow_handshakes_block_nobody(name: str, tmp_path: Path) -> None:
    """A third each of strangers that say nothing, begin a handshake byte by byte, and stop in the middle."""
    hello = client_hello()
    async with port_of(name, tmp_path) as port:
        await port.ask()
        strangers = [await asyncio.open_connection("127.0.0.1", port.number) for _ in range(STRANGERS)]
        for number, (_, writer) in enumerate(strangers):
            writer.write((b"", hello[:1], hello)[number % 3])
        async with asyncio.timeout(100):
            await port.ask()

        async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
            """Returns how many bytes it could send until it was cut off."""
            closed = asyncio.create_task(until_closed(reader))
            for number, byte in enumerate(hello[1:]):
                if closed.done():
                    return number
                with contextlib.suppress(ConnectionError):
                    writer.write(bytes([byte]))
                await asyncio.wait((closed,), timeout=0.1)
            await closed
            return len(hello) - 1

        async with asyncio.timeout(100):
            drips = asyncio.gather(*(drip(*one) for one in strangers[1::3]))
            await asyncio.gather(*(until_closed(one) for one, _ in strangers[::3] + strangers[2::3]))
            assert max(await drips) < len(hello) - 1, "a handshake of one byte at a time came to its end"
            await port.ask()
        for _, writer in strangers:
            writer.close()


def test_every_grpc_server_is_the_one_with_limits() -> None:
    root = Path(__file__).parents[2]
    found = {
        str(file.relative_to(root))
        for package in ("mesh", "edge", "coordinator", "node", "gateway", "doctor", "cli", "sealring")
        for file in (root / package).rglob("*.py")
        if "grpc.aio.server(" in file.read_text("utf-8") or "grpc.server(" in file.read_text("utf-8")
    }
    assert found == {"mesh/rpc/transport.py"}
