"""`sealring gateway`: the cluster's gateways, listed and taken out of service."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.cli.commands import gateway
from sealring.cli.terminal.output import moment
from sealring.gateway.settings import GatewaySettings

AT = 1_800_000_000


def test_gateways_are_listed_with_whether_they_are_connected(here: Any, members: Any) -> None:
    shown = here("gateway", "list").out.splitlines()
    rows = {line.split()[0]: line.split() for line in shown[1:3]}
    assert rows["edge"][1:3] == ["g" * 16, "connected"]
    assert rows["spare"][1:3] == ["h" * 16, "offline"]
    assert moment(AT) in shown[1]
    assert shown[3:] == ["spare: it cannot verify the roster", f"banned old-edge {'d' * 52} at {moment(AT)}"]
    assert [one["name"] for one in here("gateway", "list", "--json").data] == ["edge", "spare"]


@pytest.mark.parametrize(
    ("command", "method", "whom", "said"),
    [
        ("gateway evict edge", "EvictNode", "g", "evicted edge"),
        ("gateway ban old-edge", "BanNode", "d", "banned old-edge"),
        ("gateway ban edge", "BanNode", "g", "banned edge"),
    ],
)
def test_a_gateway_is_changed_by_the_id_of_who_is_called_so(
    here: Any, members: Any, command: str, method: str, whom: str, said: str
) -> None:
    done = here(*command.split())
    assert (done.status, done.err.startswith(f"{said}; what was left of its join token")) == (0, True)
    _, (called, asked) = members.asked
    assert (called, asked.id) == (method, whom * 52)


@pytest.mark.parametrize("command", ["gateway evict mac-1", "gateway evict old-edge", "gateway ban mac-3"])
def test_nobody_of_another_role_and_nobody_who_is_gone_already(here: Any, members: Any, command: str) -> None:
    done = here(*command.split())
    assert (done.status, "[UNKNOWN_NODE]" in done.err) == (3, True)
    assert len(members.asked) == 1


def test_a_gateway_runs_with_all_of_its_settings() -> None:
    assert set(GatewaySettings.model_fields) - set(gateway.RUN) == {"name"}, "which only joining needs"
