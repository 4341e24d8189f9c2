"""The audit log page by page: what was signed as the first was told counts, whatever is signed meanwhile."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.calls import verified
from sealring.coordinator.services.admin import MAX_AUDIT_ENTRIES
from sealring.mesh import audit
from sealring.mesh.audit import verify_chain
from sealring.mesh.errors import SealringError
from sealring.mesh.pki import root
from sealring.v1 import admin_pb2


def _previous(number: int) -> bytes:
    return b"%d" % (number - 1) if number > 1 else bytes(32)


class Log:
    """A coordinator that has this many entries, and signs one more before each page."""

    def __init__(self, entries: int, signed: int) -> None:
        self.entries = [
            admin_pb2.AuditEntry(sequence=number, hash=b"%d" % number, previous=_previous(number))
            for number in range(1, entries + 1)
        ]
        self.signed = signed
        self.asked: list[tuple[int, int]] = []

    async def call(self, method: str, *, after: int = 0, limit: int = 0) -> Any:
        if method == "GetRoster":
            return SimpleNamespace(root_metadata="chain")
        self.asked.append((after, limit))
        self.signed += 1
        return SimpleNamespace(entries=self.entries[after : after + limit], signed_head=self.signed - 1)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is checked: each page after what, then the signed entry."""
    did: list[Any] = []

    def verify_chain(entries: Any, *, after: Any) -> Any:
        did.append(after)
        return (entries[-1].sequence, entries[-1].hash) if entries else after

    monkeypatch.setattr(verified, "_AUDIT_PAGE", 2)
    monkeypatch.setattr(root, "decode_chain", lambda chain: chain)
    monkeypatch.setattr(root, "verify_root_chain", lambda chain, pin, *, now: (chain, pin))
    monkeypatch.setattr(audit, "Beginning", partial(audit.Beginning, kept=2))
    monkeypatch.setattr(audit, "verify_chain", verify_chain)
    monkeypatch.setattr(audit, "read_head", lambda signed, root: SimpleNamespace(sequence=signed))
    monkeypatch.setattr(audit, "check_signed", lambda found, head: did.append((found, head.sequence)))
    return did


async def test_a_log_is_read_to_its_end(checked: list[Any]) -> None:
    log: Any = Log(4, signed=3)
    newest: deque[Any] = deque()
    found = await verified.verify_audit(log, b"pin", newest=newest)
    assert (found.first, found.last, found.hash, found.head.sequence) == (1, 4, b"4", 3)
    assert log.asked == [(0, 2), (2, 2), (4, 2)]
    assert [one.sequence for one in newest] == [1, 2, 3, 4]
    assert [after[0] for after in checked[:-1]] == [0, 2, 4]
    assert checked[-1] == (b"3", 3)
    log = Log(3, signed=1)
    assert (await verified.verify_audit(log, b"pin")).last == 3
    assert log.asked == [(0, 2), (2, 2)], "a page that is not full is the last"


async def test_what_was_verified_before_is_not_read_again(checked: list[Any]) -> None:
    log: Any = Log(5, signed=4)
    since: Any = SimpleNamespace(sequence=3, hash=b"3")
    newest: deque[Any] = deque()
    assert (await verified.verify_audit(log, b"pin", since, newest)).last == 5
    assert log.asked == [(2, 2), (4, 2)]
    assert checked == [(2, b"2"), (4, b"4"), (b"4", 4)]
    assert [one.sequence for one in newest] == [3, 4, 5]
    log.entries[2].hash = b"another"
    with pytest.raises(SealringError, match="broken at entry 3"):
        await verified.verify_audit(log, b"pin", since)


def test_pages_are_as_long_as_the_coordinator_lets_them_be() -> None:
    """One that is shorter than was asked for is taken for the last."""
    assert verified._AUDIT_PAGE == MAX_AUDIT_ENTRIES


async def test_a_log_whose_oldest_entries_were_dropped_says_so_itself(checked: list[Any]) -> None:
    log: Any = Log(6, signed=5)
    log.entries = log.entries[2:]
    log.entries[2].action, log.entries[2].actor = "prune_audit", "coordinator"
    log.entries[2].details.update(through="2", hash=b"2".hex())
    log.call = partial(page_of, log)
    found = await verified.verify_audit(log, b"pin")
    assert (found.first, found.last) == (3, 6)
    log.entries[2].details["hash"] = b"3".hex()
    with pytest.raises(SealringError, match="begins after entry 2"):
        await verified.verify_audit(log, b"pin")


@pytest.mark.parametrize("prunes", [1, 2, 9])
async def test_a_log_that_is_pruned_between_two_pages_is_read_again(
    checked: list[Any], monkeypatch: pytest.MonkeyPatch, prunes: int
) -> None:
    """One that is pruned at every reading is not believed, nor one with a hole that no prune made."""
    monkeypatch.setattr(audit, "verify_chain", verify_chain)
    log: Any = Log(0, signed=9)
    chain(log, 9)

    async def call(method: str, **asked: int) -> Any:
        nonlocal prunes
        page = await page_of(log, method, **asked)
        if method == "ListAuditLog" and asked["limit"] > 1 and prunes:
            prunes -= 1
            dropped, log.entries = log.entries[2], log.entries[3:]
            what = {"through": str(dropped.sequence), "hash": dropped.hash.hex()}
            chain(log, 1, audit.PRUNED, "coordinator", **what)
            chain(log, 3)
        return page

    log.call = call
    newest: deque[Any] = deque()
    if prunes > 2:
        with pytest.raises(SealringError, match="as fast as"):
            await verified.verify_audit(log, b"pin", newest=newest)
        return
    found = await verified.verify_audit(log, b"pin", newest=newest)
    numbers = [one.sequence for one in log.entries]
    assert [one.sequence for one in newest] == numbers == list(range(found.first, found.last + 1))
    del log.entries[4]
    with pytest.raises(SealringError, match=f"broken at entry {numbers[4]}"):
        await verified.verify_audit(log, b"pin")


def chain(log: Any, count: int, action: str = "do", actor: str = "operator", **details: str) -> None:
    """Appends entries that follow from each other."""
    for _ in range(count):
        last = log.entries[-1] if log.entries else admin_pb2.AuditEntry(hash=audit.FIRST_PREVIOUS)
        one = admin_pb2.AuditEntry(sequence=last.sequence + 1, previous=last.hash, actor=actor, action=action)
        one.details.update(details)
        one.hash = audit.entry_hash(one)
        log.entries.append(one)


async def page_of(log: Any, method: str, *, after: int = 0, limit: int = 0) -> Any:
    """As a coordinator answers, by the numbers of the entries that are left."""
    if method == "GetRoster":
        return SimpleNamespace(root_metadata="chain")
    left = [one for one in log.entries if one.sequence > after]
    return SimpleNamespace(entries=left[:limit], signed_head=log.signed)
