"""Control streams to the members of a ring that another process plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.control import EpochSession, MemberTarget
from mesh.certificates import Role
from mesh.errors import EpochEnded
from mesh.memberstate import load_member_state
from mesh.proof import Identity, by_identity
from mesh.roster_keeper import RosterKeeper
from mesh.tls import PeerChannel, TlsStore


def open_session(cluster: Any, before: tuple[str, ...] = ()) -> tuple[EpochSession, list[PeerChannel]]:
    """A session with every member, and the channels of it; `before` are addresses tried first."""
    store = TlsStore(cluster.material(cluster.peer(cluster.gateway, Role.GATEWAY)))
    peers = [cluster.peer(signer, Role.MEMBER) for signer in cluster.members]
    targets = [
        MemberTarget(
            peer.id,
            signer.public_key,
            tuple(
                PeerChannel(address, store, peer.server_name) for address in (*before, f"127.0.0.1:{port}")
            ),
        )
        for peer, signer, port in zip(peers, cluster.members, cluster.ports, strict=True)
    ]
    state = load_member_state(cluster.state_dir)
    keeper = RosterKeeper(cluster.state_dir, state)
    keeper.load()
    identity = Identity(state.peer.cluster, state.peer.id, by_identity(cluster.gateway), lambda: keeper.held)
    channels = [channel for target in targets for channel in target.channels]
    return EpochSession("ring-0", 1, targets, identity), channels


@pytest.fixture
async def silent_address() -> AsyncIterator[str]:
    """Takes connections and never says a word."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def test_an_address_that_swallows_everything_does_not_hide_the_next(
    make_cluster: Any, silent_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.control.ATTACH_SECONDS", 4.0)
    cluster = await make_cluster(1)
    session, channels = open_session(cluster, (silent_address,))
    async with asyncio.timeout(10):
        assert len(await session.attach()) == 1
    session.cancel()
    for channel in channels:
        await channel.close()


async def test_a_channel_that_is_replaced_ends_the_epoch_with_a_reason(make_cluster: Any) -> None:
    """Its certificate has ended; nobody was told why the ring was lost, once."""
    cluster = await make_cluster(2)
    session, channels = open_session(cluster)
    assert len(await session.attach()) == 2
    heard = asyncio.Event()
    running = asyncio.create_task(session.run(lambda response: heard.set()))
    async with asyncio.timeout(10):
        await heard.wait()
        await channels[1].close()
        with pytest.raises(EpochEnded) as raised:
            await running
    assert raised.value.reason == "CHANNEL_REPLACED"
    assert raised.value.metadata["member"] == cluster.peer(cluster.members[1], Role.MEMBER).id
    session.cancel()
    await channels[0].close()
