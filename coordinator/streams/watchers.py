"""The streams of the gateways: each is sent the roster and the state of every ring, and every change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from sealring.coordinator.store import StoredRoster
from sealring.coordinator.streams.outbox import Outbox
from sealring.mesh.errors import InvalidInput, SealringError
from sealring.mesh.names import MAX_DEPLOYMENT_NAME
from sealring.mesh.roster.model import Roster
from sealring.mesh.rpc.protocol import speaks
from sealring.mesh.system.addresses import parse_address
from sealring.v1.membership_pb2 import Demand, Door, RosterUpdate, WatchResponse
from sealring.v1.proof_pb2 import Release

MAX_DOOR_ADDRESSES = 4
MAX_MODELS = 4096
"""Models in one report of a gateway."""


class Watchers:
    """The open watches and their gateways."""

    def __init__(self, names: Callable[[], Mapping[str, str]] = dict) -> None:
        """`names` gives the names of members by their ids."""
        self._names = names
        self._open: dict[Outbox[WatchResponse], str] = {}
        self._hosts: dict[Outbox[WatchResponse], Collection[str]] = {}
        self._troubles: dict[Outbox[WatchResponse], str] = {}
        self.releases: dict[str, Release] = {}
        self.latest: dict[str, Release] = {}
        """The last release of each gateway, also while it has no watch."""
        self._spoken: dict[str, int] = {}
        """The protocol of each ring's epoch."""
        self.doors: dict[Outbox[WatchResponse], Door] = {}
        """The addresses at which the gateway of each stream takes questions."""
        self.demands: dict[Outbox[WatchResponse], Demand] = {}
        """The last report of each stream on the models on demand; none of gateways that send no reports."""

    def add(self, gateway: str, release: Release, hosts: Collection[str] = ()) -> Outbox[WatchResponse]:
        """A new watch, from a machine with these `hosts`."""
        outbox: Outbox[WatchResponse] = Outbox()
        self._open[outbox] = gateway
        self._hosts[outbox] = hosts
        self.releases[gateway] = self.latest[gateway] = release
        return outbox

    def remove(self, outbox: Outbox[WatchResponse]) -> None:
        """A watch has ended."""
        gateway = self._open.pop(outbox, "")
        self._troubles.pop(outbox, None)
        self._hosts.pop(outbox, None)
        self.demands.pop(outbox, None)
        self.doors.pop(outbox, None)
        if not self.watches(gateway):
            self.releases.pop(gateway, None)

    def troubled(self, outbox: Outbox[WatchResponse], what: str) -> None:
        """Notes a gateway's report of a trouble; "" ends it."""
        self._troubles[outbox] = what

    def opened(self, outbox: Outbox[WatchResponse], door: Door) -> None:
        """Takes a gateway's addresses. Raises InvalidInput (BAD_MESSAGE, BAD_ADDRESS)."""
        for addresses in (door.addresses, door.lan):
            if len(addresses) > MAX_DOOR_ADDRESSES:
                raise InvalidInput("a gateway has too many addresses", reason="BAD_MESSAGE")
            for address in addresses:
                parse_address(address)
        if outbox in self._open:
            self.doors[outbox] = door

    def addresses(self, gateway: str, roster: Roster | None) -> list[str]:
        """The addresses (host:port) at which a connected gateway takes the questions of members: as it says,
        but on its own machine or one of the roster."""
        found = next((one for one in self.doors if self._open.get(one) == gateway), None)
        if found is None:
            return []
        known = roster.hosts if roster is not None else frozenset()
        hosts = known.union(self._hosts[found])
        return [one for one in self.doors[found].addresses if parse_address(one)[0] in hosts]

    def lan(self, gateway: str) -> list[str]:
        """The addresses of a connected gateway's LAN door, as it says, for people to read."""
        found = (door.lan for outbox, door in self.doors.items() if self._open.get(outbox) == gateway)
        return list(next(found, ()))

    def demanded(self, outbox: Outbox[WatchResponse], demand: Demand) -> None:
        """Takes a gateway's report. Raises InvalidInput (BAD_MESSAGE) for one that is out of bounds."""
        if len(demand.models) > MAX_MODELS or any(
            len(one.deployment) > MAX_DEPLOYMENT_NAME for one in demand.models
        ):
            raise InvalidInput("a report on models is out of bounds", reason="BAD_MESSAGE")
        if outbox in self._open:
            self.demands[outbox] = demand

    def trouble(self, gateway: str) -> str:
        """The trouble of a connected gateway: its own report, or a ring whose protocol it lacks."""
        said = (what for outbox, what in self._troubles.items() if self._open.get(outbox) == gateway)
        return next(filter(None, said), "") or self._unspoken(gateway)

    def _unspoken(self, gateway: str) -> str:
        release = self.releases.get(gateway)
        for ring, protocol in sorted(self._spoken.items()):
            if release is not None and protocol and not speaks(protocol, release):
                return f"it does not speak protocol {protocol} of ring {ring}: update the older of the two"
        return ""

    def watches(self, gateway: str) -> bool:
        """Whether a gateway has an open watch."""
        return gateway in self._open.values()

    def tell(self, event: WatchResponse) -> None:
        """Tell every gateway."""
        if event.HasField("ring"):
            self._spoken[event.ring.ring] = event.ring.protocol
        elif event.HasField("gone"):
            self._spoken.pop(event.gone.ring, None)
        for outbox in list(self._open):
            tell(outbox, event)

    def roster_published(self, roster: StoredRoster) -> None:
        """Tell every gateway of a new roster."""
        self.tell(self.roster_event(roster))

    def roster_event(self, roster: StoredRoster) -> WatchResponse:
        """A roster as gateways see it."""
        return WatchResponse(roster=RosterUpdate(envelope=roster.envelope, names=self._names()))

    def throw_out(self, gateway: str, error: SealringError) -> None:
        """End the watches of a gateway for good."""
        self.latest.pop(gateway, None)
        for outbox, owner in list(self._open.items()):
            if owner == gateway:
                outbox.close(error)

    def close_all(self) -> None:
        """End every watch."""
        for outbox in list(self._open):
            outbox.close()


def tell(outbox: Outbox[WatchResponse], event: WatchResponse) -> None:
    """Queues an event in place of an older one on the same subject: a gateway needs the newest state alone,
    however slowly it reads. A roster is sent before the rings that formed under it."""
    kind = event.WhichOneof("event")
    if kind == "roster":
        outbox.put_latest("roster", event, first=True)
    elif kind == "all_told":
        outbox.put_latest(kind, event)
    elif kind in ("model", "model_gone"):
        outbox.put_latest(("model", getattr(event, kind).deployment), event)
    else:
        outbox.put_latest(("ring", getattr(event, str(kind)).ring), event)
