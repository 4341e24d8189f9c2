"""`sealring join`: where the token comes from, and what another start does without one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from sealring.cli.commands import join
from sealring.cli.local.machines import NOTHING
from sealring.cli.setup import enrol
from sealring.mesh.errors import InvalidInput

JOINED = {
    "said": ["address 10.0.0.2"],
    "member_id": "m",
    "cluster": "attic",
    "name": "mac-2",
    "level": "software",
    "settings": {"name": "mac-2"},
}


class Begun(Exception):
    """The process would have become another one."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Tokens that were enrolled with; then the command that this process would have become."""
    found: list[Any] = []

    def stand_in(root: Path, said: Any, wishes: Any, token: str) -> Any:
        found.append(token)
        return JOINED

    def become(path: str, command: list[str]) -> None:
        found.append(command)
        raise Begun

    monkeypatch.setattr(enrol, "enrol", stand_in)
    monkeypatch.setattr(os, "execv", become)
    return found


def test_who_joined_runs_without_the_token_that_others_could_see(
    here: Any, asked: list[Any], home: Path
) -> None:
    done = here("join", "sr1.secret", "--json")
    assert asked == ["sr1.secret", [sys.executable, "-P", "-m", "sealring.cli", "join", "--begun"]]
    assert done.data == {"member_id": "m", "cluster": "attic", "name": "mac-2", "level": "software"}
    assert "address 10.0.0.2\njoined cluster attic as mac-2, trust level software\n" in done.err
    kept = list(home.rglob("node.toml"))
    assert ["mac-2" in file.read_text() for file in kept] == [True], "for the next start"


def test_a_settings_file_goes_with_it(here: Any, asked: list[Any], home: Path) -> None:
    (home / "my.toml").write_text("")
    here("--config", "my.toml", "join", "-", stdin="sealring join sr1.typed\n")
    assert asked[0] == "sr1.typed"
    assert asked[1][4:] == ["--config", "my.toml", "join", "--begun"]


@pytest.mark.parametrize("terminal", [True, False])
def test_without_a_token_it_is_asked_for_where_somebody_can_answer(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    hidden: list[bool] = []

    def prompt(*_: Any, hide_input: bool, **__: Any) -> str:
        hidden.append(hide_input)
        return "sealring join sr1.typed"

    monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(typer, "prompt", prompt)
    if terminal:
        assert join._read(None) == "sr1.typed"
    else:
        with pytest.raises(InvalidInput) as refused:
            join._read(None)
        assert refused.value.reason == "BAD_TOKEN"
    assert hidden == [True] * terminal, "nobody reads it over a shoulder"


async def test_what_a_node_serves_is_said_when_it_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(join, "_LOOK_SECONDS", 0)
    looks = [("", NOTHING), ("", "serves demo"), ("lost the coordinator", "serves demo"), ("", "serves demo")]

    def look() -> tuple[str, str]:
        if not looks:
            raise Begun
        return looks.pop(0)

    machine: Any = SimpleNamespace(looks=look)
    with pytest.raises(Begun):
        await join._watch(machine)
    assert capsys.readouterr().err.splitlines() == ["serves demo", "lost the coordinator"]
