"""Control streams to the members of a ring that another process plays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.control import EpochSession, MemberTarget
from mesh.certificates import Role
from mesh.errors import EpochEnded
from mesh.memberstate import load_member_state
from mesh.proof import Identity, by_identity
from mesh.roster_keeper import RosterKeeper
from mesh.tls import PeerChannel, TlsStore


async def test_a_channel_that_is_replaced_ends_the_epoch_with_a_reason(make_cluster: Any) -> None:
    """Its certificate has ended; nobody was told why the ring was lost, once."""
    cluster = await make_cluster(2)
    store = TlsStore(cluster.material(cluster.peer(cluster.gateway, Role.GATEWAY)))
    peers = [cluster.peer(signer, Role.MEMBER) for signer in cluster.members]
    channels = [
        PeerChannel(f"127.0.0.1:{port}", store, peer.server_name)
        for port, peer in zip(cluster.ports, peers, strict=True)
    ]
    targets = [
        MemberTarget(peer.id, signer.public_key, (channel,))
        for peer, signer, channel in zip(peers, cluster.members, channels, strict=True)
    ]
    state = load_member_state(cluster.state_dir)
    keeper = RosterKeeper(cluster.state_dir, state)
    keeper.load()
    identity = Identity(state.peer.cluster, state.peer.id, by_identity(cluster.gateway), lambda: keeper.held)
    session = EpochSession("ring-0", 1, targets, identity)
    assert len(await session.attach()) == 2
    heard = asyncio.Event()
    running = asyncio.create_task(session.run(lambda response: heard.set()))
    async with asyncio.timeout(10):
        await heard.wait()
        await channels[1].close()
        with pytest.raises(EpochEnded) as raised:
            await running
    assert raised.value.reason == "CHANNEL_REPLACED"
    assert raised.value.metadata["member"] == peers[1].id
    session.cancel()
    await channels[0].close()
