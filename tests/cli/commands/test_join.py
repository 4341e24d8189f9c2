"""`sealring join`: where the token comes from, and what another start does without one."""

from __future__ import annotations

import asyncio
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
    assert here("join", "sr1.secret").out == ""
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
    hidden: list[tuple[bool, bool]] = []

    def prompt(*_: Any, hide_input: bool, err: bool) -> str:
        hidden.append((hide_input, err))
        return "sealring join sr1.typed"

    monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(typer, "prompt", prompt)
    if terminal:
        assert join._read(None) == "sr1.typed"
    else:
        with pytest.raises(InvalidInput) as refused:
            join._read(None)
        assert refused.value.reason == "BAD_TOKEN"
    assert hidden == [(True, True)] * terminal, "nobody reads it over a shoulder"


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


class Mac:
    """launchd, the account and the service that are to be; it notes what is done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
        self.did: list[Any] = []
        self.loaded = self.enrolled = False
        self.error: BaseException | None = None
        did, mac = self.did, self

        class Installation:
            def __init__(self, control: Any, made: Any, prefix: Path, *, chosen: Any) -> None:
                did.append(("service", made.user, chosen))

            def run(self, say: Any, *, start: bool, dry_run: bool) -> None:
                did.append(("run", start, dry_run))

        def enrol_as(user: str | None, root: Path, said: Any, wishes: Any, token: str) -> Any:
            did.append(("enrol", user, root, token))
            if mac.error is not None:
                raise mac.error
            return JOINED

        def note(name: str) -> Any:
            return lambda *of: did.append((name, of[0]))

        control = SimpleNamespace(
            status=lambda label: SimpleNamespace(loaded=mac.loaded),
            bootout=note("bootout"),
            bootstrap=lambda *of: did.append(("bootstrap", *of)),
        )
        for name, stand_in in (
            ("sealring.cli.commands.service.program", lambda: "/bin/sealring"),
            ("sealring.cli.service.install.Installation", Installation),
            ("sealring.cli.service.install.account_id", lambda user, prefix: 501 if user == "me" else None),
            ("sealring.cli.service.launchctl.Launchctl", lambda: control),
            (
                "sealring.cli.service.places.make_places",
                lambda made, prefix, owner: did.append(("places", owner)),
            ),
            ("sealring.cli.service.places.require_of_root", note("of root")),
            ("sealring.cli.setup.enrol.enrol_as", enrol_as),
            ("sealring.mesh.member.state.is_enrolled", lambda folder: mac.enrolled),
        ):
            monkeypatch.setattr(name, stand_in)
        self.state = state


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mac:
    return Mac(monkeypatch, tmp_path / "var/db/sealring")


def serve(here: Any, prefix: Path, *more: str) -> Any:
    return here("join", *more, "--service", "--prefix", str(prefix))


LABEL = "org.sealring.node"


@pytest.mark.parametrize(("user", "owner"), [("me", 501), ("_sealring", None)])
def test_a_service_joins_as_the_account_that_it_runs_as(
    here: Any, mac: Mac, tmp_path: Path, user: str, owner: int | None
) -> None:
    done = serve(here, tmp_path, "sr1.secret", "--user", user, "--json")
    assert done.status == 0, done.err
    assert mac.did == [
        ("bootout", LABEL),
        ("places", owner),
        ("enrol", user if owner else None, mac.state, "sr1.secret"),
        ("service", user, JOINED["settings"]),
        ("run", True, False),
    ]
    assert done.data["member_id"] == "m"


def test_a_service_that_has_joined_is_installed_as_it_is(here: Any, mac: Mac, tmp_path: Path) -> None:
    mac.enrolled = True
    assert serve(here, tmp_path).status == 0
    assert mac.did == [("service", "_sealring", None), ("run", True, False)]
    mac.did.clear()
    assert serve(here, tmp_path, "--dry-run").status == 0
    assert mac.did[-1] == ("run", True, True)


def test_a_dry_run_joins_nothing(here: Any, mac: Mac, tmp_path: Path) -> None:
    done = serve(here, tmp_path, "sr1.secret", "--dry-run")
    assert done.err == f"would join as the account _sealring, with the state in {mac.state / 'node'}\n"
    assert mac.did == []
    assert serve(here, tmp_path).status == 2, "there is no token"


@pytest.mark.parametrize("loaded", [False, True])
def test_a_service_that_ran_before_goes_on_where_joining_fails(
    here: Any, mac: Mac, tmp_path: Path, home: Path, loaded: bool
) -> None:
    mac.loaded, mac.error = loaded, PermissionError(13, "denied", "/var/x")
    (home / "s.toml").write_text('[node]\nenclave_helper = "/usr/local/bin/helper"\n')
    done = here("--config", "s.toml", "join", "sr1.x", "--service", "--prefix", str(tmp_path))
    assert (done.status, "cannot write or read /var/x" in done.err) == (6, True)
    assert mac.did[0] == ("of root", Path("/usr/local/bin/helper"))
    plist = tmp_path / f"Library/LaunchDaemons/{LABEL}.plist"
    assert mac.did[4:] == ([("bootstrap", LABEL, plist)] if loaded else [])


def test_who_has_joined_runs_and_is_told_where_the_log_is(
    here: Any, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    did: list[Any] = []

    class Machine:
        logs = {"node": home / "node.log"}

        async def start(self) -> None:
            did.append("start")
            before = os.umask(0o777)
            os.umask(before)
            assert before == 0o077, "what it makes is its owner's alone"

    def choose(root: Path, said: Any, wishes: Any, coordinators: Any, *, joined: bool) -> Any:
        did.append((coordinators, joined))
        return SimpleNamespace(said=["address 10.0.0.2"], settings={"node": {}})

    def run_cluster(make: Any, work: Any, *, what: str, meanwhile: Any) -> None:
        did.append((what, meanwhile))
        shown = SimpleNamespace(close=lambda: did.append("close"))
        asyncio.run(work(make(print), shown))

    monkeypatch.setattr("sealring.mesh.member.state.is_enrolled", lambda folder: True)
    monkeypatch.setattr(
        "sealring.mesh.member.state.load_machine_state", lambda folder: SimpleNamespace(coordinator="h:1")
    )
    monkeypatch.setattr("sealring.cli.setup.choices.choose_other", choose)
    monkeypatch.setattr("sealring.cli.local.machines.OtherMachine", lambda root, settings, say: Machine())
    monkeypatch.setattr("sealring.cli.local.foreground.run_cluster", run_cluster)
    done = here("join")
    assert did == [(["h:1"], True), ("starting the node", join._watch), "start", "close"]
    log = f"the node runs until Ctrl-C; its log: {home / 'node.log'}\n"
    assert done.err == f"address 10.0.0.2\n{log}"
    assert here("join", "--begun").err == log, "what was chosen has just been told"
