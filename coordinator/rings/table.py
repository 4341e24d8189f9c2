"""The rings of all deployments, and of them those in service."""

from __future__ import annotations

from sealring.coordinator.rings.running import RunningRing
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import StoredDeployment
from sealring.v1 import admin_pb2

_MAX_GRACE_SECONDS = 300
_RELOAD_SECONDS = 30


class RingTable:
    """The state that the parts of the coordinator that handle rings share.

    `planned` are the rings of the stored deployments, `running` those of them that are in service, by name.
    `not_moved` says, by ring, why no other nodes could take it over.
    """

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.planned: list[tuple[StoredDeployment, admin_pb2.RingPlan]] = []
        self.running: dict[str, RunningRing] = {}
        self.not_moved: dict[str, str] = {}
        self.patience = int(min(settings.replace_after, _MAX_GRACE_SECONDS)) + _RELOAD_SECONDS
        """Seconds for which a ring that is down takes new requests: until its silent member is replaced (five
        minutes at most), and until the new member has loaded."""

    def of(self, member: str) -> list[tuple[str, RunningRing]]:
        """The rings in service that a node is a member of, by name."""
        return [
            (name, running) for name, running in self.running.items() if member in running.machine.members
        ]

    def find(self, member: str, ring: str) -> RunningRing | None:
        """The ring of that name, if it is in service and the node is a member: others cannot report on it."""
        running = self.running.get(ring)
        return running if running is not None and member in running.machine.members else None
