"""What the coordinator tells, checked against the root key of the operator bundle."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from sealring.mesh.trust.levels import level_of

if TYPE_CHECKING:
    from sealring.cli.calls.operator import Admin
    from sealring.mesh.audit import AuditHead
    from sealring.mesh.roster.model import Roster
    from sealring.v1 import admin_pb2

_AUDIT_PAGE = 1000


async def verify_audit(
    admin: Admin,
    pin: bytes,
    since: AuditHead | None = None,
    newest: deque[admin_pb2.AuditEntry] | None = None,
) -> tuple[int, bytes, AuditHead]:
    """How many entries there are, the hash of the last, and what of them the roster keys signed.

    Entries before `since`, the head that an earlier call returned, are not read again; the others are added
    to `newest`. Raises FailedPrecondition (AUDIT_BROKEN, AUDIT_UNSIGNED), RosterError (ROOT_*).
    """
    from sealring.mesh.audit import Beginning, changed_outside, check_signed, read_head, verify_chain
    from sealring.mesh.pki.root import decode_chain, verify_root_chain

    answer = await admin.call("GetRoster")
    root = verify_root_chain(decode_chain(answer.root_metadata), pin, now=time.time())
    last = (since.sequence - 1, b"") if since else None
    beginning = Beginning()
    head, found = None, None
    while True:
        page = await admin.call("ListAuditLog", after=last[0] if last else 0, limit=_AUDIT_PAGE)
        head = head or read_head(page.signed_head, root)
        begins = beginning.read(page.entries)
        last = last or begins
        if since and last[0] < since.sequence:
            if [one.hash for one in page.entries[:1]] != [since.hash]:
                raise changed_outside(f"the audit log is broken at entry {since.sequence}")
            last = (last[0], page.entries[0].previous)
        last = verify_chain(page.entries, after=last)
        found = next((one.hash for one in page.entries if one.sequence == head.sequence), found)
        if newest is not None:
            newest.extend(page.entries)
        if len(page.entries) < _AUDIT_PAGE:
            if since is None:
                beginning.check()
            check_signed(found, head)
            return *last, head


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
