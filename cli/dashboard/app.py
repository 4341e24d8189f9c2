"""The dashboard's pages and data. It changes nothing: its calls only read, and its questions are sealed.

It answers requests with the token that the command prints. Other accounts of this machine, and pages of other
sites in the browser, do not have the token. The pages come from this process, load nothing from elsewhere,
and may not be framed.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sealring.cli.calls.doors import open_doors
from sealring.cli.calls.gateway import GatewayCalls
from sealring.cli.calls.operator import Admin
from sealring.cli.dashboard.load import GatewayLoad, LoadHistory
from sealring.cli.dashboard.look import Audit, cluster, join_code, trace, usage
from sealring.client import AsyncClient
from sealring.edge.http.answers import error_response
from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.errors import InvalidInput, SealringError, Unauthenticated
from sealring.mesh.rpc.crowd import Place
from sealring.mesh.trust.levels import level_of

_SCRIPTS = ("page", "common", "machines", "charts", "chat", "lists", "proofs")
_PAGES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in _SCRIPTS},
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


def create_dashboard(
    admin: Admin,
    pin: bytes,
    gateways: Sequence[GatewayCalls],
    client: AsyncClient,
    edge: ASGIApp,
    token: str,
    *,
    clock: Clock = monotonic_clock,
    doors: Callable[[], list[str]] = open_doors,
) -> tuple[Starlette, LoadHistory]:
    """The ASGI application, and the load that it shows, which is to run beside it. `edge` answers the chat's
    questions, sealed by `client`; `doors` tells the addresses for programs."""
    history = LoadHistory([GatewayLoad(one.address, one.metrics) for one in gateways], clock=clock)
    audit = Audit(admin)

    async def tell_cluster(request: Request) -> Any:
        return await cluster(admin, pin, time.time())

    async def tell_load(request: Request) -> Any:
        return await history.look()

    async def tell_usage(request: Request) -> Any:
        return await usage(gateways, time.time())

    async def tell_join(request: Request) -> Any:
        return await join_code(admin)

    async def tell_doors(request: Request) -> Any:
        return await asyncio.to_thread(doors)

    async def tell_audit(request: Request) -> Any:
        return await audit.look()

    async def tell_trace(request: Request) -> Any:
        ring = request.query_params.get("ring", "")
        if not 0 < len(ring) <= 128:
            raise InvalidInput("the query names no ring", hint="add ?ring=", reason="BAD_RING", param="ring")
        return await trace(admin, ring)

    async def tell_rings(request: Request) -> Any:
        """The members of each ring, by the roster that the client verified: they will see a prompt."""
        return [
            {
                "ring": ring.id,
                "deployment": ring.deployment,
                "min_trust": level_of(ring.min_trust),
                "clear_links": ring.clear_links,
                "members": [
                    {"id": one.id, "level": one.level, "layers": list(one.layers)} for one in ring.members
                ],
            }
            for ring in await client.rings()
        ]

    tells = {
        "/data/cluster": tell_cluster,
        "/data/load": tell_load,
        "/data/audit": tell_audit,
        "/data/trace": tell_trace,
        "/data/rings": tell_rings,
        "/data/usage": tell_usage,
        "/data/join": tell_join,
        "/data/doors": tell_doors,
    }
    app = Starlette(
        routes=[
            *(Route(path, _page(*page)) for path, page in _PAGES.items()),
            *(Route(path, _json(tell)) for path, tell in tells.items()),
            Mount("", edge),
        ],
        middleware=[Middleware(_Token, token=token)],
    )
    return app, history


def new_token() -> str:
    """A random token for one run of the dashboard."""
    return secrets.token_urlsafe(32)


def _page(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return Response(files(__package__).joinpath(name).read_bytes(), media_type=kind)

    return endpoint


def _json(tell: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return JSONResponse(await tell(request))
        except SealringError as error:
            return error_response(error, request.url.path)

    return endpoint


class _Token:
    """Asks for the token for everything but the pages, and sets the headers of every answer."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        shown = Headers(scope=scope).get("authorization", "").encode()
        known = hmac.compare_digest(shown, self._expected)
        if known or scope["path"] in _PAGES:
            place: Place | None = scope.get("state", {}).get("place")
            with place.let_in("token") if place is not None and known else nullcontext():
                await self._app(scope, receive, with_headers)
            return
        refused = Unauthenticated(
            "this is not the dashboard's token",
            hint="open the address that `sealring dashboard` printed",
            reason="BAD_TOKEN",
        )
        await error_response(refused, scope["path"])(scope, receive, with_headers)
