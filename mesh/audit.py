"""The coordinator's audit log is a hash chain, which an operator checks on a machine of their own.

Whoever writes to the database can make the whole chain anew. Against that an operator notes the newest hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from sealring.mesh.crypto.encoding import canonical_json
from sealring.mesh.errors import FailedPrecondition
from sealring.v1 import admin_pb2

FIRST_PREVIOUS = bytes(32)

PRUNED = "prune_audit"
"""The action of the entry that says which entries were dropped: `through` is the last one's number and `hash`
its hash, from which the chain goes on."""

KEPT = 50_000
"""Entries that stay: years of an operator's work. An entry takes 120 bytes of a standby's copy (measured), so
all of them take less than half of what a copy may have (`coordinator/standby/copies.py`). Where fewer stay
somebody else has dropped the others, so a later release that keeps fewer has to say so here."""

_DIGITS = 20


def entry_hash(entry: admin_pb2.AuditEntry) -> bytes:
    """SHA-256 over the previous hash and the canonical JSON of everything else."""
    content = canonical_json(
        {
            "sequence": entry.sequence,
            "at": entry.at,
            "actor": entry.actor,
            "action": entry.action,
            "subject": entry.subject,
            "details": dict(entry.details),
        }
    )
    return hashlib.sha256(b"sealring/v1 audit\x00" + entry.previous + content).digest()


def changed_outside(what: str, **metadata: object) -> FailedPrecondition:
    """The error for a log that differs from the one that the coordinator wrote."""
    return FailedPrecondition(
        what,
        hint="it was changed outside of the coordinator: look at a backup",
        reason="AUDIT_BROKEN",
        **metadata,
    )


class Beginning:
    """Checks the beginning of a log whose oldest entries may have been dropped; it reads all others.

    An entry that records a drop counts only if it stands `kept` entries behind the dropped ones, which an
    attacker would have to write as well.
    """

    def __init__(self, *, kept: int = KEPT) -> None:
        self._kept = kept
        self._begins: tuple[int, bytes] | None = None
        self._dropped: set[tuple[str, str]] = set()

    def read(self, entries: Sequence[admin_pb2.AuditEntry]) -> tuple[int, bytes]:
        """Reads the next entries; returns `after` for `verify_chain`: the (sequence, hash) before the log's
        first."""
        if self._begins is None:
            first = entries[0] if entries else None
            self._begins = (first.sequence - 1, first.previous) if first else (0, FIRST_PREVIOUS)
        self._dropped |= {
            (one.details["through"], one.details["hash"])
            for one in entries
            if one.action == PRUNED and one.actor == "coordinator" and self._keeps(one)
        }
        return self._begins

    def _keeps(self, entry: admin_pb2.AuditEntry) -> bool:
        through = entry.details["through"]
        return through.isdecimal() and len(through) < _DIGITS and entry.sequence - int(through) > self._kept

    def check(self) -> None:
        """Requires, after the last entry, that the log begins with entry 1 or records what was dropped.

        Raises FailedPrecondition (AUDIT_BROKEN).
        """
        sequence, previous = self._begins or (0, FIRST_PREVIOUS)
        whole = (sequence, previous) == (0, FIRST_PREVIOUS)
        if not whole and (str(sequence), previous.hex()) not in self._dropped:
            raise changed_outside(
                f"the audit log begins after entry {sequence}, and no entry says that others were dropped",
                sequence=sequence,
            )


def verify_chain(
    entries: Iterable[admin_pb2.AuditEntry], *, after: tuple[int, bytes] = (0, FIRST_PREVIOUS)
) -> tuple[int, bytes]:
    """Check that entries follow `after` (sequence, hash) and each other; returns the last of them likewise.

    Raises FailedPrecondition (AUDIT_BROKEN) naming the first entry that does not.
    """
    sequence, previous = after
    for entry in entries:
        sequence += 1
        if (entry.sequence, entry.previous, entry.hash) != (sequence, previous, entry_hash(entry)):
            raise changed_outside(f"the audit log is broken at entry {sequence}", sequence=sequence)
        previous = entry.hash
    return sequence, previous
