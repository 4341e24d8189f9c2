"""The coordinator's memory: SQLite behind one narrow interface per kind of thing."""

from sealring.coordinator.store.audit import AuditLog, verify_chain
from sealring.coordinator.store.database import Database
from sealring.coordinator.store.deployments import Deployments, StoredDeployment
from sealring.coordinator.store.members import Members, Revocation, StoredMember
from sealring.coordinator.store.operators import OperatorRole, Operators, StoredOperator
from sealring.coordinator.store.rosters import Rosters, StoredRoster
from sealring.coordinator.store.store import DATABASE_NAME, Store
from sealring.coordinator.store.tokens import StoredToken, Tokens

__all__ = [
    "DATABASE_NAME",
    "AuditLog",
    "Database",
    "Deployments",
    "Members",
    "OperatorRole",
    "Operators",
    "Revocation",
    "Rosters",
    "Store",
    "StoredDeployment",
    "StoredMember",
    "StoredOperator",
    "StoredRoster",
    "StoredToken",
    "Tokens",
    "verify_chain",
]
