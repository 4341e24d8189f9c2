"""What the process that joins for a service may say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.setup import enrol
from sealring.cli.setup.choices import Wishes
from sealring.mesh.errors import ConfigError, Internal


def test_no_more_is_read_of_it_than_anybody_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as another account, which its owner need not trust."""
    talks = tmp_path / "talks"
    talks.write_text("#!/bin/sh\nexec yes\n")
    talks.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(talks))
    with pytest.raises(Internal):
        enrol.enrol_as(None, tmp_path, {}, Wishes(), "a token")


@pytest.mark.parametrize(
    ("wanted", "given", "renamed"), [("two", "two", False), ("two", "two-2", True), (None, "mac", False)]
)
def test_who_is_called_otherwise_than_it_asked_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str | None, given: str, renamed: bool
) -> None:
    settings = {"state_dir": str(tmp_path / "node")} | ({"name": wanted} if wanted else {})
    peer = SimpleNamespace(id="m", cluster="attic")
    roster = SimpleNamespace(member=lambda member: {"m": SimpleNamespace(level="software")}[member])
    asked: list[Any] = []

    async def join(settings: Any, token: str) -> Any:
        asked.append((settings.name, token))
        return SimpleNamespace(state=SimpleNamespace(peer=peer, name=given), roster=roster)

    def choose(root: Path, said: Any, wishes: Any, coordinators: Any) -> Any:
        asked.append(coordinators)
        return SimpleNamespace(settings={"node": settings}, said=["chosen"])

    monkeypatch.setattr("sealring.node.settings.default_name", lambda: "mac")
    monkeypatch.setattr("sealring.node.join.join", join)
    monkeypatch.setattr(enrol, "choose_other", choose)
    parsed = SimpleNamespace(addresses=["h:1"])
    monkeypatch.setattr("sealring.mesh.member.bootstrap.JoinToken.parse", lambda token: parsed)
    told = enrol.enrol(tmp_path, {}, Wishes(), "sr1.x")
    assert asked[0] == ["h:1"]
    assert asked[1][1] == "sr1.x"
    line = "name: two-2, because another machine is called two (or --name)"
    assert told == {
        "settings": settings,
        "said": ["chosen", *([line] if renamed else [])],
        "member_id": "m",
        "cluster": "attic",
        "name": given,
        "level": "software",
    }


def test_an_account_that_cannot_run_python_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(ConfigError) as raised:
        enrol.enrol_as(None, tmp_path, {}, Wishes(), "a token")
    assert raised.value.reason == "NO_PROGRAM"
    assert raised.value.message.startswith("the account of this process cannot run ")
