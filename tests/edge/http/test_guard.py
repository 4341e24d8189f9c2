"""The outermost layer by itself: counts, bytes, and the part of a refused body that is read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from sealring.edge.access.gate import Gate, Limits
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope
from sealring.edge.http import guard
from sealring.edge.http.app import PATHS
from sealring.edge.http.guard import Guard, _drain, _has_small_body, known_error
from sealring.mesh.errors import Conflict, InvalidInput, ResourceExhausted


def scope(**fields: Any) -> dict[str, Any]:
    headers = {"host": "localhost", **fields.pop("headers", {})}
    packed = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {
        "type": "http",
        "method": "GET",
        "path": "/v1/models",
        "client": ("127.0.0.1", 5),
        "headers": packed,
        "query_string": b"",
    } | fields


async def nothing() -> Any:
    return {"type": "http.request", "body": b"", "more_body": False}


class Sent(list[Any]):
    async def __call__(self, message: Any) -> None:
        self.append(message)

    @property
    def status(self) -> int:
        return int(next(one["status"] for one in self if one["type"] == "http.response.start"))


def address(number: int) -> dict[str, Any]:
    return {"client": (f"192.0.2.{number}", 5)}


async def test_so_many_requests_are_under_way_and_none_has_those_that_are_left_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "MAX_REQUESTS", 4)
    held = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await held.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    outer = Guard(app, Gate(None), PATHS)
    tasks = []
    for number, status in ((1, 200), (1, 200), (1, 429), (2, 200), (2, 429), (3, 429)):
        sent = Sent()
        tasks.append((asyncio.create_task(outer(scope(**address(number)), nothing, sent)), sent, status))
        await asyncio.sleep(0)
    refused = tasks[2][1]
    assert (b"retry-after", b"1") in refused[0]["headers"]
    held.set()
    for task, sent, status in tasks:
        await task
        assert sent.status == status
    await outer(scope(), nothing, again := Sent())
    assert again.status == 200
    assert (len(outer.under_way), len(outer.held)) == (0, 0)


async def test_what_strangers_ask_and_a_socket_that_asks_nothing_are_not_under_way(tmp_path: Path) -> None:
    """They find no room beside each other, and take none from those with keys. Liveness asks nobody."""
    keys = KeyFile(tmp_path / "state")
    text = keys.create([Scope.INFERENCE])[0]
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["path"], len(outer.under_way)))

    gate = Gate(keys, Limits(key_at_once=1, peer_per_second=1e-6))
    outer = Guard(app, gate, PATHS)
    for path, kind in (("/health", "http"), ("/v1/responses", "websocket"), ("/v1/models", "http")):
        key = {} if path == "/health" else {"authorization": f"Bearer {text}"}
        await outer(scope(type=kind, path=path, headers=key), nothing, Sent())
    for _ in range(3):
        await outer(scope(path="/health/live"), nothing, Sent())
        await outer(scope(path="/health"), nothing, refused := Sent())
        assert refused.status == 429
    live = [("/health/live", 0)] * 3
    assert seen == [("/health", 0), ("/v1/responses", 0), ("/v1/models", 1), *live]


async def test_every_answer_has_an_id_and_its_type_is_not_guessed() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"own", b"1")]})

    sent = Sent()
    await Guard(app, Gate(), PATHS)(scope(), nothing, sent)
    headers = dict(sent[0]["headers"])
    request_id = headers[b"x-request-id"]
    assert len(request_id) == 24
    assert headers == {
        b"own": b"1",
        b"x-request-id": request_id,
        b"request-id": request_id,
        b"x-content-type-options": b"nosniff",
    }


async def test_what_is_no_http_is_not_answered() -> None:
    await Guard(None, Gate(None), PATHS)({"type": "lifespan"}, nothing, sent := Sent())  # type: ignore[arg-type]
    assert sent == []


async def test_no_key_holds_more_than_is_left_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_HELD", 10)
    for sizes, status in (((5,), 200), ((6,), 429), ((2, 3), 200), ((2, 4), 429)):

        async def app(scope: Any, receive: Any, send: Any, sizes: Any = sizes) -> None:
            for size in sizes:
                scope["state"]["share"].take(size)
            await send({"type": "http.response.start", "status": 200, "headers": []})

        outer = Guard(app, Gate(None), PATHS)
        await outer(scope(), nothing, sent := Sent())
        assert sent.status == status, sizes
        assert not outer.held


async def test_of_who_is_refused_so_much_is_read_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "DRAIN_BYTES", 10)
    for size, count in ((5, 2), (3, 4), (9, 2), (10, 1)):
        reads = []

        async def endless(size: int = size, reads: list[int] = reads) -> Any:
            reads.append(size)
            return {"type": "http.request", "body": bytes(size), "more_body": True}

        await _drain(endless)
        assert len(reads) == count
    for last in ({"type": "http.request", "body": b"1"}, {"type": "http.disconnect"}):
        messages = [{"type": "http.request", "body": b"1", "more_body": True}, last, None]

        async def receive(messages: list[Any] = messages) -> Any:
            return messages.pop(0)

        await _drain(receive)
        assert messages == [None]


async def test_of_bodies_that_are_read_on_the_oldest_of_who_has_most_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "MAX_DRAINS", 3)
    outer, tasks = Guard(None, Gate(None), PATHS), list[asyncio.Task[None]]()  # type: ignore[arg-type]

    async def silent() -> Any:
        await asyncio.Event().wait()

    async def come(number: int) -> None:
        foreign = scope(headers={"host": "x", "content-length": "1000000"}, **address(number))
        tasks.append(asyncio.create_task(outer(foreign, silent, Sent())))
        for _ in range(20):
            await asyncio.sleep(0)

    for number in (2, 1, 1, 1):
        await come(number)
    assert [task.done() for task in tasks] == [False, True, False, False]
    await come(3)
    assert [task.done() for task in tasks] == [False, True, True, False, False]
    assert (len(outer.drains), len(outer.under_way)) == (3, 0)
    monkeypatch.setattr(guard, "_DRAIN_SECONDS", 0.0)
    await come(2)
    assert tasks[-1].done(), "its time is over"
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize(
    ("headers", "small"),
    [
        ({}, True),
        ({"content-length": "0"}, True),
        ({"content-length": "65536"}, True),
        ({"content-length": "65537"}, False),
        ({"content-length": "00065536"}, True),
        ({"content-length": "000065536"}, False),
        ({"transfer-encoding": "chunked"}, False),
        ({"transfer-encoding": "chunked", "content-length": "1"}, False),
    ],
)
def test_what_is_read_before_an_answer_to_who_was_not_asked(headers: dict[str, str], small: bool) -> None:
    assert _has_small_body(scope(headers=headers)) is small


def test_what_is_not_ours_is_masked() -> None:
    known = Conflict("x")
    assert known_error(known, "/") is known
    for status, reason in ((404, "NO_SUCH_PATH"), (405, "METHOD_NOT_ALLOWED"), (418, "INTERNAL")):
        assert known_error(HTTPException(status, "SECRET"), "/").reason == reason
    assert known_error(HTTPException(405, headers={"Allow": "GET"}), "/").metadata["allow"] == "GET"
    assert "SECRET" not in str(known_error(ValueError("SECRET"), "/"))
    missing = known_error(HTTPException(404), "/" + "x" * 99, PATHS.usable())
    assert missing.message == f"'/{'x' * 79}' is not served"
    assert missing.hint.startswith("the paths here are: /v1/chat/completions, /v1/completions, ")
    assert "/metrics" not in missing.hint


async def test_a_failure_of_ours_is_masked_and_one_after_the_start_ends_the_answer() -> None:
    for begins in (False, True):

        async def app(scope: Any, receive: Any, send: Any, begins: bool = begins) -> None:
            if begins:
                await send({"type": "http.response.start", "status": 200, "headers": []})
            raise ValueError("SECRET")

        await Guard(app, Gate(None), PATHS)(scope(), nothing, sent := Sent())
        assert "SECRET" not in str(sent)
        assert [one["type"] for one in sent].count("http.response.start") == 1
        assert sent.status == (200 if begins else 500)
        names = {name for name, _ in sent[0]["headers"]}
        assert {b"x-request-id", b"x-content-type-options"} <= names


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8080", 200),
        ("127.0.0.1", 200),
        ("[::1]", 200),
        ("[::1]:8080", 200),
        ("[localhost]", 403),
        ("[127.0.0.1]:8080", 403),
        ("evil.example", 403),
        ("evil.example:80", 403),
        ("", 403),
    ],
)
async def test_without_keys_only_this_machines_names_are_answered(host: str, status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    await Guard(app, Gate(None), PATHS)(scope(headers={"host": host}), nothing, sent := Sent())
    assert sent.status == status


@pytest.mark.parametrize(
    ("host", "length", "error", "closes"),
    [
        ("localhost", 1 << 20, Conflict("x"), False),  # who was let in: its body was asked for
        ("localhost", 1 << 20, InvalidInput("x", reason="BODY_TOO_LARGE"), True),
        ("localhost", 1 << 20, ResourceExhausted("x", reason="TOO_MANY_BYTES"), True),
        ("localhost", 1, Conflict("x"), False),
        ("evil.example", 1 << 16, None, False),
        ("evil.example", (1 << 16) + 1, None, True),
    ],
)
async def test_a_connection_is_closed_where_a_large_body_was_not_read(
    host: str, length: int, error: Exception | None, closes: bool
) -> None:
    async def app(*_: Any) -> None:
        assert error is not None, "it is refused before"
        raise error

    headers = {"host": host, "content-length": str(length)}
    await Guard(app, Gate(None), PATHS)(scope(headers=headers), nothing, sent := Sent())
    assert ((b"connection", b"close") in sent[0]["headers"]) == closes
    assert b"".join(one.get("body", b"") for one in sent[1:]).startswith(b'{"error"')
    assert not sent[-1].get("more_body")
