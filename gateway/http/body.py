"""Request bodies: bounded in length and time, JSON in UTF-8 and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from gateway.timings import CURRENT, Timings
from mesh.errors import Cancelled, DeadlineExceeded, InvalidInput

MAX_BODY = 4 << 20
BODY_SECONDS = 30.0


async def read_json(request: Request) -> dict[str, Any]:
    """The body's one JSON object.

    Raises InvalidInput: BAD_CONTENT_TYPE, BODY_TOO_LARGE, BAD_UTF8, BAD_JSON; DeadlineExceeded
    (BODY_TOO_SLOW); Cancelled when the client goes away. Messages never hold any of the body.
    """
    _check_content_type(request.headers.get("content-type", ""))
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await _read(request)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the body did not arrive within {BODY_SECONDS:g} s", reason="BODY_TOO_SLOW"
        ) from None
    except ClientDisconnect:
        raise Cancelled("the client went away") from None
    CURRENT.set(Timings())
    return parse_object(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parses one JSON object. Raises InvalidInput: BAD_UTF8, BAD_JSON."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the body is not UTF-8 at byte {error.start}", reason="BAD_UTF8") from None
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        raise InvalidInput("the body is not valid JSON", reason="BAD_JSON") from None
    if not isinstance(value, dict):
        raise InvalidInput("the body is not a JSON object", reason="BAD_JSON")
    return value


async def _read(request: Request) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY:
        raise _too_large()
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise _too_large()
    return bytes(body)


def _too_large() -> InvalidInput:
    return InvalidInput(
        f"the body is larger than {MAX_BODY} bytes", reason="BODY_TOO_LARGE", hint="send less", limit=MAX_BODY
    )


def _check_content_type(value: str) -> None:
    kind, _, parameters = value.partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if kind.strip().lower() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise InvalidInput(
            "the body is not declared to be JSON in UTF-8",
            hint="send content-type: application/json",
            reason="BAD_CONTENT_TYPE",
        )
