"""The audit log is read and verified page by page."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import pytest

from sealring.cli.calls import verified
from sealring.cli.calls.verified import AUDIT_PAGE, verify_audit
from sealring.coordinator.admin.audit import MAX_AUDIT_ENTRIES
from sealring.mesh import audit
from sealring.mesh.audit import FIRST_PREVIOUS, PRUNED, entry_hash
from sealring.mesh.errors import SealringError
from sealring.v1 import admin_pb2


class Log:
    """A coordinator that has `count` entries."""

    def __init__(self, count: int) -> None:
        self.entries: list[admin_pb2.AuditEntry] = []
        self.asked: list[int] = []
        self.prunes = 0
        """How often the oldest three entries are dropped after a page."""
        self.append(count)

    def append(self, count: int, action: str = "do", actor: str = "operator", **details: str) -> None:
        for _ in range(count):
            last = self.entries[-1] if self.entries else admin_pb2.AuditEntry(hash=FIRST_PREVIOUS)
            one = admin_pb2.AuditEntry(
                sequence=last.sequence + 1, previous=last.hash, actor=actor, action=action, details=details
            )
            one.hash = entry_hash(one)
            self.entries.append(one)

    def prune(self, count: int) -> None:
        dropped, self.entries = self.entries[count - 1], self.entries[count:]
        self.append(1, PRUNED, "coordinator", through=str(dropped.sequence), hash=dropped.hash.hex())

    async def call(self, method: str, *, after: int = 0, limit: int = 0) -> Any:
        self.asked.append(after)
        page = [one for one in self.entries if one.sequence > after][:limit]
        if limit > 1 and self.prunes:
            self.prunes -= 1
            self.prune(3)
            self.append(3)
        return admin_pb2.ListAuditLogResponse(entries=page)


@pytest.mark.parametrize("count", [2 * AUDIT_PAGE, 2 * AUDIT_PAGE - 1])
async def test_a_log_is_read_to_its_end(count: int) -> None:
    log, newest = Log(count), deque[Any]()
    found = await verify_audit(log, newest=newest)
    assert (found.first, found.last, found.hash) == (1, count, log.entries[-1].hash)
    pages = [0, AUDIT_PAGE, 2 * AUDIT_PAGE]
    assert log.asked == pages[: 3 if count == pages[2] else 2], "a page that is not full is the last"
    assert list(newest) == log.entries


async def test_what_was_verified_before_is_not_read_again() -> None:
    log, newest = Log(3), deque[Any]()
    seen = await verify_audit(log)
    log.asked.clear()
    log.append(2)
    found = await verify_audit(log, seen, newest)
    assert (found.first, found.last) == (1, 5)
    assert (log.asked, [one.sequence for one in newest]) == ([2], [3, 4, 5])
    for number in (3, 4, 5):
        changed = Log(5)
        changed.entries[number - 1].hash = b"x" * 32
        with pytest.raises(SealringError, match=f"broken at entry {number}"):
            await verify_audit(changed, seen)


async def test_entries_that_were_seen_are_there() -> None:
    log = Log(5)
    seen = await verify_audit(log)
    log.entries.pop()
    with pytest.raises(SealringError, match="broken at entry 5"):
        await verify_audit(log, seen)


async def test_an_entry_that_was_changed_is_found() -> None:
    for number in (1, 3, 5):
        log = Log(5)
        log.entries[number - 1].actor = "nobody"
        with pytest.raises(SealringError, match=f"broken at entry {number}"):
            await verify_audit(log)


def test_pages_are_as_long_as_the_coordinator_lets_them_be() -> None:
    assert AUDIT_PAGE == MAX_AUDIT_ENTRIES


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of two entries, and logs of which two stay."""
    monkeypatch.setattr(verified, "AUDIT_PAGE", 2)
    monkeypatch.setattr(audit, "Beginning", partial(audit.Beginning, kept=2))


@pytest.mark.usefixtures("short")
async def test_a_log_whose_oldest_entries_were_dropped_says_so_itself() -> None:
    log = Log(6)
    log.prune(2)
    found = await verify_audit(log)
    assert (found.first, found.last) == (3, 7)
    del log.entries[0]
    with pytest.raises(SealringError, match="begins after entry 3"):
        await verify_audit(log)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("prunes", [1, 2, 9])
async def test_a_log_that_is_pruned_between_two_pages_is_read_again(prunes: int) -> None:
    """One that is pruned at every reading is not believed, nor one with a hole that no prune made."""
    log, newest = Log(9), deque[Any]()
    log.prunes = prunes
    if prunes > 2:
        with pytest.raises(SealringError, match="as fast as"):
            await verify_audit(log, newest=newest)
        return
    found = await verify_audit(log, newest=newest)
    numbers = [one.sequence for one in log.entries]
    assert [one.sequence for one in newest] == numbers == list(range(found.first, found.last + 1))
    del log.entries[4]
    with pytest.raises(SealringError, match=f"broken at entry {numbers[4]}"):
        await verify_audit(log)
