"""A second gateway of a cluster, which is a guest of the rings that the first one schedules."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
from ringtest import LIMIT_SECONDS, Ring

from sealring.cli.here.settings_files import as_toml
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope
from sealring.gateway.join import join
from sealring.gateway.settings import GatewaySettings
from sealring.mesh.system.addresses import free_port
from sealring.v1 import inference_pb2_grpc

NAME = "gateway-2"


@asynccontextmanager
async def guest(ring: Ring) -> AsyncIterator[Ring]:
    """The ring as it is seen over another gateway, whose process is NAME. It has a key of its own where the
    ring's gateway asks for keys."""
    cluster = ring.cluster
    folder = cluster.state_dir / NAME
    settings = {
        "state_dir": str(folder),
        "name": NAME,
        "grpc_listen": f"127.0.0.1:{free_port('127.0.0.1')}",
        "http_listen": f"127.0.0.1:{free_port('127.0.0.1')}",
    }
    await join(GatewaySettings(**settings), await cluster.join_token("ROLE_GATEWAY"))
    key = KeyFile(folder).create([Scope.INFERENCE, Scope.READ])[0] if ring.key else ""
    file = cluster.state_dir / "config" / f"{NAME}.toml"
    file.write_bytes(as_toml("gateway", settings))

    async def start() -> None:
        await cluster.children.start(NAME, ["--config", str(file), "gateway", "run"])

    seen = SimpleNamespace(
        http_url=f"http://{settings['http_listen']}", grpc_address=settings["grpc_listen"], start=start
    )
    async with grpc.aio.insecure_channel(settings["grpc_listen"]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await start()
        over_it = dataclasses.replace(ring, cluster=seen, stub=stub, key=key)
        await wait_ready(channel)
        await over_it.offered(1)
        yield over_it
    await cluster.children.kill_one(NAME)


async def wait_ready(channel: grpc.aio.Channel) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        await channel.channel_ready()
