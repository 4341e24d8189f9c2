"""Deployments with their plans, and the epoch counter of every ring that ever was."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from sqlite3 import Row

from sealring.coordinator.planning.older import read_plan
from sealring.coordinator.store.database import Database
from sealring.mesh.crypto.encoding import pack_fields
from sealring.mesh.errors import AlreadyExists, NotFound
from sealring.v1 import admin_pb2

_SKIPPED = "skipped_epochs"


@dataclass(frozen=True)
class StoredDeployment:
    """An accepted plan and what was asked for; `created` in seconds since 1970."""

    asked: admin_pb2.DeploymentSpec
    plan: admin_pb2.DeploymentPlan
    created: int

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.plan.spec.name


class Deployments:
    """The accepted deployments."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, deployment: StoredDeployment) -> None:
        """Raises AlreadyExists (NAME_TAKEN)."""
        self.check_free(deployment.name)
        self._write("INSERT", deployment)

    def replace(self, deployment: StoredDeployment) -> None:
        """Store another plan under the same name."""
        self._write("REPLACE", deployment)

    def remove(self, name: str) -> StoredDeployment:
        """Raises NotFound (UNKNOWN_DEPLOYMENT)."""
        deployment = self.get(name)
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM deployments WHERE name = ?", (name,))
        return deployment

    def get(self, name: str) -> StoredDeployment:
        """Raises NotFound (UNKNOWN_DEPLOYMENT)."""
        row = self._database.row("SELECT * FROM deployments WHERE name = ?", name)
        if row is None:
            raise NotFound(
                f"there is no deployment {name[:128]!r}",
                hint="list the deployments",
                reason="UNKNOWN_DEPLOYMENT",
                param="name",
            )
        return self._deployment(row)

    def all(self) -> list[StoredDeployment]:
        """Every deployment, by name."""
        rows = self._database.rows("SELECT * FROM deployments ORDER BY name")
        return [self._deployment(row) for row in rows]

    def check_free(self, name: str) -> None:
        """Raises AlreadyExists (NAME_TAKEN)."""
        if self._database.row("SELECT 1 FROM deployments WHERE name = ?", name) is not None:
            raise AlreadyExists(
                f"there is a deployment {name!r} already",
                hint=f"end it first: sealring deployment delete {name}; or choose another name: --name",
                reason="NAME_TAKEN",
                param="name",
            )

    def next_epoch(self, ring: str) -> int:
        """The next epoch number of a ring, from 1 or above what was skipped; never given out twice, not even
        after a restart."""
        with self._database.transaction() as connection:
            skipped = self._database.row("SELECT value FROM meta WHERE name = ?", _SKIPPED)
            found = connection.execute(
                "INSERT INTO epochs VALUES (?, ?) ON CONFLICT (ring) DO UPDATE SET epoch = epoch + 1"
                " RETURNING epoch",
                (ring, int(skipped["value"]) + 1 if skipped else 1),
            ).fetchone()
        return int(found["epoch"])

    def last_epoch(self, ring: str) -> int:
        """The number that `next_epoch` gave last; 0 if it gave none."""
        found = self._database.row("SELECT epoch FROM epochs WHERE ring = ?", ring)
        return int(found["epoch"]) if found else 0

    def skip_epochs(self, count: int) -> None:
        """Never give out the next `count` numbers of any ring, of those that are not known here either."""
        last = self._database.row("SELECT max(epoch) AS epoch FROM epochs")
        skipped = self._database.row("SELECT value FROM meta WHERE name = ?", _SKIPPED)
        newest = max(last["epoch"] or 0 if last else 0, int(skipped["value"]) if skipped else 0)
        with self._database.transaction() as connection:
            connection.execute("UPDATE epochs SET epoch = ?", (newest + count,))
            connection.execute("REPLACE INTO meta VALUES (?, ?)", (_SKIPPED, str(newest + count).encode()))

    def _write(self, verb: str, deployment: StoredDeployment) -> None:
        asked = deployment.asked.SerializeToString(deterministic=True)
        plan = deployment.plan.SerializeToString(deterministic=True)
        values = (deployment.name, asked, plan, deployment.created, _checksum(deployment.name, asked, plan))
        with self._database.transaction() as connection:
            connection.execute(f"{verb} INTO deployments VALUES (?, ?, ?, ?, ?)", values)

    def _deployment(self, row: Row) -> StoredDeployment:
        if row["checksum"] != _checksum(row["name"], row["asked"], row["plan"]):
            raise self._database.corrupt("deployments", f"deployment {row['name'][:128]!r}")
        return StoredDeployment(
            admin_pb2.DeploymentSpec.FromString(row["asked"]),
            read_plan(admin_pb2.DeploymentPlan.FromString(row["plan"])),
            row["created"],
        )


def _checksum(name: str, asked: bytes, plan: bytes) -> bytes:
    return hashlib.sha256(pack_fields(name.encode(), asked, plan)).digest()
