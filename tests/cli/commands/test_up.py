"""`sealring up`, over a first machine that starts nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import typer

from sealring.cli.commands import up
from sealring.cli.local import machines
from sealring.cli.setup import choices
from sealring.cli.terminal.output import Progress, moment
from sealring.mesh.errors import Unavailable
from sealring.v1 import admin_pb2

EXPIRES = 1_800_000_000


class Enough(Exception):
    """Ends what would run for ever."""


class Machine:
    """A first machine with one node, whose coordinator answers what a test says."""

    coordinator_address, grpc_address, http_url = "10.0.0.1:1", "127.0.0.1:2", "http://127.0.0.1:3"
    operator_bundle, processes = Path("/bundle"), {"coordinator": 7}

    def __init__(self, state: Path, settings: Any, *, say: Any) -> None:
        self.state_dir, self.settings, self.asked = state, settings, list[Any]()
        self.umask = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def start(self) -> None:
        self.asked.append("start")
        self.umask = os.umask(0o777)
        os.umask(self.umask)

    async def token(self, **wanted: Any) -> Any:
        self.asked.append(wanted)
        return admin_pb2.CreateJoinTokenResponse(token="sr1.x", token_id="t", expires=EXPIRES)

    async def wait_for_end(self) -> None: ...


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    found: list[Machine] = []

    def first(*arguments: Any, **options: Any) -> Machine:
        found.append(Machine(*arguments, **options))
        return found[-1]

    async def watch(machine: Any) -> None: ...

    chosen = SimpleNamespace(said=["address 10.0.0.1"], settings={"node": {}})
    monkeypatch.setattr(machines, "FirstMachine", first)
    monkeypatch.setattr(choices, "choose_first", lambda *_: chosen)
    monkeypatch.setattr(up, "_watch", watch)
    return found


def test_it_says_what_was_chosen_and_what_to_type_elsewhere(
    here: Any, made: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(Progress, "close", lambda shown: closed.append(shown))
    done = here("up")
    assert done.status == 0
    assert len(closed) == 2, "what is waited for is taken away before, and in the end"
    assert made[0].asked == ["start", {"uses": 16, "seconds": 3600}]
    assert made[0].umask == 0o077, "what it makes is its owner's alone"
    assert done.out == "  sealring join sr1.x\n", "the one thing to copy"
    assert [line for line in done.err.splitlines() if line] == [
        "address 10.0.0.1",
        "starting the coordinator",
        "coordinator at 10.0.0.1:1, gateway at http://127.0.0.1:3",
        f"logs: {made[0].state_dir / 'logs'}",
        f"On each other machine (up to 16, until {moment(EXPIRES)}) type:",
        "Then here, in another terminal: sealring deploy MODEL (demo is the bundled one), sealring chat",
        "Another token: sealring token create. Ctrl-C stops what runs on this machine.",
        "stopping",
    ]


def test_what_programs_read_of_it(here: Any, made: list[Machine]) -> None:
    found = here("up", "--json").data
    assert (found["join"], found["token_id"], found["expires"]) == ("sealring join sr1.x", "t", EXPIRES)
    assert (found["coordinator"], found["operator"]) == ("10.0.0.1:1", "/bundle")
    assert found["processes"] == {"coordinator": 7}


def test_the_home_folder_is_found_where_no_shell_does(
    here: Any, made: list[Machine], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wished: list[Any] = []
    chosen = SimpleNamespace(said=[], settings={"node": {}})
    monkeypatch.setattr(
        choices, "choose_first", lambda root, file, wishes, ask: wished.append(wishes) or chosen
    )
    (home / "kept").mkdir()
    assert here("up", "--models=~/kept", "--models", ".").status == 0
    assert list(wished[0].models) == [home / "kept", Path()]


@pytest.mark.parametrize(
    ("terminal", "typed", "chosen"),
    [
        (("stdin", "stderr"), [2], "b"),
        (("stdin", "stderr"), [0, 4, 3], "c"),
        (("stdin", "stderr"), [1], "a"),
        (("stdin",), [], "a"),
        (("stderr",), [], "a"),
    ],
)
def test_the_address_is_asked_for_where_somebody_can_answer(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: tuple[str, ...],
    typed: list[int],
    chosen: str,
) -> None:
    for name in ("stdin", "stderr"):
        there = name in terminal
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda there=there: there, raising=False)
    monkeypatch.setattr(typer, "prompt", lambda *_, **__: typed.pop(0))
    found: Any = ["a", "b", "c"]
    assert up._ask(found) == chosen
    assert not typed
    assert capsys.readouterr().err == ("  1  a\n  2  b\n  3  c\n" if len(terminal) == 2 else "")


async def test_what_happens_in_the_cluster_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not what was so before, and not while the coordinator does not answer."""
    monkeypatch.setattr(up, "_LOOK_SECONDS", 0)
    online = admin_pb2.NODE_STATE_ONLINE
    one, two = (
        admin_pb2.Node(id=name, name=name, state=online, level="software") for name in ("mac-1", "mac-2")
    )
    looks = [[one], Unavailable("busy"), [one, two], [one, two]]

    class Admin:
        async def call(self, method: str) -> Any:
            if method == "ListDeployments":
                return admin_pb2.ListDeploymentsResponse()
            if not looks:
                raise Enough
            look = looks.pop(0)
            if isinstance(look, Unavailable):
                raise look
            return admin_pb2.ListNodesResponse(nodes=look)

    machine: Any = SimpleNamespace(admin=Admin())
    with pytest.raises(Enough):
        await up._watch(machine)
    assert capsys.readouterr().err.splitlines() == [
        "mac-2 has joined, trust level software",
        "mac-2 is online",
    ]
