"""API keys at the HTTP edge, with OpenAI's own client and with worse ones."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import structlog
from edgecert import write_edge_certificate
from patience import until

from sealring.edge.access import edge_tls
from sealring.edge.access.edge_tls import EdgeTls
from sealring.edge.access.gate import Gate, Limits
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope
from sealring.edge.http import guard, protocol
from sealring.edge.http.server import HttpServer
from sealring.mesh.errors import ConfigError
from sealring.testing import serve_edge

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "state")


def serving(
    backend: Any, keys: KeyFile, limits: Limits | None = None, tls: EdgeTls | None = None
) -> AbstractAsyncContextManager[int]:
    """By a clock that stands still, so that no limit is filled up again."""
    return serve_edge(backend, tls=tls, gate=Gate(keys, limits, clock=lambda: 0.0))


def client(port: int, key: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key=key, base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, timeout=200, **options
    )


async def test_openai_with_right_and_wrong_keys(backend: Any, keys: KeyFile) -> None:
    text, record = keys.create([Scope.INFERENCE])
    wrong = text[:-1] + ("a" if text[-1] != "a" else "b")
    expired = KeyFile(keys.file.parent, clock=lambda: 5.0).create([Scope.INFERENCE], seconds=1)[0]
    async with serving(backend, keys) as port, client(port, text) as right:
        answer = await right.chat.completions.create(model="demo", messages=MESSAGES, user="somebody")
        assert answer.choices[0].message.content == "Hello – ☃"
        stream = await right.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
        assert len([chunk async for chunk in stream]) == 5
        assert [model.id async for model in right.models.list()] == ["demo"]
        assert (await right.models.retrieve("demo")).id == "demo"
        assert backend.keys == [record.id, record.id]
        for each in (wrong, expired, "none"):
            async with client(port, each) as other:
                with pytest.raises(openai.AuthenticationError) as caught:
                    await other.chat.completions.create(model="demo", messages=MESSAGES)
                assert caught.value.code == "invalid_api_key"
                assert caught.value.response.headers["www-authenticate"] == "Bearer"
                assert each not in caught.value.response.text
        keys.revoke(record.id)
        with pytest.raises(openai.AuthenticationError):
            await right.chat.completions.create(model="demo", messages=MESSAGES)
    assert len(backend.requests) == 2


async def test_one_key_leaves_room_for_the_bodies_of_others(
    backend: Any, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MAX_HELD", 20_000)
    greedy, other = (keys.create([Scope.INFERENCE])[0] for _ in range(2))
    body = {"model": "demo", "messages": [{"role": "user", "content": "x" * 6000}]}
    async with (
        serving(backend, keys) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=200) as http,
    ):

        async def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code

        _, held = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {greedy}\r\n"
        head += "content-type: application/json\r\ncontent-length: 6001\r\n\r\n"
        held.write(head.encode() + b" " * 6000)
        async with asyncio.timeout(200):
            while await status(greedy) == 200:  # until the one that is held has been read as far as it came
                pass
        assert (await status(greedy), await status(other)) == (429, 200)
        held.close()


async def test_what_each_path_needs(backend: Any, keys: KeyFile) -> None:
    texts = {scope: keys.create([scope])[0] for scope in (Scope.INFERENCE, Scope.READ)}
    async with (
        serving(backend, keys) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=200) as http,
    ):

        async def status(method: str, path: str, text: str | None) -> int:
            headers = {} if text is None else {"authorization": f"Bearer {text}"}
            body = {"model": "demo", "messages": MESSAGES} if method == "POST" else None
            return (await http.request(method, path, headers=headers, json=body)).status_code

        for path in ("/metrics", "/v1/models", "/v1/models/demo", "/nowhere", "/docs"):
            assert await status("GET", path, None) == 401
        assert await status("POST", "/v1/chat/completions", None) == 401
        inference, read = texts[Scope.INFERENCE], texts[Scope.READ]
        assert await status("GET", "/metrics", inference) == 403
        assert await status("GET", "/metrics", read) == 200
        assert await status("POST", "/v1/chat/completions", read) == 403
        assert await status("GET", "/v1/models", read) == 200
        assert await status("GET", "/nowhere", read) == 404
        assert await status("GET", "/health/live", None) == 200
        health = await http.get("/health")
        assert (health.status_code, health.json()) == (200, {"status": "serving"})
        twice = [("authorization", f"Bearer {read}"), ("authorization", f"Bearer {read}")]
        assert (await http.get("/metrics", headers=twice)).status_code == 200
        assert (await http.get("/metrics", headers={"x-api-key": read})).status_code == 200
        both = {"x-api-key": read, "authorization": f"Bearer {read}"}
        assert (await http.get("/metrics", headers=both)).status_code == 200, "as Anthropic's SDK sends them"
        for other in (inference, "", "none"):
            differ = await http.get("/metrics", headers={**both, "x-api-key": other})
            assert (differ.status_code, differ.json()["error"]["code"]) == (401, "several_api_keys")
        for path in (
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/responses",
            "/api/chat",
            "/api/generate",
        ):
            assert await status("POST", path, read) == 403
        assert await status("GET", "/", None) == 200
        assert (await http.get("/health/live", headers={"host": "gateway.example"})).status_code == 200


async def test_limits_answer_429(backend: Any, keys: KeyFile) -> None:
    text = keys.create([Scope.INFERENCE])[0]
    backend.held = asyncio.Event()
    limits = Limits(key_per_second=1.0, key_at_once=1)
    async with serving(backend, keys, limits) as port, client(port, text) as openai_client:

        async def one() -> Any:
            return await openai_client.chat.completions.create(model="demo", messages=MESSAGES)

        first = asyncio.create_task(one())
        await until(lambda: backend.requests)
        with pytest.raises(openai.RateLimitError) as caught:
            await one()
        assert caught.value.code == "too_many_at_once"
        backend.held.set()
        await first
        with pytest.raises(openai.RateLimitError) as caught:
            while True:
                await one()
        assert caught.value.code == "rate_limited"
        assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_all_answers_of_a_body_count_for_its_key(backend: Any, keys: KeyFile) -> None:
    text = keys.create([Scope.INFERENCE])[0]
    async with (
        serving(backend, keys, Limits(key_at_once=4)) as port,
        client(port, text) as openai_client,
    ):
        for prompts, n, answers in ((4, 1, 4), (2, 3, 0), (5, 1, 0)):
            asked = openai_client.completions.create(model="demo", prompt=["x"] * prompts, n=n)
            if answers:
                assert len((await asked).choices) == answers
                continue
            with pytest.raises(openai.BadRequestError) as caught:
                await asked
            assert caught.value.code == "too_many_answers"


async def test_a_large_body_without_a_key_is_not_taken(backend: Any, keys: KeyFile) -> None:
    keys.create([Scope.INFERENCE])
    async with serving(backend, keys) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4000000\r\n\r\n")
        async with asyncio.timeout(200):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401")
        assert b"connection: close" in head.lower()
        writer.write_eof()
        async with asyncio.timeout(200):
            await reader.read()
        writer.close()
    assert not backend.requests


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def used_connection(port: int) -> Connection:
    """A connection whose first request is answered: limits that are lowered now hold from its next one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    async with asyncio.timeout(200):
        assert b'"live"' in await reader.readuntil(b"}")
    return reader, writer


@pytest.fixture
def header_limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the seconds for headers, and for bodies that nobody reads."""
    return lambda seconds: monkeypatch.setattr(protocol, "HEADER_SECONDS", seconds)


async def test_slow_headers_are_cut_off(port: int, header_limit: Callable[[float], None]) -> None:
    used = await used_connection(port)
    header_limit(0.1)
    silent = await asyncio.open_connection("127.0.0.1", port)
    trickling = await asyncio.open_connection("127.0.0.1", port)
    used[1].write(b"GET /heal")
    with contextlib.suppress(OSError):
        async with asyncio.timeout(200):
            for byte in b"GET /health/live HTTP/1.1\r\n" + b"a: b\r\n" * 2000:
                if trickling[0].at_eof():
                    break
                trickling[1].write(bytes([byte]))
                await asyncio.sleep(0.02)
    for reader, writer in (silent, trickling, used):
        with contextlib.suppress(OSError):
            async with asyncio.timeout(200):
                assert await reader.read() == b""
        writer.close()


async def test_a_body_that_nobody_wants_is_cut_off(
    backend: Any, keys: KeyFile, header_limit: Callable[[float], None]
) -> None:
    keys.create([Scope.INFERENCE])
    async with serving(backend, keys) as port:
        reader, writer = await used_connection(port)
        header_limit(0.1)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 60000\r\n\r\n")
        async with asyncio.timeout(200):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401")
        async with asyncio.timeout(200):
            with contextlib.suppress(OSError):
                while not reader.at_eof():
                    writer.write(b"x")
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await reader.read(100)
        writer.close()


async def test_who_sends_no_http_is_cut_off_after_the_answer(
    port: int, header_limit: Callable[[float], None]
) -> None:
    """It may leave its own direction open, and over TLS it is not told that ours has ended."""
    header_limit(0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"no HTTP\r\n\r\n")
    async with asyncio.timeout(200):
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
    writer.close()


async def test_an_answer_may_take_longer_than_headers(
    port: int, backend: Any, header_limit: Callable[[float], None]
) -> None:
    """A timer that still ran would be due before the one that lets the answer begin."""
    backend.held = asyncio.Event()
    reader, writer = await used_connection(port)
    header_limit(0.05)
    body = b'{"model": "demo", "messages": [{"role": "user", "content": "hello"}]}'
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    async with asyncio.timeout(200):
        await until(lambda: backend.requests)
        asyncio.get_running_loop().call_later(0.1, backend.held.set)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_long_headers_are_refused(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nx-long: ")
    sent = 0
    while sent <= protocol.MAX_HEADER_BYTES and not reader.at_eof():
        writer.write(b"x" * 1024)
        sent += 1024
        await asyncio.sleep(0.02)
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(200):
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()


def test_a_gateway_that_starts_again_gets_its_port_again() -> None:
    """Though connections of the one before have not quite gone."""
    server = HttpServer(lambda *_: None)  # type: ignore[arg-type]
    server.listen("127.0.0.1:0")
    assert server.bound is not None
    with server.bound as bound:
        assert bound.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)


async def test_tls(backend: Any, keys: KeyFile, tmp_path: Path) -> None:
    certificate, key = write_edge_certificate(tmp_path)
    text = keys.create([Scope.INFERENCE])[0]
    tls = EdgeTls(certificate, key)
    async with serving(backend, keys, tls=tls) as port:
        headers = {"authorization": f"Bearer {text}"}
        for _ in range(2):
            trust = ssl.create_default_context(cafile=str(certificate))
            async with httpx.AsyncClient(
                base_url=f"https://127.0.0.1:{port}", verify=trust, timeout=200
            ) as http:
                assert (await http.get("/v1/models", headers=headers)).status_code == 200
            write_edge_certificate(tmp_path)
            await tls.refresh()
        with pytest.raises(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=200) as plain:
                await plain.get(f"http://127.0.0.1:{port}/health")


def certificate_of(tls: EdgeTls) -> bytes:
    """The certificate, as DER, for a client that can speak HTTP/2 as well."""
    ways = ssl.MemoryBIO(), ssl.MemoryBIO()
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    anybody.set_alpn_protocols(["h2", "http/1.1"])
    client = anybody.wrap_bio(ways[0], ways[1])
    server = tls.context.wrap_bio(ways[1], ways[0], server_side=True)
    for end in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    assert client.selected_alpn_protocol() == "http/1.1"
    found = client.getpeercert(binary_form=True)
    assert found is not None
    return found


async def test_tls_files_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = write_edge_certificate(tmp_path)
    other = write_edge_certificate(tmp_path, "other")[1]
    with pytest.raises(ConfigError) as caught:
        EdgeTls(certificate, other)
    assert caught.value.reason == "BAD_TLS_FILES"
    with pytest.raises(ConfigError, match="No such file") as missing:
        EdgeTls(tmp_path / "none", key)
    assert missing.value.reason == "BAD_TLS_FILES"
    long = tmp_path / "long.pem"
    long.write_bytes(certificate.read_bytes().ljust(1 << 18, b"\n"))
    EdgeTls(long, key)
    long.write_bytes(long.read_bytes() + b"\n")
    with pytest.raises(ConfigError, match="larger"):
        EdgeTls(long, key)
    other.chmod(0o644)
    with pytest.raises(ConfigError) as wide:
        EdgeTls(certificate, other)
    assert wide.value.reason == "SECRET_FILE_UNSAFE"
    tls = EdgeTls(certificate, key)
    served = certificate_of(tls)
    for file, content in ((key, b"nonsense"), (certificate, (tmp_path / "other.pem").read_bytes())):
        file.write_bytes(content)
        await tls.refresh()
        assert certificate_of(tls) == served, "half of a change is none"
    monkeypatch.setattr(edge_tls, "LOOK_SECONDS", 0.01)
    with structlog.testing.capture_logs() as logs:
        task = asyncio.create_task(tls.run())
        await until(lambda: logs)
    write_edge_certificate(tmp_path)
    await until(lambda: certificate_of(tls) == ssl.PEM_cert_to_DER_cert(certificate.read_text()))
    task.cancel()


async def test_with_tls_1_2_only_authenticated_suites_are_offered(tmp_path: Path) -> None:
    tls = EdgeTls(*write_edge_certificate(tmp_path))
    offered = [one["name"] for one in tls.context.get_ciphers() if one["protocol"] == "TLSv1.2"]
    assert offered
    assert all("GCM" in name or "CHACHA20" in name for name in offered)
