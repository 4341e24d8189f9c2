"""Addresses for programs: those at which an edge of sealring answers."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from sealring.cli.calls.doors import open_doors
from sealring.edge.http.app import create_app
from sealring.edge.http.server import HttpServer
from sealring.mesh.system.addresses import free_port
from sealring.testing.backend import ScriptedBackend


async def test_an_edge_is_a_door_and_no_other_program() -> None:
    async def anything(request: object) -> PlainTextResponse:
        return PlainTextResponse('{"status": "ok"}')

    other = Starlette(routes=[Route("/{path:path}", anything)])
    servers = [HttpServer(create_app(ScriptedBackend(), exposition=lambda: b"")), HttpServer(other)]
    ports = [server.listen("127.0.0.1:0") for server in servers]
    for server in servers:
        await server.start()
    try:
        urls = [f"http://127.0.0.1:{port}" for port in (*ports, free_port())]
        assert await asyncio.to_thread(open_doors, urls) == urls[:1]
    finally:
        for server in servers:
            await server.stop()
