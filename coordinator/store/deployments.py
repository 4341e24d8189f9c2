"""Deployments with their plans, and the epoch counter of every ring that ever was."""

from __future__ import annotations

from dataclasses import dataclass
from sqlite3 import Row

from coordinator.store.database import Database
from mesh.errors import AlreadyExists, NotFound
from sealring.v1 import admin_pb2


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
        row = self._database.row("SELECT asked, plan, created FROM deployments WHERE name = ?", name)
        if row is None:
            raise NotFound(
                f"there is no deployment {name[:128]!r}",
                hint="list the deployments",
                reason="UNKNOWN_DEPLOYMENT",
                param="name",
            )
        return _deployment(row)

    def all(self) -> list[StoredDeployment]:
        """Every deployment, by name."""
        rows = self._database.rows("SELECT asked, plan, created FROM deployments ORDER BY name")
        return [_deployment(row) for row in rows]

    def check_free(self, name: str) -> None:
        """Raises AlreadyExists (NAME_TAKEN)."""
        if self._database.row("SELECT 1 FROM deployments WHERE name = ?", name) is not None:
            raise AlreadyExists(
                f"there is a deployment {name!r} already",
                hint="choose another name, or delete it first",
                reason="NAME_TAKEN",
                param="name",
            )

    def next_epoch(self, ring: str) -> int:
        """The next epoch number of a ring, from 1; never given out twice, not even after a restart."""
        with self._database.transaction() as connection:
            found = connection.execute(
                "INSERT INTO epochs VALUES (?, 1) ON CONFLICT (ring) DO UPDATE SET epoch = epoch + 1"
                " RETURNING epoch",
                (ring,),
            ).fetchone()
        return int(found["epoch"])

    def _write(self, verb: str, deployment: StoredDeployment) -> None:
        with self._database.transaction() as connection:
            connection.execute(
                f"{verb} INTO deployments VALUES (?, ?, ?, ?)",
                (
                    deployment.name,
                    deployment.asked.SerializeToString(deterministic=True),
                    deployment.plan.SerializeToString(deterministic=True),
                    deployment.created,
                ),
            )


def _deployment(row: Row) -> StoredDeployment:
    return StoredDeployment(
        admin_pb2.DeploymentSpec.FromString(row["asked"]),
        admin_pb2.DeploymentPlan.FromString(row["plan"]),
        row["created"],
    )
