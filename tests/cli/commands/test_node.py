"""`sealring node`: the cluster's nodes, listed and taken out of service."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.cli.terminal.output import moment

AT = 1_800_000_000


def test_nodes_are_listed_with_what_they_serve_and_those_that_are_gone(here: Any, members: Any) -> None:
    shown = here("node", "list").out.splitlines()
    row = next(line for line in shown if line.startswith("mac-1"))
    for cell in ("a" * 16, "online", "software", "1.0 GiB of 8.0 GiB", "demo-0", "0-7"):
        assert cell in row
    assert "a" * 17 not in row
    assert "mac-2: its clock is wrong" in shown
    assert shown[-1] == f"evicted mac-3 {'c' * 52} at {moment(AT)}", "and no gateway"
    assert [one["name"] for one in here("node", "list", "--json").data] == ["mac-1", "mac-2"]


@pytest.mark.parametrize(
    ("command", "method", "whom", "said"),
    [
        ("node drain mac-1", "DrainNode", "a", "draining mac-1\n"),
        ("node drain --undo mac-1", "DrainNode", "a", "no longer draining mac-1\n"),
        ("node evict mac-1", "EvictNode", "a", "evicted mac-1; what was left of its join token is revoked"),
        ("node ban mac-2", "BanNode", "b", "banned mac-2; what was left of its join token is revoked"),
        ("node ban mac-3", "BanNode", "c", "banned mac-3"),
    ],
)
def test_a_member_is_changed_by_the_id_of_who_is_called_so(
    here: Any, members: Any, command: str, method: str, whom: str, said: str
) -> None:
    done = here(*command.split())
    assert done.status == 0
    assert done.err.startswith(said)
    _, (called, asked) = members.asked
    assert (called, asked.id) == (method, whom * 52)
    if method == "DrainNode":
        assert asked.undo == ("--undo" in command)


@pytest.mark.parametrize("command", ["node evict edge", "node evict mac-3", "node ban old-edge"])
def test_nobody_of_another_role_and_nobody_who_is_gone_already(here: Any, members: Any, command: str) -> None:
    done = here(*command.split())
    assert done.status == 3
    assert "UNKNOWN_NODE" in done.err
    assert len(members.asked) == 1
