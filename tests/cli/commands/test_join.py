"""`sealring join`: where the token comes from, and what another start does without one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Self

import pytest
from bundles import SigningCluster
from commands import Launchd

from sealring.cli.local.machines import NOTHING
from sealring.cli.setup.finding import address_in
from sealring.coordinator.store import Store
from sealring.mesh.errors import Unavailable
from sealring.mesh.member import JoinToken
from sealring.mesh.pki import Role
from sealring.mesh.system.paths import state_root_of

LABEL = "org.sealring.node"
TOKEN = JoinToken.generate(bytes(32), ["127.0.0.1:1"]).format()


def test_where_nobody_can_be_asked_there_has_to_be_a_token(here: Any, host: Any) -> None:
    for words in ((), ("--service",)):
        host.services = Launchd()
        done = here("join", *words, "--user", "root")
        assert (done.status, "[BAD_TOKEN]" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1", "10.0.0.1:7701"),
        (" studio.local \n", "studio.local:7701"),
        ("10.0.0.1:80", "10.0.0.1:80"),
        ("fe80::1", "[fe80::1]:7701"),
        ("[fe80::1]:80", "[fe80::1]:80"),
        (TOKEN, None),
        (f"sealring join {TOKEN}", None),
        ("sr1.abc", None),
        ("-", None),
        ("studio", None),
        ("a/b.c", None),
    ],
)
def test_an_address_is_told_from_a_token(text: str, address: str | None) -> None:
    assert address_in(text) == address


class Machine:
    """A node that starts nothing; it ends once there is nothing more to see."""

    looks: list[tuple[str, str]]

    def __init__(self, root: Path, settings: Any, *, say: Any) -> None:
        self.logs = {"node": root / "node.log"}
        self.ended = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def start(self) -> None:
        before = os.umask(0o777)
        os.umask(before)
        assert before == 0o077, "what it makes is its owner's alone"

    async def wait_for_end(self) -> None:
        while self.looks:
            await asyncio.sleep(1)

    async def wait_for_door(self) -> None: ...

    async def keep_door(self) -> None:
        await asyncio.Event().wait()

    @property
    def door_url(self) -> str:
        return f"http://127.0.0.1:{self.door}"

    door = 0

    works: list[str] = []

    def look(self) -> tuple[str, str, str]:
        work = self.works.pop(0) if self.works else ""
        return (*(self.looks.pop(0) if self.looks else ("", NOTHING)), work)


def test_who_has_joined_runs_and_says_what_changes_and_nothing_twice(
    here: Any, host: Any, coordinator: Any, home: Path
) -> None:
    SigningCluster(home).save(state_root_of(home) / "node", Role.MEMBER)
    host.machine = Machine
    answers, away = "it answers", "it is away"
    Machine.looks = [
        ("", NOTHING),
        (answers, NOTHING),
        (answers, "serves"),
        (away, "serves"),
        (away, NOTHING),
    ]
    done = here("join")
    log = f"the node runs until Ctrl-C; its log: {state_root_of(home) / 'node.log'}"
    said = [
        line for line in done.err.splitlines() if not line.startswith(("identity", "models", "In another"))
    ]
    asks = "On this machine, programs ask at http://127.0.0.1:8080/v1, and what they ask leaves it sealed."
    said = [line for line in said if line and line != asks]
    assert asks in done.err
    reached = "address: 127.0.0.1, where only this machine reaches it (or --address)"
    assert said == [reached, "starting the node", log, answers, "serves", away, NOTHING, "stopping"]
    Machine.looks = [("", NOTHING)]
    assert reached not in here("join", "--begun").err, "what was chosen has just been told"


def test_who_watches_sees_how_far_the_node_is_with_what_it_prepares(
    here: Any, host: Any, coordinator: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    class Shown:
        def __init__(self, what: str, *, quiet: bool) -> None:
            assert quiet, "no file gets a line every few seconds for hours"

        update = shown.append

        def close(self) -> None:
            shown.append("(closed)")

    monkeypatch.setattr("sealring.cli.commands.join.Progress", Shown)
    SigningCluster(home).save(state_root_of(home) / "node", Role.MEMBER)
    host.machine = Machine
    half = "demo-0: fetching 1.0 of 2.0 GiB"
    Machine.looks, Machine.works = [("", NOTHING)] * 4, ["", half, half, ""]
    here("join")
    assert shown == ["(closed)", half, half, "(closed)"], "the start, and what it prepares"


@pytest.fixture
def second(here: Any, host: Any, coordinator: Any, home: Path) -> Any:
    """Runs the node of a second machine that has just joined, while lines are typed."""
    SigningCluster(home).save(state_root_of(home) / "node", Role.MEMBER)
    host.machine = Machine
    Machine.looks = [("", NOTHING)] * 3

    def run(*typed: str) -> Any:
        host.typed = list(typed)
        return here("join", "--begun", "--second")

    return run


def test_the_second_machine_is_asked_once_its_node_runs(second: Any, host: Any) -> None:
    """What is no backup is said, and ends nothing."""
    done = second("/nowhere/backup", "")
    said = done.err.splitlines()
    runs = next(index for index, line in enumerate(said) if line.startswith("the node runs until Ctrl-C"))
    asked = next(index for index, line in enumerate(said) if line.startswith("This second machine can be"))
    assert runs < asked
    assert "/nowhere/backup is no backup of a coordinator" in done.err
    assert (done.status, host.typed, host.became) == (0, [], [])


def test_what_is_said_meanwhile_does_not_bury_the_question(
    second: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def line() -> str:
        await asyncio.sleep(10)
        return ""

    monkeypatch.setattr(host, "line", line)
    serves = [("", NOTHING)] * 3 + [("", "serves")] * 20
    Machine.looks = serves
    said = second("").err.splitlines()
    asked = [index for index, text in enumerate(said) if text.startswith("FILE (empty")]
    assert (len(asked), said[asked[1] - 1]) == (2, "serves")


def test_it_starts_again_as_the_standby(
    second: Any, host: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stand_by(at: dict[str, Path], file: Path) -> None:
        SigningCluster(home).save(at["coordinator"] / "operator", Role.OPERATOR)

    monkeypatch.setattr("sealring.cli.commands.join._stand_by", stand_by)
    second("backup")
    assert host.became == [["join", "--begun"]]


class Deposed(Machine):
    """Its coordinator ends at once."""

    async def start(self) -> None:
        raise Unavailable("it ended", reason="COMPONENT_ENDED", component="coordinator")


@pytest.mark.parametrize("deposed", [True, False])
def test_it_starts_again_as_a_member_where_another_machine_took_over(
    second: Any, host: Any, home: Path, deposed: bool
) -> None:
    root = state_root_of(home)
    SigningCluster(home).save(root / "coordinator" / "operator", Role.OPERATOR)
    store = Store.create(root / "coordinator")
    if deposed:
        store.set_meta("deposed", b"1")
    store.close()
    host.machine = Deposed
    done = second()
    assert host.became == [["join", "--begun"]] * deposed
    assert ("[COMPONENT_ENDED]" in done.err, (root / "coordinator").exists()) == (not deposed, not deposed)
    assert (root / "deposed-1" / "coordinator").exists() == deposed


@pytest.fixture
def serve(here: Any, host: Any, tmp_path: Path) -> Any:
    """Runs `join --service` below a prefix, where launchd has the node loaded."""
    host.services = Launchd(LABEL)
    (tmp_path / "root").mkdir()
    return lambda *words: here(
        "join", *words, "--service", "--user", "root", "--prefix", str(tmp_path / "root")
    )


def test_a_dry_run_joins_nothing(serve: Any, host: Any, tmp_path: Path) -> None:
    state = tmp_path / "root/var/db/sealring/node"
    done = serve(TOKEN, "--dry-run")
    assert done.err == f"would join as the account root, with the state in {state}\n"
    assert (host.services.did, list((tmp_path / "root").iterdir())) == ([], [])


def test_a_service_is_not_made_the_standby_silently_otherwise(serve: Any, host: Any, tmp_path: Path) -> None:
    done = serve(TOKEN, "--standby", "backup")
    assert (done.status, "[BAD_OPTION]" in done.err, "docs/operators.md" in done.err) == (2, True, True)
    assert (host.services.did, list((tmp_path / "root").iterdir())) == ([], [])


def test_a_service_that_ran_before_goes_on_where_joining_fails(serve: Any, host: Any, tmp_path: Path) -> None:
    """The account's own process asks a coordinator that is not there."""
    done = serve(TOKEN)
    assert (done.status, "127.0.0.1:1" in done.err) == (10, True), done.err
    assert host.services.did == ["bootout", "bootstrap"]
    assert host.services.loaded == {LABEL: tmp_path / f"root/Library/LaunchDaemons/{LABEL}.plist"}


def test_a_helper_that_others_can_change_is_not_run_by_a_service(
    here: Any, host: Any, home: Path, tmp_path: Path
) -> None:
    host.services = Launchd()
    helper = tmp_path / "helper"
    helper.touch()
    helper.chmod(0o777)
    (home / "s.toml").write_text(f'[node]\nenclave_helper = "{helper}"\n')
    done = here("--config", "s.toml", "join", TOKEN, "--service", "--user", "root", "--prefix", str(tmp_path))
    assert "[UNSAFE_PLACE]" in done.err
