"""The programs of a member: they ask gateways and look at the cluster by the certificate that the member's
node keeps for them, without a key of the node."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sealring.cli.calls.gateway import NO_ACCESS, GatewayAccess, gateway_access
from sealring.cli.here.found import cluster_here, require_account
from sealring.mesh.errors import ConfigError, SealringError, Unavailable
from sealring.mesh.system.files import read_bounded, write_atomic

if TYPE_CHECKING:
    import grpc.aio

    from sealring.cli.settings import CliSettings
    from sealring.mesh.rpc.tls import PeerChannel
    from sealring.mesh.settings.config import Loaded

_GATEWAYS = "gateways.json"
_SECONDS = 4.0


@asynccontextmanager
async def gateways_of(loaded: Loaded[CliSettings]) -> AsyncIterator[tuple[Sequence[str], GatewayAccess]]:
    """The gateways of the settings; by default on a member those that take its questions. Raises as
    `gateway_access` and `MemberChannels.find`."""
    folder = cluster_here().member if loaded.origin["gateway"] == "default" else None
    if folder is None:
        yield loaded.settings.gateway, gateway_access(loaded)
        return
    async with aclosing(MemberChannels(folder)) as channels:
        yield await channels.find(), {**NO_ACCESS, "channels": channels}


class MemberChannels:
    """Connections to gateways with the certificate in `folder`, which its node renews. For one event loop.

    Raises ConfigError (NOT_ENROLLED, MEMBER_STATE_CORRUPT, SECRET_FILE_UNSAFE), PermissionDenied
    (OTHERS_STATE).
    """

    def __init__(self, folder: Path) -> None:
        from sealring.mesh.member.state import load_machine_state
        from sealring.mesh.pki.certificates import Role, role_server_name
        from sealring.mesh.rpc.tls import TlsStore

        require_account(folder)
        self._folder, self._name = folder, role_server_name(Role.GATEWAY)
        self._stamp = self._read_stamp()
        self.state = load_machine_state(folder)
        self._store = TlsStore(self.state.tls)
        self._peers: dict[str, PeerChannel] = {}

    def get(self, gateway: str) -> grpc.aio.Channel:
        """The connection to a gateway (host:port), with the newest certificate."""
        from sealring.mesh.rpc.tls import PeerChannel

        self._refresh()
        if gateway not in self._peers:
            self._peers[gateway] = PeerChannel(gateway, self._store, self._name)
        return self._peers[gateway].get()

    async def close(self) -> None:
        """Closes them; `contextlib.aclosing` does so at the end of a block."""
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            await peer.close()

    aclose = close

    async def find(self) -> Sequence[str]:
        """host:port at which gateways take this member's questions, one that answers first.

        While the coordinator does not answer they are those of the last time, and while no gateway follows it
        yet those of them that are still enrolled. Raises Unavailable (NO_GATEWAY).
        """
        from sealring.cli.calls.operator import connect
        from sealring.mesh.rpc.reach import connected, first_of
        from sealring.mesh.rpc.tls import PeerChannel

        self._refresh()
        gateways = self._remembered()
        with contextlib.suppress(SealringError):
            async with connect(self._folder, seconds=_SECONDS) as admin:
                listed = (await admin.call("ListNodes")).gateways
            watching = {one.id: list(one.addresses) for one in listed if one.watching and one.addresses}
            gateways = watching or {one.id: gateways[one.id] for one in listed if one.id in gateways}
            with contextlib.suppress(OSError):  # a full disk keeps nobody from asking
                write_atomic(self._folder / _GATEWAYS, json.dumps(gateways).encode())
        found = [address for addresses in gateways.values() for address in addresses]
        answers = await first_of(
            found, lambda one: connected(one, self._store, self._name, seconds=_SECONDS), PeerChannel.close
        )
        if answers is None:
            raise Unavailable(
                "no gateway answers that takes the questions of members",
                hint="start `sealring up` on the first machine, with this release",
                reason="NO_GATEWAY",
            )
        if answers.address in self._peers:
            await answers.close()
        else:
            self._peers[answers.address] = answers
        return [answers.address, *(one for one in found if one != answers.address)]

    def fails(self, gateway: str) -> bool:
        """Whether the last attempt to connect to a gateway has failed."""
        from grpc import ChannelConnectivity

        peer = self._peers.get(gateway)
        return peer is not None and peer.get().get_state() is ChannelConnectivity.TRANSIENT_FAILURE

    def _remembered(self) -> dict[str, list[str]]:
        """The addresses of gateways by id; none of those that an earlier release has written without it."""
        try:
            found = json.loads(read_bounded(self._folder / _GATEWAYS))
            return {str(one): [str(address) for address in at] for one, at in found.items()}
        except (OSError, ValueError, TypeError, AttributeError, SealringError):
            return {}

    def _refresh(self) -> None:
        from sealring.mesh.member.state import load_machine_state

        with contextlib.suppress(OSError, ConfigError):
            stamp = self._read_stamp()
            if stamp != self._stamp:
                self.state = load_machine_state(self._folder)
                self._store.replace(self.state.tls)
                self._stamp = stamp

    def _read_stamp(self) -> tuple[int, int]:
        found = (self._folder / "tls.pem").stat()
        return found.st_ino, found.st_mtime_ns
