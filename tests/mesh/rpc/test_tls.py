"""mTLS over real gRPC servers on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from leaftest import material

from sealring.mesh.clock import wall_clock
from sealring.mesh.errors import CertificateError, SealringError, Unauthenticated
from sealring.mesh.pki import ClusterCA, PeerIdentity, Role, TlsMaterial, role_server_name
from sealring.mesh.rpc import (
    PeerChannel,
    TlsStore,
    channel_options,
    is_own_cancellation,
    joining_channel,
    peer_certificate,
    peer_identity,
    secure_channel,
    server_credentials,
    tls,
)
from sealring.mesh.rpc.server import SERVER_OPTIONS


def make_material(ca: ClusterCA, role: Role, name: str) -> TlsMaterial:
    return material(ca, PeerIdentity("demo", role, name))


@pytest.fixture
def ca(tmp_path: Path) -> ClusterCA:
    return ClusterCA.create(tmp_path / "ca", "demo", now=wall_clock())


async def who(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    try:
        return peer_identity(context).uri.encode()
    except SealringError as error:
        return error.reason.encode()


async def which(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    try:
        return peer_certificate(context)
    except Unauthenticated as error:
        return error.reason.encode()


async def echo(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def start_server(store: TlsStore, *, require_client: bool = True) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = {
        "Who": grpc.unary_unary_rpc_method_handler(who),
        "Which": grpc.unary_unary_rpc_method_handler(which),
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
    }
    server.add_registered_method_handlers("test.Test", handlers)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(store, require_client=require_client))
    await server.start()
    return server, f"127.0.0.1:{port}"


async def ask(channel: grpc.aio.Channel) -> str:
    answer: bytes = await channel.unary_unary("/test.Test/Who")(b"", timeout=200)
    return answer.decode()


def member_channel(address: str, material: TlsMaterial, server_name: str) -> grpc.aio.Channel:
    return secure_channel(address, material, channel_options(server_name))


async def test_a_member_cannot_pose_as_another_or_as_the_coordinator(ca: ClusterCA) -> None:
    server, address = await start_server(TlsStore(make_material(ca, Role.MEMBER, "node-b")))
    client = make_material(ca, Role.MEMBER, "node-a")
    for name in ("node-c.member.sealring.internal", role_server_name(Role.COORDINATOR)):
        async with member_channel(address, client, name) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/test.Test/Who")(b"", timeout=100)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(None)


async def test_another_clusters_certificate_is_refused_both_ways(ca: ClusterCA, tmp_path: Path) -> None:
    other = ClusterCA.create(tmp_path / "other", "demo", now=wall_clock())
    server, address = await start_server(TlsStore(make_material(ca, Role.MEMBER, "node-b")))
    stranger = make_material(other, Role.MEMBER, "node-a")
    forged = TlsMaterial(stranger.private_key, stranger.certificate, (ca.certificate,))
    for shown in (stranger, forged):
        async with member_channel(address, shown, "node-b.member.sealring.internal") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(channel)
    await server.stop(None)


async def test_rotation_keeps_open_streams_and_moves_new_calls(
    ca: ClusterCA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "IDLE_MILLISECONDS", 1000)
    newer = ClusterCA.create(tmp_path / "newer", "demo", now=wall_clock())
    both = (ca.certificate, newer.certificate)
    server_store = TlsStore(make_material(ca, Role.MEMBER, "node-b"))
    server, address = await start_server(server_store)
    client_store = TlsStore(make_material(ca, Role.MEMBER, "node-a"))
    peer = PeerChannel(address, client_store, "node-b.member.sealring.internal")
    stream = peer.get().stream_stream("/test.Test/Echo")()
    await stream.write(b"before")
    assert await stream.read() == b"before"
    for store, ca_, name in ((client_store, ca, "node-a2"), (server_store, newer, "node-b")):
        fresh = make_material(ca_, Role.MEMBER, name)
        store.replace(TlsMaterial(fresh.private_key, fresh.certificate, both))
    assert await ask(peer.get()) == "spiffe://demo/member/node-a2"
    await stream.write(b"after")
    assert await stream.read() == b"after"
    async with asyncio.timeout(200):
        while (state := peer.get().get_state()) is not grpc.ChannelConnectivity.IDLE:
            await peer.get().wait_for_state_change(state)
    await stream.write(b"idle")
    assert await stream.read() == b"idle", "though the connection beside it had nothing to do"
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    await peer.close()
    await server.stop(None)


async def test_a_retired_channel_lives_as_long_as_its_streams(ca: ClusterCA) -> None:
    """What ends them is the other end, when nobody proves them anew."""
    server, address = await start_server(TlsStore(make_material(ca, Role.MEMBER, "node-b")))
    store = TlsStore(make_material(ca, Role.MEMBER, "node-a"))
    peer = PeerChannel(address, store, "node-b.member.sealring.internal")
    stream = peer.get().stream_stream("/test.Test/Echo")()
    await stream.write(b"x")
    assert await stream.read() == b"x"
    store.replace(make_material(ca, Role.MEMBER, "node-a"))
    assert await ask(peer.get()) == "spiffe://demo/member/node-a"
    (retiring,) = peer.retiring
    await stream.write(b"y")
    assert await stream.read() == b"y"
    assert not retiring.done()
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    async with asyncio.timeout(200):
        await retiring
    await asyncio.sleep(0)
    assert not peer.retiring, "nobody keeps what has ended"
    await peer.close()
    await server.stop(None)


@pytest.mark.parametrize("waits", [0, 3])
async def test_a_channel_that_is_closed_takes_its_retired_ones_along(ca: ClusterCA, waits: int) -> None:
    """Even where it is closed before anybody has begun to close those."""
    server, address = await start_server(TlsStore(make_material(ca, Role.MEMBER, "node-b")))
    store = TlsStore(make_material(ca, Role.MEMBER, "node-a"))
    peer = PeerChannel(address, store, "node-b.member.sealring.internal")
    stream = peer.get().stream_stream("/test.Test/Echo")()
    await stream.write(b"x")
    assert await stream.read() == b"x"
    store.replace(make_material(ca, Role.MEMBER, "node-a"))
    peer.get()
    for _ in range(waits):
        await asyncio.sleep(0)
    await peer.close()
    for _ in range(10):
        await asyncio.sleep(0)
    assert stream.done()
    await server.stop(None)


async def test_a_cancellation_is_ones_own_or_the_calls() -> None:
    outcomes: list[bool] = []

    async def wait(call: asyncio.Future[None]) -> None:
        try:
            await call
        except asyncio.CancelledError:
            outcomes.append(is_own_cancellation())

    for own in (False, True):
        call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(wait(call))
        await asyncio.sleep(0)
        (task if own else call).cancel()
        await task
    assert outcomes == [False, True]
    assert not is_own_cancellation(), "nobody was"


@pytest.mark.parametrize("renewed", [False, True])
async def test_a_channel_over_which_nobody_has_called_pauses_too(ca: ClusterCA, renewed: bool) -> None:
    """A daemon that starts while its coordinator is away, or whose certificate was renewed meanwhile."""
    store = TlsStore(make_material(ca, Role.MEMBER, "node-a"))
    peer = PeerChannel("127.0.0.1:1", store, "node-b")
    if renewed:
        store.replace(make_material(ca, Role.MEMBER, "node-a"))
    pausing = asyncio.create_task(peer.pause(3600))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not pausing.done()
    pausing.cancel()
    await asyncio.wait((pausing,))


async def test_a_pause_ends_with_a_newer_certificate(ca: ClusterCA) -> None:
    store = TlsStore(make_material(ca, Role.MEMBER, "node-a"))
    peer = PeerChannel("127.0.0.1:1", store, "x")
    peer.get()
    await peer.pause(0)
    pausing = asyncio.create_task(peer.pause(3600))
    renewals = peer.renewed()
    renewing = asyncio.create_task(anext(renewals))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    newer = make_material(ca, Role.MEMBER, "node-a")
    store.replace(newer)
    for _ in range(10):
        await asyncio.sleep(0)
    assert pausing.done(), "long before its time"
    assert renewing.done()
    assert await renewing == newer.certificate
    await peer.close()


class FakeContext:
    def __init__(self, **properties: list[bytes]) -> None:
        self._properties = properties

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._properties


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"peer_uri": [b"spiffe://demo/member/a"]},
        {"transport_security_type": [b"insecure"], "peer_uri": [b"spiffe://demo/member/a"]},
        {"transport_security_type": [b"ssl"]},
        {
            "transport_security_type": [b"ssl"],
            "peer_uri": [b"spiffe://demo/member/a", b"spiffe://demo/member/b"],
        },
    ],
)
def test_peer_identity_needs_one_verified_uri(properties: dict[str, list[bytes]]) -> None:
    with pytest.raises(Unauthenticated):
        peer_identity(FakeContext(**properties))


@pytest.mark.parametrize(
    "uri",
    [
        b"",
        b"http://demo/member/a",
        b"spiffe://demo/member/",
        b"spiffe://demo/member/a/b",
        b"spiffe://demo/root/a",
        b"spiffe://demo/member/a\n",
        b"spiffe://DEMO/member/a",
        b"spiffe://demo/member/-a",
        b"spiffe://demo/member/a\xff",
    ],
)
def test_peer_identity_refuses_other_uris(uri: bytes) -> None:
    with pytest.raises(CertificateError):
        peer_identity(FakeContext(transport_security_type=[b"ssl"], peer_uri=[uri]))


def test_material_shows_no_key(ca: ClusterCA) -> None:
    assert "PRIVATE" not in repr(make_material(ca, Role.MEMBER, "node-a"))


async def test_a_caller_is_known_by_the_certificate_of_its_handshake(ca: ClusterCA) -> None:
    server, address = await start_server(TlsStore(make_material(ca, Role.MEMBER, "node-b")))
    for client in (make_material(ca, Role.GATEWAY, "gate"), make_material(ca, Role.GATEWAY, "gate")):
        async with member_channel(address, client, "node-b.member.sealring.internal") as channel:
            assert await ask(channel) == "spiffe://demo/gateway/gate"
            assert await channel.unary_unary("/test.Test/Which")(b"", timeout=200) == client.certificate
    await server.stop(None)


async def test_only_the_joining_port_takes_a_client_without_a_certificate_and_knows_it(ca: ClusterCA) -> None:
    store = TlsStore(make_material(ca, Role.COORDINATOR, "main"))
    for joining in (True, False):
        server, address = await start_server(store, require_client=not joining)
        async with joining_channel(address, (ca.certificate,)) as channel:
            if joining:
                assert await ask(channel) == "NO_CLIENT_CERTIFICATE"
                which = await channel.unary_unary("/test.Test/Which")(b"", timeout=200)
                assert which == b"NO_CLIENT_CERTIFICATE"
            else:
                with pytest.raises(grpc.aio.AioRpcError):
                    await ask(channel)
        await server.stop(None)


@pytest.mark.parametrize("found", [[], [b""], [b"junk"], [b"junk", b"junk"]])
def test_no_readable_certificate_is_none(found: list[bytes]) -> None:
    class Context:
        def auth_context(self) -> dict[str, list[bytes]]:
            return {"x509_pem_cert": found}

    with pytest.raises(Unauthenticated):
        peer_certificate(Context())
