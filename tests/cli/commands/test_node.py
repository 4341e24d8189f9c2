"""`sealring node`: the cluster's nodes, listed and taken out of service."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.commands import gateway
from sealring.cli.terminal.output import moment
from sealring.gateway.settings import GatewaySettings
from sealring.mesh.system.lock import lock_state

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
        ("gateway evict edge", "EvictNode", "g", "evicted edge; what was left of its join token"),
        ("gateway ban old-edge", "BanNode", "d", "banned old-edge"),
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


@pytest.mark.parametrize("role", ["node", "gateway"])
def test_who_has_joined_is_told_as_what_and_what_comes_next(
    here: Any, host: Any, home: Path, role: str
) -> None:
    peer = SimpleNamespace(id="m1", cluster="attic")
    host.enrolled = SimpleNamespace(state=SimpleNamespace(peer=peer))
    done = here(role, "join", "sr2.x", "--state-dir", str(home))
    assert (done.status, done.out) == (0, "")
    assert done.err.splitlines() == [
        f"enrolled in cluster attic as m1; the state is in {home}",
        f"next: sealring {role} run --state-dir {home}",
    ]
    done = here(role, "join", "-", "--json", "--state-dir", str(home), stdin="sr2.y\n")
    assert done.data == {"member_id": "m1", "cluster": "attic", "state_dir": str(home)}
    given = [(component, settings.state_dir, token) for component, settings, token in host.joined]
    assert given == [(role, home, "sr2.x"), (role, home, "sr2.y")]


@pytest.mark.parametrize("role", ["node", "gateway"])
def test_who_leaves_is_enrolled_no_more_and_told_what_the_operator_has_to_do(
    here: Any, home: Path, role: str
) -> None:
    folder = home / "state"
    folder.mkdir()
    missing = here(role, "leave", "--state-dir", str(folder))
    assert (missing.status, "[NOT_ENROLLED]" in missing.err) == (7, True)
    (folder / "member.json").write_text("{}")
    with lock_state(folder):
        held = here(role, "leave", "--state-dir", str(folder))
    assert "[STATE_IN_USE]" in held.err
    assert (folder / "member.json").exists()
    done = here(role, "leave", "--state-dir", str(folder))
    assert done.err.splitlines() == [
        f"the enrolment in {folder} is gone; a new token enrols it again, in this cluster or another",
        f"to take it out of the old cluster's roster, its operator runs: sealring {role} evict NAME",
    ]
    assert not (folder / "member.json").exists()


def test_the_nonce_is_that_of_the_identity(here: Any, home: Path) -> None:
    printed = here("node", "nonce", "--state-dir", str(home)).out.strip()
    assert len(bytes.fromhex(printed)) == 32
    assert here("node", "nonce", "--state-dir", str(home), "--json").data == {"nonce": printed}


@pytest.mark.parametrize(
    "command",
    [
        *("node evict edge", "node evict mac-3", "node ban old-edge"),
        *("gateway evict mac-1", "gateway evict old-edge", "gateway ban mac-3"),
    ],
)
def test_nobody_of_another_role_and_nobody_who_is_gone_already(here: Any, members: Any, command: str) -> None:
    done = here(*command.split())
    assert done.status == 3
    assert "UNKNOWN_NODE" in done.err
    assert len(members.asked) == 1


def test_gateways_are_listed_with_whether_they_are_connected(here: Any, members: Any) -> None:
    shown = here("gateway", "list").out.splitlines()
    rows = {line.split()[0]: line.split() for line in shown[1:3]}
    assert rows["edge"][1:3] == ["g" * 16, "connected"]
    assert rows["spare"][1:3] == ["h" * 16, "offline"]
    assert shown[3:] == ["spare: it cannot verify the roster", f"banned old-edge {'d' * 52} at {moment(AT)}"]


def test_a_gateway_runs_with_all_of_its_settings() -> None:
    assert set(GatewaySettings.model_fields) - set(gateway.RUN) == {"name"}, "which only joining needs"
