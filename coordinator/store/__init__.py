"""The coordinator's memory: SQLite behind one narrow interface per kind of thing."""

from sealring.coordinator.store.joincodes import StoredJoinCode
from sealring.coordinator.store.members import revocation_of
from sealring.coordinator.store.operators import OperatorRole
from sealring.coordinator.store.store import DATABASE_NAME, Store
from sealring.v1.store_pb2 import (
    Revocation,
    StoredDeployment,
    StoredMember,
    StoredOperator,
    StoredRoster,
    StoredToken,
)

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
    "revocation_of",
]
