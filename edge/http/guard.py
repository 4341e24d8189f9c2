"""The outermost layer: request ids, admission, and every error in its API's form, unknown ones masked."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sealring.edge.access.gate import Caller, Door, presented
from sealring.edge.http.answers import error_response
from sealring.edge.http.paths import Paths
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
from sealring.mesh.rpc.crowd import Crowd
from sealring.mesh.rpc.holding import Holding, Share
from sealring.mesh.rpc.limits import peer_name
from sealring.mesh.system.addresses import is_loopback

log = structlog.get_logger()

MAX_REQUESTS = 4096
"""Requests that were let in and are under way. No key (without keys: address) has more of them than are left
for the others."""

MAX_HELD = 256 << 20
"""Bytes of all their bodies together, and of answers that are collected to be sent whole, each for as long as
its request is under way. No key has more of them than are left for the others."""

MAX_DRAINS = 64
"""Bodies that are read after their request was refused. One too many ends the oldest of the address that has
most of them."""

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
        self.under_way = Holding(MAX_REQUESTS, _too_many)
        self.held = Holding(MAX_HELD)
        self.drains = Crowd(MAX_DRAINS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        request_id = secrets.token_hex(12)
        begun = admitted = False
        name = _peer(scope)
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

        try:
            request = HTTPConnection(scope)
            if not self._gate.required:
                _check_host(request)
            if self._paths.apart(scope["path"]):
                await self._app(scope, receive, tagged_send)
                return
            if scope["type"] == "websocket":
                self._check_socket(request)
            scopes = self._paths.scopes(scope["path"])
            async with contextlib.AsyncExitStack() as stack:
                admit = partial(self._gate.admit, name, credential(request), scopes)
                caller = await stack.enter_async_context(admit())
                scope["state"]["admit"] = admit
                name, admitted = caller.key_id or caller.name or name, True
                if scope["type"] == "websocket":  # which asks for nothing yet
                    await stack.aclose()
                await self._serve(scope, receive, tagged_send, caller, name)
        except Exception as error:
            send_to = None if begun else tagged_send
            await self._fail(error, scope, receive, send_to, name, admitted=admitted)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, caller: Caller, name: str) -> None:
        """Has a request answered that was let in, charged to a name."""
        state = scope["state"]
        with contextlib.ExitStack() as stack:
            if scope["type"] == "http" and caller.known:
                stack.enter_context(Share(self.under_way, name)).take(1)
            if (place := state.get("place")) is not None and caller.known:
                stack.enter_context(place.let_in(name))
            share = stack.enter_context(Share(self.held, name))
            state.update(caller=caller, charged=name, share=share)
            await self._app(scope, receive, send)

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
        self,
        error: Exception,
        scope: Scope,
        receive: Receive,
        send: Send | None,
        name: str,
        *,
        admitted: bool,
    ) -> None:
        """Logs an unknown error; answers with the error unless an answer has begun (`send` is None)."""
        known = known_error(error, scope["path"], self._paths.usable())
        if isinstance(known, Internal):
            log.error("http_request_failed", request_id=scope["state"]["request_id"], exc_info=error)
        forget_frames(error)
        if send is not None:
            cut_off = known.reason in ("BODY_TOO_LARGE", "TOO_MANY_BYTES")
            unread = scope["type"] == "http" and (cut_off or not (admitted or _has_small_body(scope)))
            response = error_response(known, scope["path"])
            if unread:
                await self._answer_unread(response, receive, send, name)
            elif not isinstance(known, Cancelled):
                await response(scope, receive, send)

    async def _answer_unread(self, response: Response, receive: Receive, send: Send, name: str) -> None:
        """Reads on behind the answer: closing a connection with unread input resets it, and the client would
        never see the answer."""
        response.headers["connection"] = "close"
        status, headers = response.status_code, response.raw_headers
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS) as limit:
                with self.drains.enter(name, lambda: limit.reschedule(0.0)):
                    await _drain(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drain(receive: Receive) -> None:
    left = DRAIN_BYTES
    while left > 0:
        message = await receive()
        if not message.get("more_body"):  # nor has the end of the connection
            return
        left -= len(message.get("body", b""))


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
        f"{MAX_REQUESTS} requests are under way, or half of what others leave of them",
        hint="try again later",
        reason="TOO_MANY_REQUESTS",
        retry_after=1,
    )


def _check_host(request: HTTPConnection) -> None:
    host = request.headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if name.startswith("[") and name.endswith("]") and ":" in name:  # an address of IPv6, and nothing else
        name = name[1:-1]
    if not is_loopback(name):
        raise PermissionDenied(
            "the host that was asked for is not this machine",
            hint="use http://127.0.0.1 or http://localhost",
            reason="HOST_NOT_ALLOWED",
        )
