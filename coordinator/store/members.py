"""The enrolled members and gateways, and the revoked identities."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from sqlite3 import Row
from typing import Self

from sealring.coordinator.store.database import Database, columns
from sealring.mesh.crypto.encoding import pack_fields
from sealring.mesh.crypto.keys import KeyType
from sealring.mesh.errors import NotFound
from sealring.mesh.pki.certificates import Role
from sealring.mesh.trust.levels import TrustLevel


@dataclass(frozen=True)
class StoredMember:
    """An enrolled node or gateway. A gateway has no sealing key, attestation or addresses.

    `draining` is when a drain ends its rings at the latest, in seconds since 1970; 0 where it does not drain.

    `attestation` is the statement that it joined with, `evidence` the newest that it has signed since, from
    which level and trust follow; `device_chain` is Apple's attestation of its machine, DER, leaf first.
    """

    id: str
    role: Role
    name: str
    identity_key: bytes
    key_type: KeyType
    enrolled_at: int
    sealing_key: bytes = b""
    level: TrustLevel = TrustLevel.NONE
    trust: int = 0
    attestation: bytes = b""
    attested_at: int = 0
    challenged_at: int = 0
    manifest_hash: bytes = b""
    addresses: tuple[str, ...] = ()
    software_version: str = ""
    draining: int = 0
    evidence: bytes = b""
    device_chain: tuple[bytes, ...] = ()

    @property
    def attestation_hash(self) -> bytes:
        """SHA-256 of the statement that the member joined with."""
        return hashlib.sha256(self.attestation).digest()


@dataclass(frozen=True)
class Revocation:
    """An identity that was evicted (it may come back with a token) or banned (it may not)."""

    id: str
    role: Role
    name: str
    identity_key: bytes
    at: int
    banned: bool

    @classmethod
    def of(cls, who: StoredMember | Revocation, at: int, *, banned: bool) -> Self:
        """The revocation of a member, or of one that was revoked already."""
        return cls(who.id, who.role, who.name, who.identity_key, at, banned)


class Members:
    """Enrolled identities and revoked ones; one identity is never both."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def enrol(self, member: StoredMember) -> None:
        """Add a member, or replace what is known of it; an earlier eviction is forgotten."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM revocations WHERE id = ? AND NOT banned", (member.id,))
        self.save(member)

    def save(self, member: StoredMember) -> None:
        """Store every field of a member."""
        lists = {"addresses": json.dumps(member.addresses), "device_chain": pack_fields(*member.device_chain)}
        self._database.write("members", vars(member) | lists)

    def all(self, role: Role | None = None) -> list[StoredMember]:
        """Everyone enrolled, or everyone of one role, by id."""
        rows = self._database.rows(
            "SELECT * FROM members WHERE ? IS NULL OR role = ? ORDER BY id", role, role
        )
        return [_member(row) for row in rows]

    def draining(self) -> set[str]:
        """The ids of those that drain."""
        return {row["id"] for row in self._database.rows("SELECT id FROM members WHERE draining")}

    def find(self, identifier: str) -> StoredMember | None:
        """The member with this id, if it is enrolled."""
        row = self._database.row("SELECT * FROM members WHERE id = ?", identifier)
        return None if row is None else _member(row)

    def get(self, identifier: str) -> StoredMember:
        """The member with this id. Raises NotFound (UNKNOWN_NODE)."""
        member = self.find(identifier)
        if member is None:
            raise unknown_node(identifier)
        return member

    def revoke(self, revocation: Revocation) -> None:
        """Removes an identity. A ban is never weakened to an eviction."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM members WHERE id = ?", (revocation.id,))
            connection.execute(
                "INSERT INTO revocations VALUES (:id, :role, :name, :identity_key, :at, :banned)"
                " ON CONFLICT (id) DO UPDATE SET at = excluded.at, banned = max(banned, excluded.banned)",
                vars(revocation),
            )

    def banned(self, identifier: str) -> bool:
        """Whether this identity may never come back."""
        row = self._database.row("SELECT 1 FROM revocations WHERE id = ? AND banned", identifier)
        return row is not None

    def revocations(self, *, since: float, limit: int) -> list[Revocation]:
        """The newest revocations after a moment."""
        rows: Iterable[Row] = self._database.rows(
            "SELECT * FROM revocations WHERE at >= ? ORDER BY at DESC, id LIMIT ?", since, limit
        )
        return [_revocation(row) for row in rows]

    def find_revocation(self, identifier: str) -> Revocation | None:
        """The revocation of an identity, if there is one."""
        row = self._database.row("SELECT * FROM revocations WHERE id = ?", identifier)
        return None if row is None else _revocation(row)


def unknown_node(identifier: str) -> NotFound:
    """There is no member with this id."""
    return NotFound(
        f"there is no node {identifier[:64]!r}", hint="list the nodes", reason="UNKNOWN_NODE", param="id"
    )


def _revocation(row: Row) -> Revocation:
    return Revocation(**columns(row) | {"role": Role(row["role"]), "banned": bool(row["banned"])})


def _member(row: Row) -> StoredMember:
    kinds = {
        "role": Role(row["role"]),
        "key_type": KeyType(row["key_type"]),
        "level": TrustLevel(row["level"]),
    }
    lists = {"addresses": tuple(json.loads(row["addresses"])), "device_chain": _chain(row["device_chain"])}
    return StoredMember(**columns(row) | kinds | lists)


def _chain(packed: bytes) -> tuple[bytes, ...]:
    certificates: list[bytes] = []
    while packed:
        end = 4 + int.from_bytes(packed[:4], "big")
        certificates.append(packed[4:end])
        packed = packed[end:]
    return tuple(certificates)
