"""`sealring join`: where the token comes from, and what another start does without one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from bundles import SigningCluster
from commands import Launchd

from sealring.cli.local.machines import NOTHING
from sealring.cli.setup.finding import address_in
from sealring.mesh.errors import PermissionDenied
from sealring.mesh.member.bootstrap import JoinToken
from sealring.mesh.member.joincode import Offer, short_hash
from sealring.mesh.pki.certificates import Role
from sealring.mesh.system.paths import state_root_of

LABEL = "org.sealring.node"
TOKEN = JoinToken.generate(bytes(32), ["127.0.0.1:1"]).format()


def enrolled(name: str) -> Any:
    """What enrolment returns for a node that the coordinator calls `name`."""
    roster = SimpleNamespace(member=lambda member: {"m": SimpleNamespace(level="software")}[member])
    peer = SimpleNamespace(id="m", cluster="attic")
    return SimpleNamespace(state=SimpleNamespace(peer=peer, name=name), roster=roster)


@pytest.mark.parametrize("way", ["argument", "stdin", "typed"])
def test_who_joined_runs_without_the_token_that_others_could_see(
    here: Any, host: Any, home: Path, way: str
) -> None:
    host.enrolled = enrolled("mac-2")
    (home / "my.toml").write_text("")
    line = f"sealring join {TOKEN}"
    host.typed, host.offers = [line] if way == "typed" else None, []
    words = {"argument": (TOKEN,), "stdin": ("-",), "typed": ()}[way]
    done = here("--config", "my.toml", "join", *words, "--name", "mac", "--json", stdin=f"{line}\n")
    assert done.status == 0, done.err
    ((component, settings, token),) = host.joined
    assert (component, settings.name, token) == ("node", "mac", TOKEN)
    assert done.data == {"member_id": "m", "cluster": "attic", "name": "mac-2", "level": "software"}
    assert "name: mac-2, because another machine is called mac (or --name)" in done.err
    assert done.err.endswith("joined cluster attic as mac-2, trust level software\n")
    assert host.became == [["--config", "my.toml", "join", "--begun"]]
    (kept,) = home.rglob("node.toml")
    assert 'name = "mac"' in kept.read_text(), "for the next start"


def test_who_has_its_name_is_told_nothing_of_it(here: Any, host: Any) -> None:
    host.enrolled = enrolled("mac")
    done = here("join", TOKEN, "--name", "mac")
    assert "name:" not in done.err
    assert done.out == ""


def test_where_nobody_can_be_asked_there_has_to_be_a_token(here: Any, host: Any) -> None:
    for words in ((), ("--service",)):
        host.services = Launchd()
        done = here("join", *words, "--user", "root")
        assert (done.status, "[BAD_TOKEN]" in done.err) == (2, True)


ATTIC = Offer(bytes(range(32)), "attic", ("10.0.0.1:7701",))
CELLAR = Offer(bytes(32), "attic", ("10.0.0.2:7701",))
GIVEN = JoinToken.parse(TOKEN)


@pytest.mark.parametrize(
    ("words", "typed", "offers", "asked"),
    [
        ((), ["123-4567"], [ATTIC], ATTIC),
        ((), [2, "123-4567"], [CELLAR, ATTIC], ATTIC),
        ((), [9, 0, 1, "12345", "code", "123 4567"], [ATTIC, CELLAR], ATTIC),
        (("10.0.0.1",), ["1234567"], [CELLAR, ATTIC], ATTIC),
        (("10.0.0.2:7701",), ["1234567"], [CELLAR, ATTIC], CELLAR),
    ],
)
def test_a_code_is_asked_for_and_gets_the_token(
    here: Any, host: Any, words: Any, typed: Any, offers: Any, asked: Offer
) -> None:
    host.enrolled, host.typed, host.offers = enrolled("mac"), typed, offers
    host.tokens = {"1234567": GIVEN}
    done = here("join", *words, "--name", "mac")
    assert done.status == 0, done.err
    assert host.shown_codes == [(asked, "1234567")], "a slip of the finger costs no try"
    ((_, _, token),) = host.joined
    assert token == TOKEN
    assert not host.typed
    assert f"attic ({short_hash(asked.root_sha256)}) at {asked.addresses[0]}" in done.err


def test_where_nothing_is_found_an_address_will_do(here: Any, host: Any) -> None:
    host.enrolled, host.offers = enrolled("mac"), []
    host.platform, host.typed = "linux", ["10.0.0.9"]
    done = here("join")
    assert (done.status, "COORDINATOR_UNREACHABLE" in done.err) == (10, True)
    assert "no cluster on this network lets machines join with a code now" in done.err
    assert "Local Network" not in done.err
    host.platform, host.typed = "darwin", [TOKEN]
    assert "Privacy & Security > Local Network" in here("join").err
    assert host.joined


def test_a_wrong_code_is_tried_once(here: Any, host: Any) -> None:
    host.typed, host.offers = ["1234567"], [ATTIC]
    host.tokens = {"1234567": PermissionDenied("the join code is wrong", reason="WRONG_CODE")}
    done = here("join")
    assert (done.status, "[WRONG_CODE]" in done.err) == (6, True)
    assert (len(host.shown_codes), host.joined) == (1, [])


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

    def look(self) -> tuple[str, str]:
        return self.looks.pop(0) if self.looks else ("", NOTHING)


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
    said = [line for line in done.err.splitlines() if not line.startswith(("identity", "models"))]
    reached = "address: 127.0.0.1, where only this machine reaches it (or --address)"
    assert said == [reached, "starting the node", log, answers, "serves", away, NOTHING, "stopping"]
    Machine.looks = [("", NOTHING)]
    assert reached not in here("join", "--begun").err, "what was chosen has just been told"


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
