"""The head of the audit log under the roster keys' signature, so that the log cannot be changed unseen.

A hash chain alone proves little: whoever writes to the database can cut its tail or make all of it anew. So
the coordinator signs the newest entry's number and hash with every roster and when it stops. It does so only
while the entry that it signed last still stands: from a changed log on, the old signature remains and tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.store import AUDIT_HEAD, Store
from sealring.coordinator.store.audit import changed_outside
from sealring.mesh.clock import Clock
from sealring.mesh.crypto.dsse import Ed25519Signer, check_threshold, parse_envelope, sign_envelope
from sealring.mesh.crypto.encoding import (
    Fields,
    FormatError,
    canonical_json,
    encode_base64,
    parse_json_object,
)
from sealring.mesh.errors import FailedPrecondition, RosterError
from sealring.mesh.pki.root import RootMetadata, follow_root

PAYLOAD_TYPE = "application/vnd.sealring.audit-head+json"
_MAX_PAYLOAD_BYTES = 1024
_HASH_BYTES = 32
log = structlog.get_logger()


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
    """Check the hash of the entry that has the signed one's number, None where the log ends before it.

    Raises FailedPrecondition (AUDIT_BROKEN).
    """
    if found is None:
        raise changed_outside(f"the audit log ends before entry {head.sequence}, which was signed")
    if found != head.hash:
        raise changed_outside(f"entry {head.sequence} of the audit log is not the one that was signed")


class AuditSeal:
    """Signs the head of one coordinator's log."""

    def __init__(self, store: Store, keys: ClusterKeys, *, clock: Clock) -> None:
        self._store = store
        self._keys = keys
        self._clock = clock

    @property
    def envelope(self) -> bytes:
        """The newest signed head; empty before the first."""
        return self._store.get_meta(AUDIT_HEAD) or b""

    def begin(self) -> None:
        """Sign the first head of a new cluster's log."""
        self._sign()

    def renew(self) -> None:
        """Sign the head as it is now, unless what was signed before is not in the log any more."""
        last = self._last()
        if last is None or not self._store.audit.holds(last.sequence, last.hash):
            log.error("audit_log_changed", hint="it was changed outside: sealring audit verify")
            return
        self._sign()

    def _sign(self) -> None:
        sequence, digest = self._store.audit.head()
        head = AuditHead(self._keys.root.cluster, sequence, digest, int(self._clock()))
        self._store.set_meta(AUDIT_HEAD, sign_head(head, self._keys.rosters))

    def _last(self) -> AuditHead | None:
        """What was signed last, by the keys of today or those before their rotation."""
        root = None
        found = None
        for link in self._keys.root.chain:
            root = follow_root(link, root)
            try:
                found = read_head(self.envelope, root)
            except FailedPrecondition:
                continue
        return found


def _unsigned() -> FailedPrecondition:
    return changed_outside("the roster keys did not sign the head of the audit log", "AUDIT_UNSIGNED")
