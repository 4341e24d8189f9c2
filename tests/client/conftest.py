"""A scripted gateway that listens."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from rostertest import PaperCluster
from scriptedgateway import ScriptedGateway, Stage

from mesh.rpc import Server
from sealring.v1 import inference_pb2_grpc as inference_grpc


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    gateway = ScriptedGateway(PaperCluster())
    add = inference_grpc.add_InferenceServicer_to_server
    server = Server([(add, gateway, "sealring.v1.Inference")])
    port = server.listen("127.0.0.1:0", None)
    await server.start()
    yield Stage(gateway, f"127.0.0.1:{port}")
    await server.stop(0)
