"""A client that does not read its answer over gRPC holds a connection's buffers, and only for a while."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from patience import until
from usagekit import nothing_used

from sealring.edge.inference import service as service_module
from sealring.edge.inference import timers
from sealring.edge.inference.service import SERVICE, InferenceService
from sealring.mesh.rpc import INFERENCE, Server
from sealring.testing import ScriptedBackend
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc as inference_grpc

PROMPT = inference.Envelope(clear=inference.Prompt(text="x"))


async def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "SEND_SECONDS", 0.3)
    made = 0

    class Endless(ScriptedBackend):
        async def generate(self, request, *, key="", tenant=""):  # type: ignore[no-untyped-def]
            nonlocal made
            self.texts = ["x" * 100_000] * 1000
            async for event in super().generate(request, key=key, tenant=tenant):
                made += len(event.delta.text)
                yield event

    backend = Endless()
    service = InferenceService(backend, lambda: b"", nothing_used)
    add = inference_grpc.add_InferenceServicer_to_server
    server = Server([(add, service, SERVICE)], port=INFERENCE)
    address = f"127.0.0.1:{server.listen('127.0.0.1:0', None)}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(200):
            stub = inference_grpc.InferenceStub(channel)
            call = stub.Generate(inference.GenerateRequest(model="demo", envelope=PROMPT))
            await call.read()
            await until(lambda: backend.closed)
            call.cancel()
    finally:
        await server.stop(0)
    # buffers of the connection: gRPC lets its own grow, and the system those of a socket
    assert made < 48 << 20, "of the 100 MB of its answer"


async def test_a_client_is_not_given_up_for_the_time_that_this_machine_slept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the midst of a send: the loop's clock jumps, and what the client has taken is seen after that."""
    loop = asyncio.get_running_loop()
    slept = 0.0
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + slept)
    with timers.SendWatch() as watch:
        watch.begin()
        slept = 100 * timers.SEND_SECONDS
        for _ in range(5):
            await asyncio.sleep(0)
        watch.end()
        assert not watch.stuck


async def test_no_send_is_under_way_while_the_model_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a token takes: the client that waits for it reads."""
    watches: list[timers.SendWatch] = []
    while_working: list[bool] = []

    class Watch(timers.SendWatch):
        def __enter__(self) -> timers.SendWatch:
            watches.append(self)
            return super().__enter__()

    class Working(ScriptedBackend):
        async def generate(self, request, *, key="", tenant=""):  # type: ignore[no-untyped-def]
            async for event in super().generate(request, key=key, tenant=tenant):
                while_working.append(watches[0].sending)
                yield event

    monkeypatch.setattr(service_module, "SendWatch", Watch)
    service = InferenceService(Working(), lambda: b"", nothing_used)
    context: Any = SimpleNamespace(
        peer=lambda: "ipv4:127.0.0.1:1", invocation_metadata=lambda: (), set_trailing_metadata=lambda _: None
    )
    async for _ in service.Generate(inference.GenerateRequest(model="demo", envelope=PROMPT), context):
        assert watches[0].sending
    assert while_working == [False] * 5
