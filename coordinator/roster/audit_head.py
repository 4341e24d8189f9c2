"""The head of the audit log under the roster keys' signature, so that the log cannot be changed unseen.

A hash chain alone proves little: whoever writes to the database can cut its tail or make all of it anew. So
the coordinator signs the newest entry's number and hash with every roster and when it stops. It does so only
while the entry that it signed last still stands: from a changed log on, the old signature remains and tells.
"""

from __future__ import annotations

import structlog

from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.store import AUDIT_HEAD, Store
from sealring.mesh.audit import AuditHead, read_head, sign_head
from sealring.mesh.clock import Clock
from sealring.mesh.errors import FailedPrecondition
from sealring.mesh.pki.root import follow_root

log = structlog.get_logger()


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
