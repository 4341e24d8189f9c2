"""Checks of the coordinator's audit log, which an operator makes without trusting the coordinator.

The log is a hash chain. The roster keys sign the number and the hash of its newest entry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sealring.mesh.crypto.dsse import Ed25519Signer, check_threshold, parse_envelope, sign_envelope
from sealring.mesh.crypto.encoding import (
    Fields,
    FormatError,
    canonical_json,
    encode_base64,
    parse_json_object,
)
from sealring.mesh.errors import FailedPrecondition, RosterError
from sealring.mesh.pki.root import RootMetadata
from sealring.v1 import admin_pb2

FIRST_PREVIOUS = bytes(32)

PRUNED = "prune_audit"
"""The action of the entry that says which entries were dropped: `through` is the last one's number and `hash`
its hash, from which the chain goes on."""

KEPT = 50_000
"""Entries that stay: years of an operator's work. An entry takes 107 bytes of a standby's copy (measured), so
all of them take less than half of what a copy may have (`coordinator/standby/copies.py`). Where fewer stay
somebody else has dropped the others, so a later release that keeps fewer has to say so here."""

PAYLOAD_TYPE = "application/vnd.sealring.audit-head+json"
_MAX_PAYLOAD_BYTES = 1024
_HASH_BYTES = 32
_DIGITS = 20


@dataclass(frozen=True)
class AuditHead:
    """The newest entry when it was signed, `at` in seconds since 1970."""

    cluster: str
    sequence: int
    hash: bytes
    at: int


def sign_head(head: AuditHead, signers: Sequence[Ed25519Signer]) -> bytes:
    """The head in an envelope, signed by every signer."""
    payload = {
        "cluster": head.cluster,
        "sequence": head.sequence,
        "hash": encode_base64(head.hash),
        "at": head.at,
    }
    return sign_envelope(PAYLOAD_TYPE, canonical_json(payload), signers)


def read_head(envelope: bytes, root: RootMetadata) -> AuditHead:
    """The head that the roster keys of `root` signed. Raises FailedPrecondition (AUDIT_UNSIGNED)."""
    try:
        opened = parse_envelope(envelope, payload_type=PAYLOAD_TYPE, max_payload=_MAX_PAYLOAD_BYTES)
        check_threshold(opened, root.roster_keys, root.roster_threshold)
        fields = Fields(
            parse_json_object(opened.payload, max_bytes=_MAX_PAYLOAD_BYTES),
            ("cluster", "sequence", "hash", "at"),
        )
        head = AuditHead(
            fields.text("cluster"),
            fields.integer("sequence", low=1),
            fields.binary("hash", sizes=(_HASH_BYTES,)),
            fields.integer("at"),
        )
    except (RosterError, FormatError):
        raise _unsigned() from None
    if head.cluster != root.cluster:
        raise _unsigned()
    return head


def check_signed(found: bytes | None, head: AuditHead) -> None:
    """Check the hash of the entry with the signed number; None if the log ends before it.

    Raises FailedPrecondition (AUDIT_BROKEN).
    """
    if found is None:
        raise changed_outside(f"the audit log ends before entry {head.sequence}, which was signed")
    if found != head.hash:
        raise changed_outside(f"entry {head.sequence} of the audit log is not the one that was signed")


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


def changed_outside(what: str, reason: str = "AUDIT_BROKEN", **metadata: object) -> FailedPrecondition:
    """The error for a log that differs from the one that the coordinator wrote."""
    return FailedPrecondition(
        what,
        hint="it was changed outside of the coordinator: look at a backup",
        reason=reason,
        **metadata,
    )


class Beginning:
    """Checks the beginning of a log whose oldest entries may have been dropped; it reads all others.

    An entry that records a drop counts only if it stands `kept` entries behind the dropped ones. An attacker
    who can write to the database could add such an entry, and the coordinator would sign it with the next
    roster.
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


def _unsigned() -> FailedPrecondition:
    return changed_outside("the roster keys did not sign the head of the audit log", "AUDIT_UNSIGNED")
