"""What the coordinator tells, checked or as JSON data."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sealring.mesh.trust.levels import level_of

if TYPE_CHECKING:
    from sealring.cli.calls.operator import Admin
    from sealring.mesh.roster.model import Roster
    from sealring.v1 import admin_pb2

AUDIT_PAGE = 1000
"""Entries of a page, as many as the coordinator gives at most: a shorter page is taken for the last."""

_READINGS = 3
"""A second reading follows a prune between two pages. The next prune is thousands of entries away, so whoever
needs more than a third has another trouble."""


@dataclass(frozen=True)
class VerifiedAudit:
    """The numbers of the first and the last verified entry, and the hash of the last."""

    first: int
    last: int
    hash: bytes


async def verify_audit(
    admin: Admin,
    since: VerifiedAudit | None = None,
    newest: deque[admin_pb2.AuditEntry] | None = None,
) -> VerifiedAudit:
    """Reads the audit log page by page and verifies its chain and its beginning.

    Entries before the last of `since`, which an earlier call returned, are not read again; the others are
    added to `newest`. A log whose oldest entries the coordinator drops meanwhile is read again. Raises
    FailedPrecondition (AUDIT_BROKEN).
    """
    from sealring.mesh.audit import changed_outside

    for _ in range(_READINGS):
        read: deque[admin_pb2.AuditEntry] = deque(maxlen=newest.maxlen if newest is not None else 0)
        found = await _read_audit(admin, since, read)
        if found is not None:
            if newest is not None:
                newest.extend(read)
            return found
    raise changed_outside("the audit log loses entries as fast as they are read")


async def _read_audit(
    admin: Admin, since: VerifiedAudit | None, read: deque[admin_pb2.AuditEntry]
) -> VerifiedAudit | None:
    """As `verify_audit`, once; None if the coordinator dropped entries between two pages."""
    from sealring.mesh.audit import Beginning, changed_outside, verify_chain

    last = (since.last - 1, b"") if since else None
    beginning = Beginning()
    while True:
        page = await admin.call("ListAuditLog", after=last[0] if last else 0, limit=AUDIT_PAGE)
        begins = beginning.read(page.entries)
        last = last or begins
        if since and last[0] < since.last:
            if [one.hash for one in page.entries[:1]] != [since.hash]:
                raise changed_outside(f"the audit log is broken at entry {since.last}")
            last = (last[0], page.entries[0].previous)
        if page.entries and page.entries[0].sequence > last[0] + 1:
            (now,) = (await admin.call("ListAuditLog", after=0, limit=1)).entries
            if now.sequence > begins[0] + 1:
                return None
        last = verify_chain(page.entries, after=last)
        read.extend(page.entries)
        if len(page.entries) < AUDIT_PAGE:
            if since is None:
                beginning.check()
            return VerifiedAudit(since.first if since else begins[0] + 1, *last)


def describe_roster(found: Roster) -> dict[str, Any]:
    """A roster as JSON data: hashes in hex, layers as [first, end)."""
    return {
        "cluster": found.cluster,
        "version": found.version,
        "hash": found.hash.hex(),
        "issued": found.issued,
        "expires": found.expires,
        "suites": [str(suite) for suite in found.suites],
        "trust_floor": level_of(found.trust_floor),
        "min_trust": level_of(found.min_trust),
        "members": [
            {
                "id": one.id,
                "key_type": str(one.key_type),
                "level": str(one.level),
                "trust": level_of(one.trust),
                "attested_at": one.attested_at,
                "challenged_at": one.challenged_at,
                "addresses": list(one.addresses),
            }
            for one in found.members
        ],
        "rings": [
            {
                "id": ring.id,
                "deployment": ring.deployment,
                "model": ring.model,
                "strategy": ring.strategy,
                "clear_links": ring.clear_links,
                "context": ring.context,
                "min_trust": level_of(ring.min_trust),
                "members": [
                    {"id": one.id, "rank": one.rank, "layers": list(one.layers)} for one in ring.members
                ],
            }
            for ring in found.rings
        ],
        "gateways": [one.id for one in found.gateways],
        "revoked": [{"id": one.id, "at": one.at} for one in found.revoked],
    }
