"""Request bodies: bounded in length, time and number of values, JSON in UTF-8 and nothing else.

Parsing holds the interpreter lock, so no other thread would keep the streams of others going meanwhile. What
a body may hold is bounded instead, by counting before anything is built of it. Of long bodies, which can be a
prompt of 100,000 tokens each, one is parsed in a turn of the event loop.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from sealring.edge.access.turns import Turns
from sealring.mesh.crypto.encoding import FormatError, unique_object
from sealring.mesh.errors import Cancelled, DeadlineExceeded, InvalidInput
from sealring.mesh.prompt.images import MAX_IMAGES_BYTES
from sealring.mesh.prompt.tools import finite

MAX_TEXT = 4 << 20
"""Bytes of a body beside its images."""

MAX_BODY = MAX_TEXT + MAX_IMAGES_BYTES // 3 * 4
"""Bytes of a body whose images are in base64."""

MAX_VALUES = 1 << 15
"""JSON texts, arrays and objects in one body. The longest conversation that is taken has 4096 messages of
about four each."""

MAX_NUMBERS = 1 << 18
"""Values in one body altogether: a prompt of token ids is an array of numbers, each of which costs little."""

MAX_MEMBERS = 512
"""Members of one JSON object; a body has fewer fields, and a request fewer biased tokens."""

MAX_DIGITS = 20
"""Digits of a whole number, which is enough for 64 bits."""

_ALL_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_TOO_LONG = b"0" * (MAX_DIGITS + 1)

BODY_SECONDS = 30.0
"""The time for each MAX_TEXT bytes of a body, begun ones too."""

_LONG_TEXT = 4 << 10
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=\\"
"""The characters of base64 in JSON, where a slash may be escaped."""

_LONGEST_HEAD = 256

LONG_BODY = 64 << 10
"""Bytes of a body that has turns: to parse and translate it takes a millisecond and more."""


class BodyTurns:
    """Turns of long bodies: their parsing and translation, some 20 ms for a prompt of 100,000 tokens in 400
    messages, is never twice in one turn of the event loop. Keys take turns, or without keys addresses."""

    def __init__(self) -> None:
        self._turns = Turns(1)

    @asynccontextmanager
    async def turn_of(self, body: bytes, name: str) -> AsyncIterator[None]:
        """Waits for the turn of a long body, charged to `name`."""
        if len(body) < LONG_BODY:
            yield
            return
        async with self._turns.turn(name):
            await asyncio.sleep(0)
            yield


async def read_body(request: Request) -> bytes:
    """The bytes of a body that is declared to be JSON.

    Raises InvalidInput (BAD_CONTENT_TYPE, BODY_ENCODED, BODY_TOO_LARGE), DeadlineExceeded (BODY_TOO_SLOW),
    ResourceExhausted (TOO_MANY_BYTES), and Cancelled when the client goes away.
    """
    _check_content_type(request.headers)
    _check_encoding(request.headers)
    begun = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(BODY_SECONDS) as limit:
            body = await _read(
                request, lambda size: limit.reschedule(begun + BODY_SECONDS * (1 + size // MAX_TEXT))
            )
    except TimeoutError:
        raise DeadlineExceeded(
            f"{MAX_TEXT >> 20} MiB of the body did not arrive within {BODY_SECONDS:g} s",
            reason="BODY_TOO_SLOW",
        ) from None
    except ClientDisconnect:
        raise Cancelled("the client went away") from None
    return body


def parse_object(body: bytes) -> dict[str, Any]:
    """Parses one JSON object.

    Raises InvalidInput: BAD_UTF8, BAD_JSON, BODY_TOO_LARGE, TOO_MANY_VALUES. Messages hold nothing of the
    body.
    """
    body = body.removeprefix(codecs.BOM_UTF8)  # which some editors and shells write
    outside = _outside_texts(body)
    # a call for each of 100,000 token ids would cost more than all else
    parse_int = _whole_number if _TOO_LONG in outside.translate(_ALL_DIGITS) else None
    try:
        value = json.loads(
            body.decode(),
            object_pairs_hook=_object,
            parse_int=parse_int,
            parse_float=_finite,
            parse_constant=_no_number,
        )
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the body is not UTF-8 at byte {error.start}", reason="BAD_UTF8") from None
    except (ValueError, RecursionError):
        raise InvalidInput("the body is not valid JSON", reason="BAD_JSON") from None
    if not isinstance(value, dict):
        raise InvalidInput("the body is not a JSON object", reason="BAD_JSON")
    return value


def _outside_texts(body: bytes) -> bytes:
    """The part of JSON that is outside of its texts, which are every other piece between quotes.

    Counts what begins or parts values. Raises InvalidInput (TOO_MANY_VALUES), and BODY_TOO_LARGE for too many
    bytes beside images.
    """
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 4 * MAX_VALUES:  # two for each value, two for its name
        raise _too_many("values", MAX_VALUES)
    pieces = plain.split(b'"')
    if len(body) > MAX_TEXT and len(body) - sum(map(_image_size, pieces[1::2])) > MAX_TEXT:
        raise _too_large(MAX_TEXT)
    outside = b"".join(pieces[::2])
    if outside.count(b"[") + outside.count(b"{") > MAX_VALUES:
        raise _too_many("arrays and objects", MAX_VALUES)
    if outside.count(b",") > MAX_NUMBERS:
        raise _too_many("values", MAX_NUMBERS)
    return outside


def _image_size(text: bytes) -> int:
    """The length of a JSON text that is base64 or a data URL; 0 for any other, and for short ones."""
    if len(text) < _LONG_TEXT:
        return 0
    head, comma, _ = text[:_LONGEST_HEAD].partition(b",")
    begin = len(head) + 1 if comma and head.startswith(b"data:") else 0
    return 0 if text[begin:].translate(None, _BASE64) else len(text)


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(members) > MAX_MEMBERS:
        raise _too_many("members in one object", MAX_MEMBERS)
    try:
        return unique_object(members)
    except FormatError:
        message = "a name occurs twice in one object of the body"
        raise InvalidInput(message, reason="BAD_JSON") from None


def _whole_number(digits: str) -> int:
    if len(digits.removeprefix("-")) > MAX_DIGITS:
        raise InvalidInput(f"a number in the body has more than {MAX_DIGITS} digits", reason="BAD_JSON")
    return int(digits)


def _finite(digits: str) -> float:
    try:
        return finite(digits)
    except ValueError:
        raise InvalidInput("a number in the body is too large", reason="BAD_JSON") from None


def _no_number(name: str) -> NoReturn:
    raise InvalidInput("the body is not valid JSON: NaN and Infinity are no numbers", reason="BAD_JSON")


async def _read(request: Request, arrived: Callable[[int], None]) -> bytes:
    """The body; `arrived` gets the number of bytes that have come."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY:
        raise _too_large(MAX_BODY)
    body = bytearray()
    async for part in request.stream():
        request.state.share.take(len(part))
        body += part
        arrived(len(body))
        if len(body) > MAX_BODY:
            raise _too_large(MAX_BODY)
    return bytes(body)


def _too_many(what: str, limit: int) -> InvalidInput:
    return InvalidInput(
        f"the body has more than {limit} {what}",
        hint="send fewer",
        reason="TOO_MANY_VALUES",
        limit=limit,
    )


def _too_large(limit: int) -> InvalidInput:
    beside = " beside its images" if limit == MAX_TEXT else ""
    return InvalidInput(
        f"the body has more than {limit} bytes{beside}",
        reason="BODY_TOO_LARGE",
        hint="send less",
        limit=limit,
    )


def _check_content_type(headers: Mapping[str, str]) -> None:
    """Programs may leave it out, as litellm does for Ollama. A page in a browser, which may send what is no
    JSON to any address (Fetch's "no-cors" requests), tells its origin and may not."""
    if "content-type" not in headers and "origin" not in headers:
        return
    kind, *parameters = headers.get("content-type", "").split(";")
    named = dict(one.strip().lower().partition("=")[::2] for one in parameters)
    charset = named.get("charset", "").strip('"')
    if kind.strip().lower() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise InvalidInput(
            "the body is not declared to be JSON in UTF-8",
            hint="send content-type: application/json (curl -H 'Content-Type: application/json')",
            reason="BAD_CONTENT_TYPE",
        )


def _check_encoding(headers: Mapping[str, str]) -> None:
    """A compressed body could be any number of times as large as what is counted of it."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise InvalidInput(
            f"the body is encoded: {encoding[:32]!r}",
            hint="send it without compression",
            reason="BODY_ENCODED",
        )
