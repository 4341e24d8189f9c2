"""The audit log page by page: what was signed as the first page came counts, whatever is signed meanwhile."""

from __future__ import annotations

from collections import deque
from functools import cache, partial
from typing import Any

import pytest

from sealring.cli.calls import verified
from sealring.cli.calls.verified import AUDIT_PAGE, VerifiedAudit, verify_audit
from sealring.coordinator.services.admin import MAX_AUDIT_ENTRIES
from sealring.mesh import audit
from sealring.mesh.audit import FIRST_PREVIOUS, PRUNED, AuditHead, entry_hash, sign_head
from sealring.mesh.errors import SealringError
from sealring.testing import PaperCluster
from sealring.v1 import admin_pb2


@cache
def paper() -> PaperCluster:
    return PaperCluster()


class Log:
    """A coordinator that has `count` entries, and signs one more before each page."""

    def __init__(self, count: int, signed: int) -> None:
        self.entries: list[admin_pb2.AuditEntry] = []
        self.signed = signed
        self.asked: list[int] = []
        self.prunes = 0
        """How often the oldest three entries are dropped after a page."""
        self.hashes: dict[int, bytes] = {}
        self.append(count)

    def append(self, count: int, action: str = "do", actor: str = "operator", **details: str) -> None:
        for _ in range(count):
            last = self.entries[-1] if self.entries else admin_pb2.AuditEntry(hash=FIRST_PREVIOUS)
            one = admin_pb2.AuditEntry(
                sequence=last.sequence + 1, previous=last.hash, actor=actor, action=action, details=details
            )
            self.hashes[one.sequence] = one.hash = entry_hash(one)
            self.entries.append(one)

    def prune(self, count: int) -> None:
        dropped, self.entries = self.entries[count - 1], self.entries[count:]
        self.append(1, PRUNED, "coordinator", through=str(dropped.sequence), hash=dropped.hash.hex())

    def head(self, number: int) -> AuditHead:
        return AuditHead(paper().root.cluster, number, self.hashes[number], 1)

    async def call(self, method: str, *, after: int = 0, limit: int = 0) -> Any:
        if method == "GetRoster":
            return admin_pb2.GetAdminRosterResponse(root_metadata=paper().root_chain)
        self.asked.append(after)
        head = sign_head(self.head(self.signed), [paper().authority.roster_signers[0]])
        self.signed += len(self.asked) > 1
        page = [one for one in self.entries if one.sequence > after][:limit]
        if limit > 1 and self.prunes:
            self.prunes -= 1
            self.prune(3)
            self.append(3)
        return admin_pb2.ListAuditLogResponse(entries=page, signed_head=head)


async def verify(log: Any, *more: Any, **how: Any) -> VerifiedAudit:
    return await verify_audit(log, bytes.fromhex(paper().pin), *more, **how)


@pytest.mark.parametrize("count", [2 * AUDIT_PAGE, 2 * AUDIT_PAGE - 1])
async def test_a_log_is_read_to_its_end(count: int) -> None:
    log, newest = Log(count, signed=AUDIT_PAGE), deque[Any]()
    found = await verify(log, newest=newest)
    assert (found.first, found.last, found.hash) == (1, count, log.entries[-1].hash)
    assert found.head.sequence == AUDIT_PAGE
    pages = [0, AUDIT_PAGE, 2 * AUDIT_PAGE]
    assert log.asked == pages[: 3 if count == pages[2] else 2], "a page that is not full is the last"
    assert list(newest) == log.entries


async def test_what_was_verified_before_is_not_read_again() -> None:
    log, newest = Log(5, signed=4), deque[Any]()
    assert (await verify(log, log.head(3), newest)).last == 5
    assert (log.asked, [one.sequence for one in newest]) == ([2], [3, 4, 5])
    for number in (3, 4, 5):
        changed = Log(5, signed=4)
        changed.entries[number - 1].hash = b"x" * 32
        with pytest.raises(SealringError, match=f"broken at entry {number}"):
            await verify(changed, changed.head(3))


async def test_entries_that_were_signed_are_there() -> None:
    log = Log(5, signed=5)
    log.entries.pop()
    with pytest.raises(SealringError, match="ends before entry 5"):
        await verify(log)


def test_pages_are_as_long_as_the_coordinator_lets_them_be() -> None:
    assert AUDIT_PAGE == MAX_AUDIT_ENTRIES


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of two entries, and logs of which two stay."""
    monkeypatch.setattr(verified, "AUDIT_PAGE", 2)
    monkeypatch.setattr(audit, "Beginning", partial(audit.Beginning, kept=2))


@pytest.mark.usefixtures("short")
async def test_a_log_whose_oldest_entries_were_dropped_says_so_itself() -> None:
    log = Log(6, signed=5)
    log.prune(2)
    found = await verify(log)
    assert (found.first, found.last) == (3, 7)
    del log.entries[0]
    log.signed = 5
    with pytest.raises(SealringError, match="begins after entry 3"):
        await verify(log)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("prunes", [1, 2, 9])
async def test_a_log_that_is_pruned_between_two_pages_is_read_again(prunes: int) -> None:
    """One that is pruned at every reading is not believed, nor one with a hole that no prune made."""
    log, newest = Log(9, signed=9), deque[Any]()
    log.hashes = dict.fromkeys(range(99), log.hashes[9])
    log.head = lambda _: AuditHead(paper().root.cluster, 9, log.hashes[9], 1)  # type: ignore[method-assign]
    log.prunes = prunes
    if prunes > 2:
        with pytest.raises(SealringError, match="as fast as"):
            await verify(log, newest=newest)
        return
    found = await verify(log, newest=newest)
    numbers = [one.sequence for one in log.entries]
    assert [one.sequence for one in newest] == numbers == list(range(found.first, found.last + 1))
    del log.entries[4]
    with pytest.raises(SealringError, match=f"broken at entry {numbers[4]}"):
        await verify(log)
