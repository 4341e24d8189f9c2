"""The outermost layer: request ids, admission, and every error in its API's form, unknown ones masked."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Sequence
from typing import Any

import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sealring.edge.access.gate import Door, presented
from sealring.edge.http.answers import error_response
from sealring.edge.http.paths import Paths
from sealring.edge.inference.holding import Holding, Share
from sealring.mesh.errors import (
    Cancelled,
    Internal,
    InvalidInput,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SealringError,
    forget_frames,
)
from sealring.mesh.rpc.limits import peer_name
from sealring.mesh.system.addresses import is_loopback

log = structlog.get_logger()

MAX_REQUESTS = 4096
"""HTTP requests under way at once."""

MAX_HELD = 256 << 20
"""Bytes of all their bodies together, and of answers that are collected to be sent whole, each for as long as
its request is under way. No key has more of them than are left for the others."""

DRAIN_BYTES = 64 << 20
_DRAIN_SECONDS = 10.0


SMALL_BODY = 1 << 16
"""Bytes of a body that uvicorn may read and forget when it was not asked for."""

_STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
"""Messages with the headers of an answer."""


class Guard:
    """Wraps the whole edge. Where no key is needed only loopback names are answered: a page in a browser may
    resolve its own name to 127.0.0.1, but it has no key."""

    def __init__(self, app: ASGIApp, gate: Door, paths: Paths[Any], origins: Collection[str] = ()) -> None:
        """`origins`: pages that may open WebSockets, for which browsers ask nobody."""
        self._paths = paths
        self._origins = origins
        self._app = app
        self._gate = gate
        self.under_way = 0
        self.held = Holding(MAX_HELD)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        request_id = secrets.token_hex(12)
        begun = admitted = False
        scope.setdefault("state", {}).update(request_id=request_id, send=send)

        async def tagged_send(message: Message) -> None:
            nonlocal begun
            if message["type"] in _STARTS:
                begun = True
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    (b"request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    *_parting(scope),
                ]
            await send(message)

        self.under_way += 1
        try:
            if self.under_way > MAX_REQUESTS:
                raise _too_many()
            request = HTTPConnection(scope)
            if not self._gate.required:
                _check_host(request)
            if scope["type"] == "websocket":
                self._check_socket(request)
            scopes = self._paths.scopes(scope["path"])
            async with self._gate.admit(_peer(scope), credential(request), scopes) as caller:
                admitted = True
                with Share(self.held, caller.key_id) as share:
                    scope["state"].update(caller=caller, share=share)
                    await self._app(scope, receive, tagged_send)
        except Exception as error:
            await self._fail(error, scope, receive, None if begun else tagged_send, admitted=admitted)
        finally:
            self.under_way -= 1

    def _check_socket(self, request: HTTPConnection) -> None:
        path, origin = request.scope["path"], request.headers.get("origin")
        if not self._paths.has_socket(path):
            raise HTTPException(404)
        if origin is not None and origin not in self._origins:
            raise PermissionDenied(
                "a page of this origin may not open a WebSocket here",
                hint="the gateway's owner may add it to cors_origins",
                reason="ORIGIN_NOT_ALLOWED",
            )

    async def _fail(
        self, error: Exception, scope: Scope, receive: Receive, send: Send | None, *, admitted: bool
    ) -> None:
        """Logs an unknown error; answers with the error unless an answer has begun (`send` is None)."""
        known = known_error(error, scope["path"], self._paths.usable())
        if isinstance(known, Internal):
            log.error("http_request_failed", request_id=scope["state"]["request_id"], exc_info=error)
        forget_frames(error)
        if send is not None:
            cut_off = known.reason in ("BODY_TOO_LARGE", "TOO_MANY_BYTES")
            unread = scope["type"] == "http" and (cut_off or not (admitted or _has_small_body(scope)))
            await _answer(known, scope, receive, send, unread=unread)


async def _answer(error: SealringError, scope: Scope, receive: Receive, send: Send, *, unread: bool) -> None:
    response = error_response(error, scope["path"])
    if unread:
        # closing a connection with unread input resets it, and the client would never see the answer
        response.headers["connection"] = "close"
        await send(
            {
                "type": "http.response.start",
                "status": response.status_code,
                "headers": response.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        await _drain(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return
    if not isinstance(error, Cancelled):
        await response(scope, receive, send)


async def _drain(receive: Receive) -> None:
    left = DRAIN_BYTES
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            while left > 0:
                message = await receive()
                if not message.get("more_body"):  # nor has the end of the connection
                    return
                left -= len(message.get("body", b""))
    except TimeoutError:
        return


def known_error(error: Exception, path: str, usable: Sequence[str] = ()) -> SealringError:
    """The error of the tree that the client gets; it holds nothing of an unknown error.

    The hint for a path that is not served names `usable` paths.
    """
    if isinstance(error, SealringError):
        return error
    if isinstance(error, HTTPException) and error.status_code == 404:
        served = ", ".join(usable)
        return NotFound(
            f"{path[:80]!r} is not served", hint=f"the paths here are: {served}", reason="NO_SUCH_PATH"
        )
    if isinstance(error, HTTPException) and error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        return InvalidInput("this path has no such method", reason="METHOD_NOT_ALLOWED", allow=allow)
    return Internal("an internal error", hint="see the gateway's log")


def credential(request: HTTPConnection) -> str | None:
    """The key by the standard header, or by Anthropic's own."""
    found = request.headers.getlist("authorization")
    return presented([*found, *(f"Bearer {key}" for key in request.headers.getlist("x-api-key"))])


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return peer_name(client[0] if client else "")


def _parting(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Ends a connection whose request has `Expect: 100-continue` (RFC 9110 section 10.1.1).

    After an early answer the next bytes may be the body or, from a proxy, the request of another client.
    """
    return [(b"connection", b"close")] if "expect" in Headers(scope=scope) else []


def _has_small_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    length = headers.get("content-length", "0")
    return "transfer-encoding" not in headers and len(length) < 9 and int(length) <= SMALL_BODY


def _too_many() -> ResourceExhausted:
    return ResourceExhausted(
        f"{MAX_REQUESTS} requests are under way",
        hint="try again later",
        reason="TOO_MANY_REQUESTS",
        retry_after=1,
    )


def _check_host(request: HTTPConnection) -> None:
    host = request.headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if not is_loopback(name.strip("[]")):
        raise PermissionDenied(
            "the host that was asked for is not this machine",
            hint="use http://127.0.0.1 or http://localhost",
            reason="HOST_NOT_ALLOWED",
        )
