"""Bytes that no client of ours would send."""

from __future__ import annotations

import asyncio
import json
from typing import Any

CHAT = b"/v1/chat/completions"
GOOD = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


async def exchange(port: int, data: bytes, *, more: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    """Sends bytes and reads the whole response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if more:
            writer.write(more)
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode("latin-1")
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
    assert (await refused(port, b"[" * 100_000))["code"] == "bad_json"
    assert (await refused(port, b'{"model": "SECRET\xff"}'))["code"] == "bad_utf8"
    assert (await refused(port, b'{"model": "demo", "temperature": NaN}'))["code"] == "bad_json"
    error = await refused(port, json.dumps(GOOD).encode(), kind=b"text/plain")
    assert (error["status"], error["code"]) == (415, "bad_content_type")
    error = await refused(port, json.dumps(GOOD).encode(), kind=b"application/json; charset=utf-16")
    assert error["status"] == 415


async def test_bad_fields_over_http(port: int, backend: Any) -> None:
    error = await refused(port, json.dumps({**GOOD, "top_p": 0}).encode())
    assert (error["status"], error["code"], error["param"]) == (400, "bad_field", "top_p")
    error = await refused(port, json.dumps({**GOOD, "best_of": 2}).encode())
    assert (error["status"], error["code"], error["param"]) == (400, "unsupported_field", "best_of")
    assert backend.requests == []


async def test_missing_fields_and_surrogates(port: int) -> None:
    assert (await refused(port, b"{}"))["code"] == "missing_field"
    body = b'{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}]}'
    assert (await refused(port, body))["code"] in ("bad_utf8", "bad_json")


async def test_a_huge_body_is_refused_unread(port: int) -> None:
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % CHAT
    status, headers, body = await exchange(port, head + b"content-length: 104857600\r\n\r\n")
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
    assert headers["connection"] == "close"
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    status, _, body = await exchange(port, head + b"transfer-encoding: chunked\r\n\r\n", more=chunk * 80)
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")


async def test_paths_methods_and_hosts(port: int) -> None:
    status, _, body = await exchange(port, b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (status, json.loads(body)["error"]["code"]) == (404, "no_such_path")
    status, headers, body = await exchange(port, b"GET %s HTTP/1.1\r\nhost: [::1]:80\r\n\r\n" % CHAT)
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
    assert (await asyncio.wait_for(reader.read(1000), 10)).startswith(b"HTTP/1.1 400")
    writer.close()
