"""The door for members: whom it lets in, to what, how much of it, and until when."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from sealring.edge.access.gate import Limits
from sealring.edge.access.interceptor import KEY_ID, GateInterceptor
from sealring.edge.inference.service import SERVICE
from sealring.gateway import door as door_module
from sealring.gateway.door import MEMBERS, MemberDoor
from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.pki import PeerIdentity, Role, TlsMaterial, expires_at, role_server_name
from sealring.mesh.roster import Roster
from sealring.mesh.rpc import (
    Server,
    TlsStore,
    channel_options,
    from_rpc_error,
    secure_channel,
    server_credentials,
)
from sealring.mesh.rpc.server import Port
from sealring.testing import ManualClock
from sealring.testing.authority import Authority, make_member, make_roster
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc as inference_grpc

ASK = {"Generate"}
LOOK = {"ListModels", "GetRoster", "LoadModel", "GetMetrics", "GetUsage"}


class Inference(inference_grpc.InferenceServicer):
    """Answers with the name under which it counts the caller. A question goes on for ever."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference.GenerateResponse]:
        yield inference.GenerateResponse(delta=inference.Delta(text=KEY_ID.get()))
        await asyncio.Event().wait()

    async def ListModels(self, request: Any, context: Any) -> inference.ListModelsResponse:
        return inference.ListModelsResponse(models=[inference.Model(name=KEY_ID.get())])

    async def GetRoster(self, request: Any, context: Any) -> inference.GetRosterResponse:
        return inference.GetRosterResponse()

    async def GetMetrics(self, request: Any, context: Any) -> inference.GetMetricsResponse:
        return inference.GetMetricsResponse()

    async def GetUsage(self, request: Any, context: Any) -> inference.GetUsageResponse:
        return inference.GetUsageResponse()

    async def LoadModel(self, request: Any, context: Any) -> inference.LoadModelResponse:
        return inference.LoadModelResponse()


class Served:
    """A door over mTLS, with the roster that it goes by."""

    def __init__(self) -> None:
        self.authority = Authority.create("demo", now=time.time())
        self.members = [make_member(), make_member()]
        self.roster: Roster | None = None
        self.port = 0
        self.refused: list[str] = []
        self.use(*self.members)

    def use(self, *members: Any) -> None:
        self.roster = make_roster("demo", members, (), now=time.time())

    def material(self, role: Role, identifier: str, *, cluster: str = "demo", **options: Any) -> TlsMaterial:
        return self.authority.material(PeerIdentity(cluster, role, identifier), now=time.time(), **options)

    def client(self, number: int = 0) -> TlsMaterial:
        return self.material(Role.CLIENT, self.members[number].id)

    def channel(self, tls: TlsMaterial) -> grpc.aio.Channel:
        options = channel_options(role_server_name(Role.GATEWAY))
        return secure_channel(f"127.0.0.1:{self.port}", tls, options)

    async def call(self, tls: TlsMaterial, method: str = "ListModels") -> str:
        """The reason of a refusal; "" for an answer."""
        request = inference.DESCRIPTOR.services_by_name["Inference"].methods_by_name[method].input_type.name
        async with self.channel(tls) as channel:
            asked = getattr(inference_grpc.InferenceStub(channel), method)(getattr(inference, request)())
            try:
                await (asked.read() if method in ASK else asked)
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error).reason
            finally:
                asked.cancel()
        return ""


@asynccontextmanager
async def opened(
    limits: Limits = Limits(), port: Port = MEMBERS, clock: Clock = wall_clock
) -> AsyncIterator[Served]:
    found = Served()
    door = MemberDoor("demo", lambda: found.roster, limits, found.refused.append, clock=clock)
    own = found.material(Role.GATEWAY, "gateway")
    services = [(inference_grpc.add_InferenceServicer_to_server, Inference(), SERVICE)]
    server = Server(services, port=port, interceptors=[GateInterceptor(door.admit)])
    found.port = server.listen("127.0.0.1:0", server_credentials(TlsStore(own)))
    await server.start()
    looking = asyncio.create_task(door.run())
    try:
        yield found
    finally:
        looking.cancel()
        await server.stop(0)


async def test_every_call_by_every_role() -> None:
    methods = {one.name for one in inference.DESCRIPTOR.services_by_name["Inference"].methods}
    assert methods == ASK | LOOK
    async with opened() as served:
        own = served.members[0].id
        for method in sorted(methods):
            assert await served.call(served.client(), method) == "", method
            for role in set(Role) - {Role.CLIENT}:
                assert await served.call(served.material(role, own), method) == "WRONG_ROLE", (method, role)
            other = served.material(Role.CLIENT, own, cluster="other")
            assert await served.call(other, method) == "OTHER_CLUSTER", method
            stranger = served.material(Role.CLIENT, "stranger")
            assert await served.call(stranger, method) == "NOT_ENROLLED", method
        assert set(served.refused) == {"WRONG_ROLE", "OTHER_CLUSTER", "NOT_ENROLLED"}


async def test_without_a_certificate_of_the_cluster_there_is_no_connection() -> None:
    async with opened() as served:
        forger = Authority.create("demo", now=time.time())
        peer = PeerIdentity("demo", Role.CLIENT, served.members[0].id)
        forged = dataclasses.replace(
            forger.material(peer, now=time.time()), authorities=served.authority.root.authorities
        )
        assert await served.call(forged) == "UNAVAILABLE"
        ended = served.authority.material(peer, now=time.time() - 7200)
        assert await served.call(ended) == "UNAVAILABLE"


async def test_a_connection_that_outlives_its_certificate_opens_nothing() -> None:
    clock = ManualClock(time.time())
    async with opened(clock=clock) as served:
        tls = served.client()
        async with served.channel(tls) as channel:
            stub = inference_grpc.InferenceStub(channel)
            await stub.ListModels(inference.ListModelsRequest())
            clock.now = expires_at(tls.certificate)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListModels(inference.ListModelsRequest())
    assert from_rpc_error(caught.value).reason == "CERTIFICATE_EXPIRED"


def test_a_connection_ends_although_it_is_used() -> None:
    """What an authority has vouched for that the root does not name any more ends with it."""
    assert dict(MEMBERS.options)["grpc.max_connection_age_ms"] == 3600 * 1000


async def test_nobody_is_let_in_while_no_roster_is_valid() -> None:
    async with opened() as served:
        served.roster = None
        assert await served.call(served.client()) == "UNAVAILABLE"


async def test_all_programs_of_a_member_count_as_one_and_take_nothing_from_others() -> None:
    async with (
        opened(Limits(key_at_once=2)) as served,
        served.channel(served.client()) as one,
        served.channel(served.client()) as another,
    ):
        asked = [
            inference_grpc.InferenceStub(channel).Generate(inference.GenerateRequest())
            for channel in (one, another)
        ]
        assert {(await each.read()).delta.text for each in asked} == {served.members[0].id}
        assert await served.call(served.client()) == "TOO_MANY_AT_ONCE"
        assert await served.call(served.client(1)) == ""
    async with opened(Limits(key_per_second=1e-3)) as served:
        found = [await served.call(served.client()) for _ in range(2)]
        assert found == ["", "RATE_LIMITED"]
        assert await served.call(served.client(1)) == ""


async def test_an_eviction_ends_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "LOOK_SECONDS", 0.01)
    async with (
        opened() as served,
        served.channel(served.client()) as one,
        served.channel(served.client(1)) as two,
    ):
        gone, stays = (
            inference_grpc.InferenceStub(channel).Generate(inference.GenerateRequest())
            for channel in (one, two)
        )
        await gone.read()
        await stays.read()
        served.roster = None
        served.use(served.members[1])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gone.read()
        assert from_rpc_error(caught.value).reason == "NOT_ENROLLED"
        assert await served.call(served.client()) == "NOT_ENROLLED"
        assert not stays.done()
        stays.cancel()


@pytest.mark.parametrize("held", ["silent", "asking"])
async def test_connections_of_others_keep_no_member_out(held: str) -> None:
    """Strangers hold more connections than the port has, or one member does, each with a question."""
    async with opened(port=Port(connections=16)) as served, contextlib.AsyncExitStack() as stack:
        for _ in range(40):
            if held == "silent":
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
                    stack.callback(writer.close)
            else:
                channel = await stack.enter_async_context(served.channel(served.client()))
                asked = inference_grpc.InferenceStub(channel).Generate(inference.GenerateRequest())
                stack.callback(asked.cancel)
        while await served.call(served.client(1)) != "":
            await asyncio.sleep(0.1)
