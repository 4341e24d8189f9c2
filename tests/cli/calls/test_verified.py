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
    count, last, head = await verified.verify_audit(log, b"pin", newest=newest)
    assert (count, last, head.sequence) == (4, b"4", 3)
    assert log.asked == [(0, 2), (2, 2), (4, 2)]
    assert [one.sequence for one in newest] == [1, 2, 3, 4]
    assert [after[0] for after in checked[:-1]] == [0, 2, 4]
    assert checked[-1] == (b"3", 3)
    log = Log(3, signed=1)
    assert (await verified.verify_audit(log, b"pin"))[0] == 3
    assert log.asked == [(0, 2), (2, 2)], "a page that is not full is the last"


async def test_what_was_verified_before_is_not_read_again(checked: list[Any]) -> None:
    log: Any = Log(5, signed=4)
    since: Any = SimpleNamespace(sequence=3, hash=b"3")
    newest: deque[Any] = deque()
    assert (await verified.verify_audit(log, b"pin", since, newest))[0] == 5
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
    assert (await verified.verify_audit(log, b"pin"))[0] == 6
    log.entries[2].details["hash"] = b"3".hex()
    with pytest.raises(SealringError, match="begins after entry 2"):
        await verified.verify_audit(log, b"pin")


async def page_of(log: Any, method: str, *, after: int = 0, limit: int = 0) -> Any:
    """As a coordinator answers, by the numbers of the entries that are left."""
    if method == "GetRoster":
        return SimpleNamespace(root_metadata="chain")
    left = [one for one in log.entries if one.sequence > after]
    return SimpleNamespace(entries=left[:limit], signed_head=log.signed)
