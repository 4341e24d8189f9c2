"""Bodies up to each limit, and how they come."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from sealring.edge.http import body
from sealring.edge.http.body import parse_object, read_body
from sealring.mesh.errors import Cancelled, DeadlineExceeded, InvalidInput, SealringError


def reason(data: bytes) -> str:
    try:
        parse_object(data)
    except InvalidInput as error:
        return error.reason
    return ""


def test_bounds_of_values_members_and_digits() -> None:
    for value, commas in (
        (b"[]", 32_765),
        (b"{}", 32_765),
        (b"0", 262_144),
    ):  # and two around them
        assert reason(b'{"a":[' + (value + b",") * commas + value + b"]}") == ""
        assert reason(b'{"a":[' + (value + b",") * (commas + 1) + value + b"]}") == "TOO_MANY_VALUES"
    members = [b'"%d":0' % number for number in range(513)]
    assert reason(b"{" + b",".join(members[:512]) + b"}") == ""
    assert reason(b"{" + b",".join(members) + b"}") == "TOO_MANY_VALUES"
    for sign in (b"", b"-"):
        assert reason(b'{"a":%s}' % (sign + b"9" * 20)) == ""
        assert reason(b'{"a":%s}' % (sign + b"9" * 21)) == "BAD_JSON"
    assert parse_object(b'{"%s":["%s",0.%s]}' % ((b"9" * 30,) * 3)) == {"9" * 30: ["9" * 30, 1.0]}
    for number, expected in ((b"-1.5e308", ""), (b"1e309", "BAD_JSON"), (b"-1E999", "BAD_JSON")):
        assert reason(b'{"a":%s}' % number) == expected
    for quotes, expected in ((4 * 32_768, "BAD_JSON"), (4 * 32_768 + 1, "TOO_MANY_VALUES")):
        assert reason(b'"' * quotes) == expected


def request(*parts: bytes, kind: str = "application/json", **headers: str) -> Any:
    held: list[int] = []

    async def stream() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    state = SimpleNamespace(share=SimpleNamespace(take=held.append))
    return SimpleNamespace(headers={"content-type": kind, **headers}, stream=stream, state=state, held=held)


async def refused(made: Any) -> SealringError:
    with pytest.raises(SealringError) as caught:
        await read_body(made)
    return caught.value


def with_text(size: int, *images: bytes) -> bytes:
    """A body with `size` bytes beside its images."""
    shown = b",".join(b'"%s"' % image for image in images)
    text = b'{"a":["' + b" " * (size - 11 - len(shown) + sum(map(len, images))) + b'",' + shown + b"]}"
    assert len(text) == size + sum(map(len, images))
    return text


IMAGES = [b"data:image/png;base64," + b"ab+/" * 9999 + b"ab==", b"ab\\/z" * 999_999, b"iVBO" * 1024]


def test_a_body_has_at_most_four_mebibytes_beside_its_images() -> None:
    most = 4 << 20
    assert len(parse_object(with_text(most, *IMAGES))["a"]) == 4
    assert reason(with_text(most + 1, *IMAGES)) == "BODY_TOO_LARGE"
    for text in (b"ab-/" * 1024, b"ab" * 2047, b"data:image/png;base64,a " + b"a" * 9999):
        assert reason(with_text(most, text)) == "BODY_TOO_LARGE"


async def test_a_body_has_at_most_36_mebibytes_declared_or_not() -> None:
    most = 36 << 20
    whole = b'{"a":"' + b"x" * (most - 8) + b'"}'
    made = request(whole[:5], whole[5:], **{"content-length": str(most)})
    assert list(parse_object(await read_body(made))) == ["a"]
    assert made.held == [5, most - 5]
    assert (await refused(request(whole, b" "))).reason == "BODY_TOO_LARGE"
    made = request(b"{}", **{"content-length": str(most + 1)})
    assert (await refused(made)).reason == "BODY_TOO_LARGE"
    assert made.held == []
    assert (await refused(request(b"{}", **{"content-length": "9" * 30}))).reason == "BODY_TOO_LARGE"
    assert await read_body(request(b"{}", **{"content-length": "x"})) == b"{}"


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        'application/json; charset="UTF8"',
        " application/json ;",
        "application/json; odata=verbose; charset=utf-8",
    ],
)
async def test_json_in_utf_8_is_taken(kind: str) -> None:
    assert await read_body(request(b"{}", kind=kind)) == b"{}"


@pytest.mark.parametrize("kind", ["", "text/json", "application/json; charset=latin-1", "application/jsonp"])
async def test_nothing_else_is(kind: str) -> None:
    assert (await refused(request(b"{}", kind=kind))).reason == "BAD_CONTENT_TYPE"


async def test_a_body_that_is_compressed_is_refused_as_such() -> None:
    assert await read_body(request(b"{}", **{"content-encoding": "Identity"})) == b"{}"
    error = await refused(request(b"\x1f\x8b", **{"content-encoding": "gzip"}))
    assert (error.reason, "gzip" in error.message) == ("BODY_ENCODED", True)


def test_a_byte_order_mark_before_json_is_no_part_of_it() -> None:
    assert parse_object(b'\xef\xbb\xbf{"a":1}') == {"a": 1}


async def test_programs_may_leave_it_out_and_pages_may_not() -> None:
    made = request(b"{}")
    del made.headers["content-type"]
    assert await read_body(made) == b"{}"
    made.headers["origin"] = "https://example.com"
    assert (await refused(made)).reason == "BAD_CONTENT_TYPE"


async def test_a_body_that_does_not_come_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = request()

    async def leaves() -> AsyncIterator[bytes]:
        yield b"{"
        raise ClientDisconnect

    made.stream = leaves
    assert isinstance(await refused(made), Cancelled)

    async def waits() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    made.stream = waits
    monkeypatch.setattr(body, "BODY_SECONDS", 0.01)
    error = await refused(made)
    assert isinstance(error, DeadlineExceeded)
    assert error.reason == "BODY_TOO_SLOW"


async def test_ollamas_documented_command_is_told_its_header(port: int) -> None:
    """curl declares a form, which a page of another site could send too. It is refused with the header."""
    line = """curl http://localhost:11434/api/chat -d '{
      "model": "demo", "messages": [{ "role": "user", "content": "why is the sky blue?" }]
    }'"""
    words = shlex.split(line.replace("localhost:11434", f"127.0.0.1:{port}"))

    async def answered(*words: str) -> str:
        pipe = asyncio.subprocess.PIPE
        done = await asyncio.create_subprocess_exec(*words, "-sS", "-w", "%{http_code}", stdout=pipe)
        return (await done.communicate())[0].decode()

    refused = await answered(*words)
    assert refused.endswith("415")
    (header,) = re.findall(r"curl (-H '[^']+')", json.loads(refused[:-3])["error"])
    assert (await answered(*words, *shlex.split(header))).endswith("200")
