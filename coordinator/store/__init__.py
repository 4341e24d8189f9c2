"""The coordinator's memory: SQLite behind one narrow interface per kind of thing."""

from coordinator.store.audit import AuditLog, verify_chain
from coordinator.store.database import Database
from coordinator.store.deployments import Deployments, StoredDeployment
from coordinator.store.members import Members, Revocation, StoredMember
from coordinator.store.operators import OperatorRole, Operators, StoredOperator
from coordinator.store.rosters import Rosters, StoredRoster
from coordinator.store.store import DATABASE_NAME, Store
from coordinator.store.tokens import StoredToken, Tokens

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
