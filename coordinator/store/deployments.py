"""Deployments with their plans, the rings that they had, and the epoch counters of all rings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sealring.coordinator.store.database import Database
from sealring.coordinator.store.messages import Messages
from sealring.mesh.errors import AlreadyExists, NotFound
from sealring.v1.membership_pb2 import FormerRing
from sealring.v1.store_pb2 import StoredDeployment, StoredFormer, StoredNumber

_ALL = ""
"""No ring has this name: its number is that which was skipped in rings that are not known here."""


class Deployments(Messages[StoredDeployment]):
    """The accepted deployments."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, "deployment", StoredDeployment, lambda one: one.name)
        self._epochs = Messages(database, "epoch", StoredNumber, lambda one: one.name)
        self._former = Messages(database, "former", StoredFormer, lambda one: one.deployment)

    def add(self, deployment: StoredDeployment) -> None:
        """Raises AlreadyExists (NAME_TAKEN)."""
        self.check_free(deployment.name)
        self.save(deployment)

    def get(self, name: str) -> StoredDeployment:
        """Raises NotFound (UNKNOWN_DEPLOYMENT)."""
        found = self.find(name)
        if found is None:
            raise NotFound(
                f"there is no deployment {name[:128]!r}",
                hint="list the deployments",
                reason="UNKNOWN_DEPLOYMENT",
                param="name",
            )
        return found

    def check_free(self, name: str) -> None:
        """Raises AlreadyExists (NAME_TAKEN)."""
        if self.find(name) is not None:
            raise AlreadyExists(
                f"there is a deployment {name!r} already",
                hint=f"end it first: sealring deployment delete {name} (sealring deployment plan says before "
                "whether the new one can be); or choose another name: --name",
                reason="NAME_TAKEN",
                param="name",
            )

    def former(self) -> dict[str, list[FormerRing]]:
        """The rings over which epochs were committed, by deployment, the newest first."""
        return {one.deployment: list(one.rings) for one in self._former.all()}

    def save_former(self, known: Mapping[str, Sequence[FormerRing]]) -> None:
        """Stores these in place of what `former` gives."""
        with self._database.transaction():
            self._former.clear()
            for name, rings in known.items():
                self._former.save(StoredFormer(deployment=name, rings=rings))

    def next_epoch(self, ring: str) -> int:
        """The next epoch number of a ring, from 1 or above what was skipped; never given out twice, not even
        after a restart."""
        with self._database.transaction():
            found = self._epochs.find(ring) or self._epochs.find(_ALL) or StoredNumber()
            found.name, found.number = ring, found.number + 1
            self._epochs.save(found)
        return found.number

    def last_epoch(self, ring: str) -> int:
        """The number that `next_epoch` gave last; 0 if it gave none."""
        found = self._epochs.find(ring)
        return found.number if found else 0

    def skip_epochs(self, count: int) -> None:
        """Never give out the next `count` numbers of any ring, of those that are not known here either."""
        with self._database.transaction():
            known = self._epochs.all()
            newest = max((one.number for one in known), default=0)
            for ring in {*(one.name for one in known), _ALL}:
                self._epochs.save(StoredNumber(name=ring, number=newest + count))
