"""The enrolled members and gateways, and the revoked identities."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from sqlite3 import Row
from typing import Self

from sealring.coordinator.store.database import Database, columns
from sealring.mesh.crypto.encoding import pack_fields
from sealring.mesh.crypto.keys import KeyType
from sealring.mesh.errors import NotFound
from sealring.mesh.pki.certificates import Role
from sealring.mesh.trust.levels import TrustLevel

_KEPT_OF_IDENTITY = 100
"""Evictions of one identity that are remembered; a roster lists no more of all together."""


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
    """The end of an enrolment: who was evicted may come back with a token, and who was banned may not.

    It was a member from `enrolled_at` until `at`. Enrolments of one identity do not overlap.
    """

    id: str
    role: Role
    name: str
    identity_key: bytes
    enrolled_at: int
    at: int
    banned: bool

    @classmethod
    def of(cls, who: StoredMember | Revocation, at: int, *, banned: bool) -> Self:
        """The revocation of a member, or of one that was revoked already."""
        return cls(
            who.id, who.role, who.name, who.identity_key, who.enrolled_at, max(at, who.enrolled_at), banned
        )


class Members:
    """Enrolled identities, and enrolments that were ended. A banned identity is never enrolled."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def enrol(self, member: StoredMember) -> None:
        """Add a member, or replace what is known of it.

        A node's latest evictions stay known, because receipts are checked by them. Its enrolment begins after
        the last of them, whatever a clock says.
        """
        kept = _KEPT_OF_IDENTITY if member.role is Role.MEMBER else 0
        known = self.find(member.id)
        with self._database.transaction() as connection:
            connection.execute(
                "DELETE FROM revocations WHERE id = :id AND NOT banned AND enrolled_at NOT IN"
                " (SELECT enrolled_at FROM revocations WHERE id = :id ORDER BY enrolled_at DESC LIMIT :kept)",
                {"id": member.id, "kept": kept},
            )
            last = connection.execute("SELECT max(at) FROM revocations WHERE id = ?", (member.id,))
            ((ended,),) = last.fetchall()
            since = known.enrolled_at if known is not None else max(member.enrolled_at, (ended or 0) + 1)
            self.save(replace(member, enrolled_at=since))

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
        """Removes an identity. A ban is never weakened to an eviction, and no end is made later."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM members WHERE id = ?", (revocation.id,))
            connection.execute(
                "INSERT INTO revocations VALUES"
                " (:id, :role, :name, :identity_key, :enrolled_at, :at, :banned)"
                " ON CONFLICT DO UPDATE SET banned = max(banned, excluded.banned)",
                vars(revocation),
            )

    def banned(self, identifier: str) -> bool:
        """Whether this identity may never come back."""
        row = self._database.row("SELECT 1 FROM revocations WHERE id = ? AND banned", identifier)
        return row is not None

    def revocations(self, *, since: float, limit: int) -> list[Revocation]:
        """The newest revocations after a moment, also of members that are back."""
        rows: Iterable[Row] = self._database.rows(
            "SELECT * FROM revocations WHERE at >= ? ORDER BY at DESC, id LIMIT ?", since, limit
        )
        return [_revocation(row) for row in rows]

    def gone(self, *, limit: int) -> list[Revocation]:
        """The latest revocation of each identity that is not back, the newest first."""
        rows: Iterable[Row] = self._database.rows(
            "SELECT * FROM revocations AS one WHERE id NOT IN (SELECT id FROM members) AND enrolled_at ="
            " (SELECT max(enrolled_at) FROM revocations WHERE id = one.id) ORDER BY at DESC, id LIMIT ?",
            limit,
        )
        return [_revocation(row) for row in rows]

    def find_revocation(self, identifier: str) -> Revocation | None:
        """The latest revocation of an identity, if there is one and it is not enrolled again."""
        return next((one for one in self.gone(limit=-1) if one.id == identifier), None)


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
