from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.attacks import frame
from sealring.mesh.errors import ConfigError
from sealring.mesh.rpc import CHANNEL_OPTIONS, Server, heads
from sealring.mesh.rpc.heads import MAX_HEADERS

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
"""With settings."""

CHECK = b"/grpc.health.v1.Health/Check"
HEADERS, RESET, SETTINGS, GOAWAY, CONTINUATION = 1, 3, 4, 7, 9
ACK, END_STREAM, END_HEADERS = 1, 1, 4


def literal(name: bytes, value: bytes) -> bytes:
    """A header that is not to be remembered (RFC 7541, 6.2.2), of short strings."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call(path: bytes, headers: bytes = b"") -> bytes:
    """The frames of a call's head: POST, http, and what else gRPC wants."""
    fields = b"\x83\x86" + literal(b":path", path) + literal(b":authority", b"localhost")
    fields += literal(b"te", b"trailers") + literal(b"content-type", b"application/grpc") + headers
    return head(fields)


def head(fields: bytes) -> bytes:
    """The frames that hold them, of stream 1."""
    parts = [fields[at : at + 16_384] for at in range(0, len(fields), 16_384)]
    kinds = [HEADERS] + [CONTINUATION] * (len(parts) - 1)
    flags = [0] * (len(parts) - 1) + [END_HEADERS]
    return b"".join(frame(kind, flag, 1, part) for kind, flag, part in zip(kinds, flags, parts, strict=True))


async def answer(port: int, sent: bytes, piece: int = 1 << 20) -> bytes:
    """The head that the server answers with, as it is on the wire; what is sent comes in pieces."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE)
    for at in range(0, len(sent), piece):
        await asyncio.sleep(0)
        writer.write(sent[at : at + piece])
    try:
        while True:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] in (HEADERS, RESET, GOAWAY):
                return payload
            if head[3] == SETTINGS and not head[4]:
                writer.write(frame(SETTINGS, ACK, 0, b""))
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""  # the connection has ended
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def said(code: grpc.StatusCode) -> bytes:
    return literal(b"grpc-status", str(code.value[0]).encode())[2:]


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = Server([])
    port = server.listen("127.0.0.1:0", None)
    await server.start()
    yield port
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        answered = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answered.status == health_pb2.HealthCheckResponse.SERVING  # as it was before
    await server.stop(0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the headers that tuples are made of."""
    names: list[str] = []
    counted = vars(cygrpc)["_Metadatum"]
    make = counted.make

    def noted(name: str, value: Any) -> Any:
        names.append(name)
        return make(name, value)

    monkeypatch.setattr(counted, "make", noted)
    return names


@pytest.mark.parametrize("path", [b"/a\xff/b", b"/a/b", b"\x00", b"/grpc.health.v1.Health/Check\xc3"])
async def test_a_path_of_nobodys_ends_its_call_only(port: int, path: bytes) -> None:
    assert said(grpc.StatusCode.UNIMPLEMENTED) in await answer(port, call(path))


@pytest.mark.parametrize("piece", [1 << 20, 5000])
async def test_of_a_head_without_end_few_tuples_are_made(port: int, made: list[str], piece: int) -> None:
    """gRPC may refuse it before: what its own limit counts depends on how the bytes come."""
    answered = await answer(port, call(CHECK, literal(b"a", b"b") * (10 * MAX_HEADERS)), piece)
    if said(grpc.StatusCode.INVALID_ARGUMENT) in answered:
        assert b"more than %d headers" % MAX_HEADERS in answered
        assert MAX_HEADERS - 10 < made.count("a") <= MAX_HEADERS
    else:
        assert said(grpc.StatusCode.OK) not in answered
        assert made.count("a") <= MAX_HEADERS


async def test_what_is_not_text_is_refused_and_fills_no_log(
    port: int, made: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sent = call(CHECK, literal(b"a", b"\xff") * 50)
    assert said(grpc.StatusCode.INVALID_ARGUMENT) in await answer(port, sent)
    assert "a" not in made
    assert not [record for record in caplog.records if "Invalid encoding" in record.getMessage()]


async def test_binary_headers_hold_what_they_like(port: int, made: list[str]) -> None:
    """And a head of as many headers as our settings leave room for is taken."""
    sent = call(CHECK, literal(b"a-bin", b"/w") + literal(b"a", b"b") * 100)  # base64 of a byte above 127
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + sent + frame(0, END_STREAM, 1, bytes(5)))
    while b"grpc-status\x010" not in await reader.read(1 << 16):
        assert not reader.at_eof()
    assert (made.count("a"), made.count("a-bin")) == (100, 1)
    writer.close()
    await writer.wait_closed()


async def test_a_servers_head_without_end_is_an_error_of_the_call(port: int, made: list[str]) -> None:
    del port  # bounds are set by a process that has a server

    left = 0
    failed, gone = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        left += 1
        writer.write(frame(4, 0, 0, b""))
        await reader.readuntil(b"application/grpc")
        fields = (
            b"\x88" + literal(b"content-type", b"application/grpc") + literal(b"a", b"b") * 10 * MAX_HEADERS
        )
        writer.write(head(fields))
        await failed.wait()  # else the client would keep the connection until settings are overdue
        writer.close()
        await writer.wait_closed()
        left -= 1
        if not left:
            gone.set()

    hostile = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{hostile.sockets[0].getsockname()[1]}"
    async with hostile:
        for method in ("Check", "Watch"):
            failed.clear()
            gone.clear()
            async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                answered = getattr(stub, method)(health_pb2.HealthCheckRequest())
                with pytest.raises(grpc.aio.AioRpcError):
                    await (answered if method == "Check" else answered.read())
            failed.set()
            await gone.wait()
    assert made.count("a") <= 2 * MAX_HEADERS


@pytest.mark.parametrize("part", heads.PARTS)
def test_no_server_starts_where_a_private_part_of_grpc_is_missing(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    class Parts:
        """As they are in grpcio before anything is replaced, but for one."""

    for name in heads.PARTS:
        if name != part:
            setattr(Parts, name.partition(".")[0], type("Part", (), {"_request_call": None}))
    if part == "AioServer._request_call":
        Parts.AioServer = object  # type: ignore[attr-defined]
    monkeypatch.setattr(heads, "cygrpc", Parts)
    had = vars(Parts).copy()
    with pytest.raises(ConfigError) as refused:
        Server([])
    assert refused.value.reason == "GRPC_UNKNOWN"
    assert part in str(refused.value)
    assert vars(Parts) == had


@pytest.mark.parametrize(
    ("error", "kept"),
    [(None, True), (ValueError(), True), (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), False)],
)
def test_only_what_is_said_of_headers_that_are_no_text_is_left_out(
    error: Exception | None, kept: bool
) -> None:
    info = (type(error), error, None) if error else None
    record = logging.LogRecord("grpc", logging.ERROR, "file", 1, "said", (), info)
    assert heads.is_decodable(record) is kept


async def test_a_task_makes_at_most_1024_headers_of_ascii() -> None:
    make = heads.CountedHeaders(lambda name, value: (name, value))
    assert make("a", b"\xff") == ("a", b"\xff")
    with pytest.raises(heads.BadHead) as caught:
        make("a", "é")
    assert caught.value.details() == "more than 1024 headers, or text that is not ASCII in one"
    for _ in range(1022):
        make("a", "b")
    with pytest.raises(heads.BadHead):
        make("a", "b")

    async def another() -> Any:
        return make("a", "b")

    assert await asyncio.create_task(another()) == ("a", "b")


def test_headers_of_no_task_are_not_counted() -> None:
    make = heads.CountedHeaders(lambda name, value: (name, value))
    assert [make("a", "é") for _ in range(2)] == [("a", "é")] * 2
