"""The coordinator's memory: SQLite behind one narrow interface per kind of thing."""

from sealring.coordinator.store.deployments import StoredDeployment
from sealring.coordinator.store.joincodes import StoredJoinCode
from sealring.coordinator.store.members import Revocation, StoredMember
from sealring.coordinator.store.operators import OperatorRole, StoredOperator
from sealring.coordinator.store.rosters import StoredRoster
from sealring.coordinator.store.store import DATABASE_NAME, Store
from sealring.coordinator.store.tokens import StoredToken

__all__ = [
    "DATABASE_NAME",
    "OperatorRole",
    "Revocation",
    "Store",
    "StoredDeployment",
    "StoredJoinCode",
    "StoredMember",
    "StoredOperator",
    "StoredRoster",
    "StoredToken",
]
