"""What the process that joins for a service may say."""

from __future__ import annotations

import io
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

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


@pytest.mark.parametrize(("user", "group", "others"), [(None, None, None), ("me", 77, [])])
def test_it_runs_as_the_account_and_with_nothing_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str | None, group: int | None, others: Any
) -> None:
    did: list[Any] = []

    class Output:
        def read(self, most: int) -> bytes:
            did.append(most)
            return b"said"

    class Process:
        def __init__(self, command: list[str], **how: Any) -> None:
            did.append((command, how))
            self.stdin, self.stdout = Input(), Output()

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            did.append("waited for")

        def kill(self) -> None:
            did.append("killed")

    class Input(io.BytesIO):
        def close(self) -> None:
            if not self.closed:
                did.append(self.getvalue())
            super().close()

    monkeypatch.setattr(enrol.subprocess, "Popen", Process)
    monkeypatch.setattr("pwd.getpwnam", lambda name: {"me": SimpleNamespace(pw_gid=77)}[name])
    assert enrol._run(user, b"given", tmp_path) == b"said"
    (command, how), *rest = did
    assert command == [sys.executable, "-P", "-m", "sealring.cli.setup.enrol"]
    assert (how["user"], how["group"], how["extra_groups"]) == (user, group, others)
    assert (how["umask"], how["cwd"], how["env"]["HOME"]) == (0o077, "/", str(tmp_path))
    assert set(how["env"]) == {"HOME", "PATH", "LANG"}
    assert rest == [b"given", 1 << 20, "killed", "waited for"]


def test_as_a_module_it_reads_what_to_do_and_prints_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[Any] = []
    monkeypatch.setattr("sealring.mesh.system.start.hide_rich", lambda: did.append("lean"))
    monkeypatch.setattr("sealring.mesh.system.start.collect_seldom", lambda: did.append("seldom"))
    monkeypatch.setattr("sealring.mesh.system.start.forbid_core_files", lambda: did.append("no cores"))

    def answer(work: Any) -> int:
        with pytest.raises(ConfigError):
            work()
        return 5

    def choose(root: Path, said: Any, wishes: Wishes, coordinators: Any) -> Any:
        did.append((root, said, wishes.name, list(wishes.models)))
        raise ConfigError("enough")

    monkeypatch.setattr("sealring.node.engine.apart.answer", answer)
    monkeypatch.setattr("sealring.cli.setup.choices.choose_other", choose)
    parsed = SimpleNamespace(addresses=["h:1"])
    monkeypatch.setattr("sealring.mesh.member.bootstrap.JoinToken.parse", lambda token: parsed)
    monkeypatch.delitem(sys.modules, enrol.__name__)
    wishes = {"name": "two", "models": ["/m"]}
    given = json.dumps({"root": str(tmp_path), "said": {"a": 1}, "wishes": wishes, "token": "sr2.x"}).encode()
    for padded, error in ((given.ljust(1 << 20), SystemExit), (given.rjust((1 << 20) + 1), ValueError)):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(padded)))
        with pytest.raises(error) as ended:
            runpy.run_module("sealring.cli.setup.enrol", run_name="__main__")
        assert not isinstance(ended.value, SystemExit) or ended.value.code == 5
    began = ["lean", "seldom", "no cores"]
    assert did == [*began, (tmp_path, {"a": 1}, "two", [Path("/m")]), *began]
    runpy.run_module(enrol.__name__, run_name="another")
    assert len(did) == 7


def test_an_account_that_cannot_run_python_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(ConfigError) as raised:
        enrol.enrol_as(None, tmp_path, {}, Wishes(), "a token")
    assert raised.value.reason == "NO_PROGRAM"
    assert raised.value.message.startswith("the account of this process cannot run ")
