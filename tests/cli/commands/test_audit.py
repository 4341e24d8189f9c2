"""`sealring audit list`: who did what."""

from __future__ import annotations

from typing import Any

import pytest

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
