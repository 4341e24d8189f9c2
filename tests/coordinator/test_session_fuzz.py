"""A member that says anything at all on its stream: its own session ends with a named error, nobody else's.

`SEALRING_FUZZ=50` tries fifty times as much.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import pytest
import structlog.testing
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import until

from sealring.mesh.errors import Internal
from sealring.mesh.rpc import from_rpc_error
from sealring.v1 import admin_pb2, membership_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage, MemberMessage
from tests.coordinator.conftest import Cluster, FakeNode

HARD = int(os.environ.get("SEALRING_FUZZ", "1"))
pytestmark = pytest.mark.timeout(600 * HARD)
RINGS = st.sampled_from(["demo-0", "demo-1", "", "x" * 300, "demo-0\x00"])
_SMALL = st.one_of(st.integers(0, 5), st.integers(0, (1 << 31) - 1))
_LARGE = st.one_of(_SMALL, st.sampled_from([1 << 32, (1 << 63) - 1]))
_KINDS: dict[Any, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_STRING: st.one_of(RINGS, st.text(max_size=80)),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 40),
    FieldDescriptor.CPPTYPE_UINT64: st.one_of(_LARGE, st.just((1 << 64) - 1)),
    FieldDescriptor.CPPTYPE_INT64: _LARGE,
}


@st.composite
def message(draw: st.DrawFn, descriptor: Descriptor, depth: int = 3) -> dict[str, Any]:
    """Any values for some of a message's fields, as keyword arguments."""
    found: dict[str, Any] = {}
    for field in descriptor.fields:
        if field.containing_oneof is not None or draw(st.booleans()):
            continue
        found[field.name] = draw(value(field, depth))
    for oneof in descriptor.oneofs:
        chosen = draw(st.sampled_from([*oneof.fields, None]))
        if chosen is not None:
            found[chosen.name] = draw(value(chosen, depth))
    return {name: one for name, one in found.items() if one is not None}


def value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        if depth == 0 or field.message_type.GetOptions().map_entry:
            return st.none()
        single: st.SearchStrategy[Any] = message(field.message_type, depth - 1)
    elif field.type == FieldDescriptor.TYPE_BYTES:
        single = st.one_of(st.binary(max_size=40), st.sampled_from([bytes(32), bytes(64)]))
    else:
        single = _KINDS.get(field.cpp_type, _SMALL)
    return st.lists(single, max_size=3) if field.is_repeated else single


ANYTHING = st.one_of(
    st.binary(max_size=200),
    message(MemberMessage.DESCRIPTOR).map(lambda fields: MemberMessage(**fields).SerializeToString()),
)


@pytest.fixture
async def serving(
    start_cluster: Callable[..., Awaitable[Cluster]],
) -> AsyncIterator[tuple[Cluster, FakeNode]]:
    """A ring on one node, and another node enrolled whose session is not open."""
    cluster = await start_cluster(heartbeat_timeout=60.0)
    bystander = await cluster.node("beta")
    await cluster.join("alpha")
    spec = admin_pb2.DeploymentSpec(name="demo", model="demo")
    await cluster.call("CreateDeployment", admin_pb2.CreateDeploymentRequest(spec=spec))
    async with asyncio.timeout(200):
        while (await ring(cluster)).phase != membership_pb2.RING_PHASE_SERVING:
            await asyncio.sleep(0.02)
    yield cluster, bystander
    await cluster.close()


async def ring(cluster: Cluster) -> Any:
    answer = await cluster.call("ListDeployments", admin_pb2.ListDeploymentsRequest())
    return answer.deployments[0].rings[0]


async def say(cluster: Cluster, said: list[bytes], *, hello: bool, draw_nonce: bool) -> str:
    """A session of alpha that says all of it; the reason that it ended with, "" if it ended well."""
    if cluster.coordinator.store.members.find(alpha_id(cluster)) is None:
        await cluster.join("alpha")  # three bad answers to challenges, and it is out
    node = FakeNode(cluster.folder / "alpha", cluster.coordinator.main_address())
    call = node.channel.stream_stream("/sealring.v1.Membership/Session")()
    try:
        if hello or draw_nonce:
            await node.prove(call, packed, parse=CoordinatorMessage.FromString)
        if hello:
            await call.write(MemberMessage(hello=node.hello()).SerializeToString())
        for data in said:
            await call.write(data)
        if draw_nonce:
            answer = node.answer(bytes(32))
            await call.write(MemberMessage(challenge_answer=answer).SerializeToString())
        await call.done_writing()
        async with asyncio.timeout(200):
            while await call.read() is not grpc.aio.EOF:
                pass
        await call.wait_for_connection()
    except grpc.aio.AioRpcError as error:
        found = from_rpc_error(error)
        if found.message == "Internal error from Core":  # gRPC's own word for a write after the end
            return "CUT"
        assert not isinstance(found, Internal), found
        return found.reason
    except asyncio.InvalidStateError:
        pass
    finally:
        call.cancel()
        await node.channel.close()
    return ""


def packed(**fields: Any) -> bytes:
    return MemberMessage(**fields).SerializeToString()


def alpha_id(cluster: Cluster) -> str:
    from sealring.mesh.member import load_machine_state

    return load_machine_state(cluster.folder / "alpha").peer.id


@given(said=st.lists(ANYTHING, max_size=8), hello=st.integers(0, 9).map(bool), draw_nonce=st.booleans())
@settings(
    max_examples=80 * HARD,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
async def test_whatever_a_member_says_nobody_else_is_touched(
    serving: tuple[Cluster, FakeNode], said: list[bytes], hello: bool, draw_nonce: bool
) -> None:
    cluster, bystander = serving
    before = await ring(cluster)
    with structlog.testing.capture_logs() as logs:
        await say(cluster, said, hello=hello, draw_nonce=draw_nonce)
    assert [entry for entry in logs if entry.get("exc_info") or entry["event"] == "session_failed"] == []
    after = await ring(cluster)
    assert (after.epoch, after.phase, after.reason) == (before.epoch, before.phase, before.reason)
    assert bystander.error is None
    assert bystander.running == {"demo-0": before.epoch}
    await until(lambda: cluster.coordinator.sessions.find(alpha_id(cluster)) is None)
    with pytest.raises(TimeoutError):  # its own tasks go on
        async with asyncio.timeout(0):
            await cluster.coordinator.failed()


async def test_the_fuzzing_reaches_what_it_should(serving: tuple[Cluster, FakeNode]) -> None:
    """Messages with known outcomes take the same path."""
    cluster, _ = serving
    beat = MemberMessage(heartbeat=membership_pb2.Heartbeat(memory_total=1)).SerializeToString()
    huge = MemberMessage(heartbeat=membership_pb2.Heartbeat(memory_total=1 << 60)).SerializeToString()
    fault = MemberMessage(fault=membership_pb2.EpochFault(ring="demo-0", epoch=1)).SerializeToString()
    goodbye = MemberMessage(goodbye=membership_pb2.Goodbye()).SerializeToString()
    for said, hello, reason in (
        ([], False, "NO_PROOF"),
        ([beat], False, "NO_PROOF"),
        ([b"\xff"], False, "BAD_MESSAGE"),
        ([beat, b"\xff\xff"], True, "BAD_MESSAGE"),
        ([b""], True, "BAD_MESSAGE"),
        ([huge], True, "BAD_HEARTBEAT"),
        ([beat, fault, goodbye], True, ""),
    ):
        assert await say(cluster, said, hello=hello, draw_nonce=False) == reason
