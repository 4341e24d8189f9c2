"""Connections to the members of rings, at whichever of their addresses answers first."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from dataclasses import dataclass

from sealring.mesh.member.proof import Credentials
from sealring.mesh.pki.certificates import PeerIdentity, Role
from sealring.mesh.rpc.reach import Reach
from sealring.mesh.rpc.tls import PeerChannel, TlsStore

_FIXED_WINDOW = (("grpc.http2.bdp_probe", 0),)
"""gRPC keeps some hundred bytes for each message that was received and not read. A receive window that
follows the measured bandwidth let a member that floods cost a busy gateway 0.5 GiB
(tests/trust/victim/test_floods.py). A longer message opens the window for its own length."""


@dataclass(frozen=True)
class MemberTarget:
    """A member of a ring with its addresses. It has to prove `identity_key`, its key in the roster."""

    id: str
    identity_key: bytes
    addresses: tuple[str, ...]


class Members:
    """Opens a connection for each stream, and closes those to machines that are no longer members."""

    def __init__(self, cluster: str, store: TlsStore, identity: Credentials) -> None:
        """`identity` proves to members which gateway schedules."""
        self.identity = identity
        self._cluster = cluster
        self._reach = Reach(store, _FIXED_WINDOW)
        self._open: dict[PeerChannel, str] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def connect(self, member: MemberTarget) -> PeerChannel:
        """A connection on which only this member can answer: TLS demands the name of its certificate.

        The caller releases it. Raises Unavailable (PEER_UNREACHABLE).
        """
        peer = PeerIdentity(self._cluster, Role.MEMBER, member.id)
        channel = await self._reach.connect(peer, member.addresses)
        self._open[channel] = member.id
        return channel

    def release(self, channel: PeerChannel) -> None:
        """Closes a connection, with the calls on it, in the background."""
        if self._open.pop(channel, None) is not None:
            task = asyncio.get_running_loop().create_task(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def keep(self, members: Container[str]) -> None:
        """Closes the connections to all others at once."""
        for channel in [each for each, member in self._open.items() if member not in members]:
            self.release(channel)

    async def close(self) -> None:
        """Closes all connections."""
        self.keep(())
        await asyncio.gather(*self._closing)
