"""`sealring audit list`: who did what."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.calls.verified import VerifiedAudit
from sealring.cli.commands import audit
from sealring.cli.terminal.output import moment
from sealring.v1 import admin_pb2

AT = 1_800_000_000


def test_an_entry_says_when_who_what_and_to_whom(here: Any, coordinator: Any) -> None:
    entry = admin_pb2.AuditEntry(
        sequence=7,
        at=AT,
        actor="alice",
        action="evict",
        subject="mac-1",
        details={"role": "node", "by": "id"},
    )
    coordinator.answers["ListAuditLog"] = admin_pb2.ListAuditLogResponse(entries=[entry])
    heading, row = here("audit", "list").out.splitlines()
    assert heading.split() == ["number", "at", "actor", "action", "subject", "details"]
    assert row.split() == ["7", *moment(AT).split(), "alice", "evict", "mac-1", "by=id", "role=node"]
    assert here("audit", "list", "--json").data[0]["details"] == {"role": "node", "by": "id"}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((), (0, 100, True)),
        (("--after", "0"), (0, 100, False)),
        (("--after", "5", "--limit", "1"), (5, 1, False)),
        (("--limit", "1000"), (0, 1000, True)),
    ],
)
def test_the_newest_are_shown_or_those_after_a_number(
    here: Any, coordinator: Any, options: tuple[str, ...], wanted: tuple[int, int, bool]
) -> None:
    assert here("audit", "list", *options).status == 0
    ((_, asked),) = coordinator.asked
    assert (asked.after, asked.limit, asked.newest) == wanted


@pytest.mark.parametrize(("last", "more"), [(7, []), (9, ["2 entries after that are not signed yet"])])
def test_a_log_that_holds_says_how_far_it_is_signed(
    here: Any, monkeypatch: pytest.MonkeyPatch, last: int, more: list[str]
) -> None:
    head = SimpleNamespace(sequence=7, at=AT)
    asked: list[Any] = []

    async def verify(admin: Any, pin: bytes) -> Any:
        asked.append((admin, pin))
        return VerifiedAudit(3, last, b"\xab", head)

    monkeypatch.setattr(audit, "read_bundle", lambda _: SimpleNamespace(root_sha256=b"pin"))
    monkeypatch.setattr(audit, "run_admin", lambda context, work: asyncio.run(work("admin")))
    monkeypatch.setattr(audit, "verify_audit", verify)
    assert here("audit", "verify").out.splitlines() == [
        f"{last - 2} entries, 3 to {last}, one chain, head ab",
        f"the roster keys signed it up to entry 7, {moment(AT)}",
        *more,
    ]
    told = {"entries": last - 2, "first": 3, "last": last, "head": "ab", "signed": 7, "signed_at": AT}
    assert here("audit", "verify", "--json").data == told
    assert asked == [("admin", b"pin")] * 2


@pytest.mark.parametrize("options", [("--after", "-1"), ("--limit", "0"), ("--limit", "1001")])
def test_what_the_coordinator_would_refuse_is_not_asked(
    here: Any, coordinator: Any, options: tuple[str, ...]
) -> None:
    assert here("audit", "list", *options).status == 2
    assert not coordinator.asked
