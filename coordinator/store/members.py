"""The enrolled members and gateways, and the revoked identities."""

from __future__ import annotations

from collections.abc import Iterable

from sealring.coordinator.store.database import Database
from sealring.coordinator.store.messages import Messages
from sealring.mesh.crypto.keys import KeyType
from sealring.mesh.errors import NotFound
from sealring.mesh.pki.certificates import Role
from sealring.mesh.trust.levels import TrustLevel
from sealring.v1.store_pb2 import Revocation, Revocations, StoredMember

_KEPT_OF_IDENTITY = 100
"""Evictions of one identity that are remembered; a roster lists no more of all together."""


def revocation_of(who: StoredMember | Revocation, at: int, *, banned: bool) -> Revocation:
    """The revocation of a member, or of one that was revoked already."""
    return Revocation(
        id=who.id,
        role=who.role,
        name=who.name,
        identity_key=who.identity_key,
        enrolled_at=who.enrolled_at,
        at=max(at, who.enrolled_at),
        banned=banned,
    )


class Members(Messages[StoredMember]):
    """Enrolled identities, and enrolments that were ended. A banned identity is never enrolled."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, "member", StoredMember, lambda one: one.id, _check_words)
        self._ended = Messages(database, "revocations", Revocations, lambda one: one.id, _check_roles)

    def enrol(self, member: StoredMember) -> None:
        """Add a member, or replace what is known of it.

        A node's latest evictions stay known, because receipts are checked by them. Its enrolment begins after
        the last of them, whatever a clock says.
        """
        kept = _KEPT_OF_IDENTITY if member.role == Role.MEMBER else 0
        with self._database.transaction():
            known, ended = self.find(member.id), self._ends(member.id)
            latest = len(ended) - kept
            self._save_ends(
                [one for place, one in enumerate(ended) if place >= latest or one.banned], member.id
            )
            last = max((one.at for one in self._ends(member.id)), default=0)
            changed = StoredMember()
            changed.CopyFrom(member)
            changed.enrolled_at = known.enrolled_at if known else max(member.enrolled_at, last + 1)
            self.save(changed)

    def all(self, role: Role | None = None) -> list[StoredMember]:
        """Everyone enrolled, or everyone of one role, by id."""
        return [one for one in super().all() if role is None or one.role == role]

    def names(self) -> dict[str, str]:
        """The names of nodes by their ids."""
        return {one.id: one.name for one in self.all(Role.MEMBER)}

    def draining(self) -> set[str]:
        """The ids of those that drain."""
        return {one.id for one in self.all() if one.draining}

    def get(self, identifier: str) -> StoredMember:
        """The member with this id. Raises NotFound (UNKNOWN_NODE)."""
        member = self.find(identifier)
        if member is None:
            raise unknown_node(identifier)
        return member

    def revoke(self, revocation: Revocation) -> None:
        """Removes an identity. A ban is never weakened to an eviction, and no end is made later."""
        ended = self._ends(revocation.id)
        same = next((one for one in ended if one.enrolled_at == revocation.enrolled_at), None)
        if same is None:
            ended.append(revocation)
        else:
            same.banned |= revocation.banned
        with self._database.transaction():
            self.remove(revocation.id)
            self._save_ends(ended, revocation.id)

    def banned(self, identifier: str) -> bool:
        """Whether this identity may never come back."""
        return any(one.banned for one in self._ends(identifier))

    def revocations(self, *, since: float, limit: int | None) -> list[Revocation]:
        """The newest revocations after a moment, also of members that are back."""
        every = [one for each in self._ended.all() for one in each.revocations]
        return _newest((one for one in every if one.at >= since), limit)

    def gone(self, *, limit: int) -> list[Revocation]:
        """The latest revocation of each identity that is not back, the newest first."""
        back = {one.id for one in self.all()}
        latest = [each.revocations[-1] for each in self._ended.all()]
        return _newest((one for one in latest if one.id not in back), limit)

    def find_revocation(self, identifier: str) -> Revocation | None:
        """The latest revocation of an identity, if there is one and it is not enrolled again."""
        ended = self._ends(identifier)
        return ended[-1] if ended and self.find(identifier) is None else None

    def _ends(self, identifier: str) -> list[Revocation]:
        found = self._ended.find(identifier)
        return list(found.revocations) if found else []

    def _save_ends(self, ended: list[Revocation], identifier: str) -> None:
        if ended:
            ended.sort(key=lambda one: one.enrolled_at)
            self._ended.save(Revocations(id=identifier, revocations=ended))
        else:
            self._ended.remove(identifier)


def unknown_node(identifier: str) -> NotFound:
    """There is no member with this id."""
    return NotFound(
        f"there is no node {identifier[:64]!r}", hint="list the nodes", reason="UNKNOWN_NODE", param="id"
    )


def _newest(found: Iterable[Revocation], limit: int | None) -> list[Revocation]:
    return sorted(found, key=lambda one: (-one.at, one.id))[:limit]


def _check_words(member: StoredMember) -> None:
    """Readers compare words: an unknown one must not pass for a good one."""
    Role(member.role), KeyType(member.key_type), TrustLevel(member.level)


def _check_roles(ended: Revocations) -> None:
    for one in ended.revocations:
        Role(one.role)
