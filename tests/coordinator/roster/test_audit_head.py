"""The signed head of the audit log: what a hash chain alone does not show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sealring.coordinator.init import init
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.roster.audit_head import AuditSeal
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store
from sealring.mesh.audit import AuditHead, check_signed, entry_hash, read_head, sign_head
from sealring.mesh.crypto import Ed25519Signer
from sealring.mesh.errors import FailedPrecondition

NOW = 1_800_000_000


@dataclass
class Log:
    """A new cluster's audit log with its seal."""

    store: Store
    keys: ClusterKeys
    seal: AuditSeal

    def write(self, count: int, what: str = "do") -> None:
        for _ in range(count):
            self.store.audit.append(NOW, "operator", what, "thing", {})

    def head(self) -> AuditHead:
        return read_head(self.seal.envelope, self.keys.root)

    def check(self) -> None:
        """What `sealring audit verify` does, the chain left out."""
        head = self.head()
        entries = self.store.audit.entries(after=0, limit=100)
        check_signed(next((one.hash for one in entries if one.sequence == head.sequence), None), head)

    def cut(self, last: int) -> None:
        with self.store.transaction() as connection:
            connection.execute("DELETE FROM audit WHERE sequence > ?", (last,))

    def rewrite(self) -> None:
        """Another first entry, and everything after it chained anew."""
        entries = self.store.audit.entries(after=0, limit=100)
        entries[0].actor = "nobody"
        previous = entries[0].previous
        with self.store.transaction() as connection:
            for entry in entries:
                entry.previous = previous
                previous = entry_hash(entry)
                values = (entry.actor, entry.previous, previous, entry.sequence)
                connection.execute("UPDATE audit SET actor=?, previous=?, hash=? WHERE sequence=?", values)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    settings = CoordinatorSettings(state_dir=tmp_path, cluster="demo")
    init(settings, clock=lambda: NOW)
    store = Store.open(tmp_path)
    keys = ClusterKeys.load(settings, now=NOW)
    yield Log(store, keys, AuditSeal(store, keys, clock=lambda: NOW))
    store.close()


def reason(log: Log) -> str:
    with pytest.raises(FailedPrecondition) as caught:
        log.check()
    return caught.value.reason


def test_a_new_clusters_log_is_signed_and_stays_so(log: Log) -> None:
    log.check()
    assert log.head() == AuditHead("demo", *log.store.audit.head(), NOW)
    log.write(3)
    log.check()
    assert log.head().sequence == 1, "what came since is not signed yet"
    log.seal.renew()
    log.check()
    assert log.head().sequence == 4


def test_a_cut_tail_is_found_and_never_signed_over(log: Log) -> None:
    log.write(3)
    log.seal.renew()
    log.cut(2)
    assert reason(log) == "AUDIT_BROKEN"
    log.seal.renew()
    log.write(5, "do something else")
    log.seal.renew()
    assert reason(log) == "AUDIT_BROKEN"


def test_a_chain_made_anew_is_found(log: Log) -> None:
    log.write(3)
    log.seal.renew()
    log.rewrite()
    log.seal.renew()
    assert reason(log) == "AUDIT_BROKEN"


def test_without_its_signed_head_a_log_is_never_signed_again(log: Log) -> None:
    for forged in (b"", b"{}", sign_head(AuditHead("demo", 1, bytes(32), NOW), [Ed25519Signer.generate()])):
        log.store.set_meta("audit_head", forged)
        log.seal.renew()
        assert log.seal.envelope == forged
        assert reason(log) == "AUDIT_UNSIGNED"


def test_a_head_of_another_cluster_counts_for_nothing(log: Log) -> None:
    head = AuditHead("other", *log.store.audit.head(), NOW)
    log.store.set_meta("audit_head", sign_head(head, log.keys.rosters))
    assert reason(log) == "AUDIT_UNSIGNED"
