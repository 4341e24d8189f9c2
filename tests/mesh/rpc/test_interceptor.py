"""Refusals, as callers over real connections read them; what else it does is in test_rpc.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from sealring.mesh.clock import wall_clock
from sealring.mesh.errors import PermissionDenied
from sealring.mesh.pki.authority import ClusterCA
from sealring.mesh.pki.certificates import LeafKey, PeerIdentity, Role
from sealring.mesh.rpc.server import Server
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.rpc.tls import (
    TlsMaterial,
    TlsStore,
    channel_credentials,
    channel_options,
    server_credentials,
)
from sealring.v1 import membership_pb2, membership_pb2_grpc


class Membership(membership_pb2_grpc.MembershipServicer):
    """Refuses everybody by who they are, before anything is read."""

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        raise PermissionDenied("not you", reason="NOT_A_MEMBER")
        yield


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    authority = ClusterCA.create(tmp_path / "ca", "demo", now=wall_clock())

    def material(role: Role, name: str) -> TlsMaterial:
        key = LeafKey()
        leaf = authority.issue(key.csr(), PeerIdentity("demo", role, name), lifetime=600, now=wall_clock())
        return TlsMaterial(key.private_pem(), leaf, (authority.certificate,))

    member = "sealring.v1.Membership"
    server = Server([(membership_pb2_grpc.add_MembershipServicer_to_server, Membership(), member)])
    port = server.listen("127.0.0.1:0", server_credentials(TlsStore(material(Role.COORDINATOR, "main"))))
    await server.start()
    name = PeerIdentity("demo", Role.COORDINATOR, "main").server_name
    credentials = channel_credentials(material(Role.MEMBER, "node-a"))
    async with grpc.aio.secure_channel(
        f"127.0.0.1:{port}", credentials, options=channel_options(name)
    ) as channel:
        yield channel
    await server.stop(0)
    await server.wait()


async def test_a_caller_that_writes_meanwhile_reads_why_it_is_refused(channel: grpc.aio.Channel) -> None:
    """gRPC makes INTERNAL of it where the refusal meets the first write; 1 in 7 of these did."""
    stub = membership_pb2_grpc.MembershipStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
    for number in range(100):
        call = stub.Session()
        await asyncio.sleep(number % 10 * 2e-4)
        await call.write(membership_pb2.MemberMessage())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert from_rpc_error(caught.value).reason == "NOT_A_MEMBER"


async def test_a_caller_that_says_nothing_is_refused_all_the_same(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealring.mesh.rpc.interceptor._FIRST_SECONDS", 0.1)
    stub = membership_pb2_grpc.MembershipStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
    for ends in (False, True):
        call = stub.Session(timeout=20)
        if ends:
            await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert from_rpc_error(caught.value).reason == "NOT_A_MEMBER"
