"""Bytes that no client of ours would send."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from patience import until

from sealring.edge.http import guard
from sealring.edge.http.body import MAX_MEMBERS, MAX_VALUES
from sealring.edge.http.protocol import MAX_HEADER_BYTES, MAX_HEADERS, MIN_CHUNK_BYTES
from sealring.mesh.errors import InvalidInput, SealringError

CHAT = b"/v1/chat/completions"
GOOD = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


async def exchange(port: int, data: bytes, *, more: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    """Sends bytes and reads the whole response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if more:
            writer.write(more)
        async with asyncio.timeout(200):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        lines = head.split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return int(lines[0].split()[1]), headers, body
    finally:
        writer.close()


def post(
    body: bytes, *, path: bytes = CHAT, kind: bytes = b"application/json", host: bytes = b"127.0.0.1"
) -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (
        path,
        host,
        kind,
        len(body),
        body,
    )


async def refused(port: int, body: bytes, **how: Any) -> dict[str, Any]:
    status, headers, answer = await exchange(port, post(body, **how))
    error: dict[str, Any] = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert headers["x-request-id"]
    assert b"SECRET" not in answer
    return {"status": status, **error}


async def test_broken_bodies(port: int) -> None:
    assert (await refused(port, b"{"))["code"] == "bad_json"
    assert (await refused(port, b""))["code"] == "bad_json"
    assert (await refused(port, b"[]"))["code"] == "bad_json"
    assert (await refused(port, b"[" * 30_000))["code"] == "bad_json"
    assert (await refused(port, b'{"model": "SECRET\xff"}'))["code"] == "bad_utf8"
    assert (await refused(port, b'{"model": "demo", "temperature": NaN}'))["code"] == "bad_json"
    assert (await refused(port, b'{"model": "demo", "seed": %s}' % (b"9" * 4000)))["code"] == "bad_json"
    assert (await refused(port, b'{"model": "demo", "model": "demo"}'))["code"] == "bad_json"
    assert (await refused(port, b'{"messages": [{"role": "user", "role": "user"}]}'))["code"] == "bad_json"
    crowd = b",".join(b'"%d": 0' % number for number in range(MAX_MEMBERS + 1))
    assert (await refused(port, b'{"messages": [{%s}]}' % crowd))["code"] == "too_many_values"
    error = await refused(port, json.dumps(GOOD).encode(), kind=b"text/plain")
    assert (error["status"], error["code"]) == (415, "bad_content_type")
    error = await refused(port, json.dumps(GOOD).encode(), kind=b"application/json; charset=utf-16")
    assert error["status"] == 415


async def test_bad_fields_over_http(port: int, backend: Any) -> None:
    error = await refused(port, json.dumps({**GOOD, "top_p": 2}).encode())
    assert (error["status"], error["code"], error["param"]) == (400, "bad_field", "top_p")
    error = await refused(port, json.dumps({**GOOD, "best_of": 2}).encode())
    assert (error["status"], error["code"], error["param"]) == (400, "unsupported_field", "best_of")
    assert backend.requests == []


async def test_missing_fields_and_surrogates(port: int) -> None:
    assert (await refused(port, b"{}"))["code"] == "missing_field"
    body = b'{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}]}'
    assert (await refused(port, body))["code"] in ("bad_utf8", "bad_json")


async def test_a_refused_body_is_given_back_at_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the next collection of garbage, by when there may be hundreds of them."""
    refusals: list[weakref.ref[BaseException]] = []

    inner = guard.known_error

    def known(error: Exception, path: str, usable: Sequence[str]) -> SealringError:
        assert error.__context__ is not None
        refusals.extend((weakref.ref(error), weakref.ref(error.__context__)))
        return inner(error, path, usable)

    monkeypatch.setattr(guard, "known_error", known)
    gc.disable()
    try:
        assert (await refused(port, b"{"))["code"] == "bad_json"
        assert [one() for one in refusals] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_that_a_ring_refuses_is_given_back_at_once(
    port: int, backend: Any, stream: bool
) -> None:
    """Tasks and frames that hold the prompt hold the error, too, and it holds them."""
    gc.disable()
    try:
        backend.error = InvalidInput("the prompt is too long", reason="CONTEXT_TOO_SMALL")
        error = weakref.ref(backend.error)
        assert (await refused(port, json.dumps(GOOD | {"stream": stream}).encode()))["status"] == 400
        backend.error = None
        await until(lambda: error() is None)
    finally:
        gc.enable()


async def test_a_huge_body_is_refused_unread(port: int) -> None:
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % CHAT
    status, headers, body = await exchange(port, head + b"content-length: 104857600\r\n\r\n")
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
    assert headers["connection"] == "close"


async def test_a_body_of_too_many_values_is_refused(port: int) -> None:
    flood = b"{" + b",".join(b'"%d":0' % number for number in range(MAX_VALUES + 1)) + b"}"
    for body in (flood, b'{"messages": [' + b"[]," * MAX_VALUES + b"[]]}", b'"' * (5 * MAX_VALUES)):
        error = await refused(port, body)
        assert (error["status"], error["code"]) == (400, "too_many_values")
    text = json.dumps(GOOD).encode().replace(b"hello", b'{[,\\\\\\",:' * MAX_VALUES)
    status, _, _ = await exchange(port, post(text))
    assert status == 200


HEAD = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % CHAT


@pytest.mark.parametrize(
    "more",
    [
        b"a: b\r\n" * MAX_HEADERS,
        b"a:\r\n" * 10_000,
        b"a: " + b"b" * MAX_HEADER_BYTES + b"\r\n",
        b"transfer-encoding: gzip, chunked\r\n",
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: -1\r\n",
    ],
)
async def test_heads_that_are_not_taken_end_the_connection(port: int, backend: Any, more: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + more + b"\r\n")
    writer.write(post(json.dumps(GOOD).encode()))  # which must not be taken for a request of its own
    writer.write_eof()
    async with asyncio.timeout(200):
        answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head
    assert json.loads(body)["error"]["code"] == "bad_http"
    assert backend.requests == []
    writer.close()


SOCKET = (
    b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


@pytest.mark.parametrize(
    "more",
    [
        b"content-length: 5\r\n\r\nhello",
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"a: " + b"b" * (MAX_HEADER_BYTES * 3 // 4) + b"\r\n\r\n",
    ],
)
async def test_a_websocket_that_cannot_be_opened_is_answered(port: int, more: bytes) -> None:
    """Two parsers read its head: what the second does not take waits for nobody."""
    answer = await until_closed(port, SOCKET + more)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert json.loads(body)["error"]["code"] == "bad_http"
    assert "WebSocket" in json.loads(body)["error"]["message"]


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + framed


async def test_a_body_in_chunks_is_taken_unless_they_are_tiny(port: int, backend: Any) -> None:
    body = json.dumps(GOOD).encode().ljust(1000)
    for size in (1000, MIN_CHUNK_BYTES):
        status, _, _ = await exchange(port, chunked(body, size))
        assert status == 200
    assert len(backend.requests) == 2
    status, headers, answer = await exchange(port, chunked(body, 1))
    assert (status, json.loads(answer)["error"]["code"]) == (400, "bad_http")
    assert headers["connection"] == "close"
    assert len(backend.requests) == 2


async def until_closed(port: int, data: bytes) -> bytes:
    """Everything that is answered to some bytes until the gateway ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(200):
            return await reader.read()
    finally:
        writer.close()


async def test_a_request_whose_body_is_malformed_is_answered_once_and_by_nobody_else(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    head = HEAD.replace(CHAT, b"/nowhere")
    answer = await until_closed(port, head + b"transfer-encoding: chunked\r\n\r\nzz\r\n")
    assert (await exchange(port, b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"))[0] == 200
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("path", [CHAT, b"/nowhere"])
async def test_what_follows_an_answer_to_who_waits_to_send_a_body_is_no_request(
    port: int, backend: Any, path: bytes
) -> None:
    head = b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: text/plain\r\n" % path
    waits = head + b"content-length: 5\r\nexpect: 100-continue\r\n\r\n"
    status, headers, _ = await exchange(port, waits)
    assert (status, headers["connection"]) == (404 if path == b"/nowhere" else 415, "close")
    answer = await until_closed(port, waits + b"GET x" + post(json.dumps(GOOD).encode()))
    assert answer.count(b"HTTP/1.1") == 1
    assert backend.requests == []


async def test_bodies_of_all_requests_together_are_bounded(
    port: int, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MAX_HELD", 20_000)
    text = {**GOOD, "messages": [{"role": "user", "content": "x" * 6000}]}
    whole = post(json.dumps(text).encode())
    _, held = await asyncio.open_connection("127.0.0.1", port)
    held.write(whole[:-1])
    while (await exchange(port, whole))[
        0
    ] == 200:  # until the one that is held has been read as far as it came
        pass
    status, headers, body = await exchange(port, whole)
    assert (status, json.loads(body)["error"]["code"]) == (429, "too_many_bytes")
    assert int(headers["retry-after"]) > 0
    assert (await exchange(port, post(json.dumps(GOOD).encode())))[0] == 200
    held.close()
    while (await exchange(port, whole))[0] != 200:
        pass


async def test_paths_methods_and_hosts(port: int) -> None:
    status, _, body = await exchange(port, b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (status, json.loads(body)["error"]["code"]) == (404, "no_such_path")
    status, headers, body = await exchange(port, b"GET %s HTTP/1.1\r\nhost: LOCALHOST:80\r\n\r\n" % CHAT)
    assert (status, json.loads(body)["error"]["code"]) == (405, "method_not_allowed")
    assert headers["allow"] == "POST"
    error = await refused(port, json.dumps(GOOD).encode(), host=b"evil.example:8080")
    assert (error["status"], error["code"]) == (403, "host_not_allowed")
    status, headers, _ = await exchange(
        port, b"OPTIONS %s HTTP/1.1\r\nhost: localhost\r\norigin: http://evil.example\r\n\r\n" % CHAT
    )
    assert status == 405
    assert not any(name.startswith("access-control") for name in headers)


async def test_garbage_is_no_http(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"\x16\x03\x01\x02\x00\x01\x00" + b"\xff" * 100 + b"\r\n\r\n")
    async with asyncio.timeout(200):
        assert (await reader.read(1000)).startswith(b"HTTP/1.1 400")
    writer.close()
