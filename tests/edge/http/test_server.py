"""The HTTP server by itself: where it listens, what it leaves open, whom it believes."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from edgecert import write_edge_certificate
from patience import until

from sealring.edge.access.edge_tls import EdgeTls
from sealring.edge.http import server as module
from sealring.edge.http.pieces import TURN_BYTES
from sealring.edge.http.protocol import EdgeProtocol
from sealring.edge.http.server import Accepting, HttpServer, Listener
from sealring.mesh.errors import ConfigError


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the client's address and the scheme."""
    said = f"{scope['client'][0]} {scope['scheme']}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
    await send({"type": "http.response.body", "body": said})


async def ask(port: int, *headers: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "".join(f"{one}\r\n" for one in ("host: localhost", "connection: close", *headers))
    writer.write(f"GET / HTTP/1.1\r\n{head}\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def bound(port: int) -> socket.socket:
    taken = socket.socket()
    taken.bind(("127.0.0.1", port))
    return taken


async def test_nobody_is_believed_about_whom_he_speaks_for_and_nothing_is_told_of_the_server() -> None:
    server = HttpServer(app)
    port = server.listen("127.0.0.1:0")
    await server.start()
    try:
        answer = await ask(port, "x-forwarded-for: 192.0.2.7", "x-forwarded-proto: https")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert body.startswith(b"127.0.0.1 http") or b"127.0.0.1 http\r\n" in body
        assert b"x-own: 1" in head
        assert b"server:" not in head
    finally:
        await server.stop()
    with pytest.raises(ConnectionRefusedError):
        await ask(port)


async def test_a_server_that_never_began_leaves_its_port() -> None:
    await HttpServer(app).stop()
    server = HttpServer(app)
    port = server.listen("127.0.0.1:0")
    with pytest.raises(ConfigError) as raised:
        HttpServer(app).listen(f"127.0.0.1:{port}")
    assert raised.value.reason == "CANNOT_LISTEN"
    await server.stop()
    bound(port).close()


def test_without_tls_it_listens_on_loopback_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        HttpServer(app).listen("192.0.2.1:0")
    assert raised.value.reason == "LOOPBACK_ONLY"
    with pytest.raises(ConfigError) as raised:
        HttpServer(app, tls=EdgeTls(*write_edge_certificate(tmp_path))).listen("192.0.2.1:0")
    assert raised.value.reason == "CANNOT_LISTEN", "with TLS it would, were the address this machine's"


async def test_a_client_that_does_not_shake_hands_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.01)
    server = HttpServer(app, tls=EdgeTls(*write_edge_certificate(tmp_path)))
    port = server.listen("127.0.0.1:0")
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()
    finally:
        await server.stop()


async def test_a_server_that_cannot_begin_says_why(tmp_path: Path) -> None:
    """As where no more descriptors are left: its port is given back, and nobody waits for it."""

    class Taken(HttpServer):
        def listen(self, address: str) -> int:
            port = super().listen(address)
            assert self.bound is not None
            self.bound.close()
            return port

    server = Taken(app)
    port = server.listen("127.0.0.1:0")
    with pytest.raises(OSError, match="Bad file descriptor"):
        async with asyncio.timeout(60):
            await server.start()
    await server.stop()
    bound(port).close()


async def test_what_is_no_http_or_asks_for_another_protocol_writes_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = HttpServer(app)
    port = server.listen("127.0.0.1:0")
    await server.start()
    try:
        for name, status in (("h2c", b"200"), ("websocket", b"400")):
            answer = await ask(port, "connection: upgrade", f"upgrade: {name}")
            assert answer.startswith(b"HTTP/1.1 " + status)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"PRI * HTTP/2.0\r\nhost: localhost\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
    finally:
        await server.stop()
    assert not [record.getMessage() for record in caplog.records]


async def test_who_comes_finds_a_place_and_who_waits_without_a_request_makes_it(tmp_path: Path) -> None:
    """Also while they have not begun TLS. The oldest of the address that has most goes."""

    class Greeting(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.write(b"hello")

    certificate, key = write_edge_certificate(tmp_path)
    listener = Listener(socket.AF_INET6, 3)
    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.bind(("::", 0))
    port = listener.getsockname()[1]
    tls: Any = {"ssl": ssl.create_default_context(cafile=str(certificate)), "server_hostname": "localhost"}
    context = EdgeTls(certificate, key).context
    listener.listen()
    serve = partial(asyncio.get_running_loop().connect_accepted_socket, Greeting, ssl=context)
    async with asyncio.timeout(200):
        accepting = Accepting(listener, serve)
        silent = [await asyncio.open_connection("::1", port) for _ in range(3)]
        reader, other = await asyncio.open_connection("127.0.0.1", port, **tls)
        assert await reader.read(5) == b"hello"
        assert await silent[0][0].read() == b"", "the oldest of the address that has most"
        await until(lambda: len(listener.places) == 3)
        own = other.get_extra_info("sockname")
        place = next(place for at, place in listener.places.items() if at[1] == own[1])
        with place.let_in("key"):
            for ended in silent[1:]:
                silent.append(await asyncio.open_connection("::1", port))
                assert await ended[0].read() == b""
            assert len(listener.crowd) == 2
        for _, writer in (*silent, (reader, other)):
            writer.close()
        await until(lambda: not listener.places)
        assert not len(listener.crowd)
        accepting.close()
        await accepting.wait_closed()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(socket.AF_INET, 100) as made:
        made.bind(("127.0.0.1", 0))
        made.listen(100)
        yield made


async def test_so_many_connections_are_served_in_a_turn(listener: Listener) -> None:
    listener.setblocking(False)
    made = [socket.create_connection(listener.getsockname()) for _ in range(2 * module.ACCEPTS)]
    listener.take_in()
    accepted = [list(listener.turns()) for _ in range(3)]
    assert [len(each) for each in accepted] == [module.ACCEPTS, module.ACCEPTS, 0]
    for one in (*made, *accepted[0], *accepted[1]):
        one.close()
    assert not listener.places


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has one address of loopback")
async def test_addresses_take_turns_however_many_connections_each_has(listener: Listener) -> None:
    """Those that were sent away meanwhile have none."""
    listener.setblocking(False)
    at = listener.getsockname()
    crowd = [socket.create_connection(at, None, ("127.0.0.2", 0)) for _ in range(20)]
    honest = [socket.create_connection(at, None, (f"127.0.0.{number}", 0)) for number in (3, 4)]
    listener.take_in()
    listener.crowd.send_away()
    served = list(listener.turns())
    assert [one.getpeername()[0] for one in served[:3]] == ["127.0.0.3", "127.0.0.4", "127.0.0.2"]
    assert served[2].getpeername()[1] == crowd[1].getsockname()[1]
    for one in (*crowd, *honest, *served, *listener.turns()):
        one.close()
    assert not listener.places


async def test_a_server_without_descriptors_goes_on_when_it_has_some(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FULL_SECONDS", 0.0)
    tries = iter([OSError(errno.EMFILE, "none left")] * 2)
    take_in = Listener.take_in

    def taken(own: Listener) -> None:
        for error in tries:
            raise error
        take_in(own)

    monkeypatch.setattr(Listener, "take_in", taken)
    served: asyncio.Queue[socket.socket] = asyncio.Queue()
    accepting = Accepting(listener, served.put)
    with socket.create_connection(listener.getsockname()):
        async with asyncio.timeout(60):
            (await served.get()).close()
    accepting.close()
    await accepting.wait_closed()


async def test_a_turn_opens_few_records_of_tls_however_small_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs as much as one of 16 KiB, and no key was shown yet."""
    opened = list[int]()
    update = EdgeProtocol.buffer_updated

    def noting(self: EdgeProtocol, nbytes: int) -> None:
        opened.append(nbytes)
        update(self, nbytes)

    monkeypatch.setattr(EdgeProtocol, "buffer_updated", noting)
    certificate, key = write_edge_certificate(tmp_path)
    server = HttpServer(app, tls=EdgeTls(certificate, key))
    port = server.listen("127.0.0.1:0")
    await server.start()
    trusting = ssl.create_default_context(cafile=str(certificate))
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trusting, server_hostname="localhost"
        )
        inner: Any = writer.transport.get_extra_info("ssl_object")
        head = f"GET / HTTP/1.1\r\nhost: localhost\r\nx: {'x' * 6000}\r\n\r\n".encode()
        for byte in head:
            inner.write(bytes([byte]))
        writer.write(b"\r\n")  # which sends them all
        assert (await reader.read(64)).startswith(b"HTTP/1.1 200")
        writer.close()
    finally:
        await server.stop()
    assert sum(opened) >= len(head)
    assert max(opened) <= TURN_BYTES // 22, "a record of one byte takes 22 at least"
