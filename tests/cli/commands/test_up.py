"""`sealring up`, over a first machine that starts nothing."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Self

import pytest
from commands import Coordinator

from sealring.cli.commands.up import choose_address
from sealring.cli.terminal.output import moment
from sealring.mesh.errors import Unavailable
from sealring.mesh.system.networks import OwnAddress
from sealring.v1 import admin_pb2

EXPIRES = 1_800_000_000


class Machine:
    """A first machine with one node. It ends once its coordinator has answered for the last time."""

    coordinator_address, grpc_address, http_url = "10.0.0.1:1", "127.0.0.1:2", "http://127.0.0.1:3"
    operator_bundle, processes = Path("/bundle"), {"coordinator": 7}
    made: Machine

    def __init__(self, state: Path, settings: Any, *, say: Any) -> None:
        self.state_dir, self.settings = state, settings
        nodes = [
            admin_pb2.Node(id=name, name=name, state=admin_pb2.NODE_STATE_ONLINE, level="software")
            for name in ("mac-1", "mac-2")
        ]
        one, both = (admin_pb2.ListNodesResponse(nodes=nodes[:count]) for count in (1, 2))
        self.answers: list[Any] = [one, Unavailable("busy"), both, both]
        self.admin = Coordinator(ListNodes=self.answers)
        self.asked: list[Any] = []
        Machine.made = self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def start(self) -> None:
        before = os.umask(0o777)
        os.umask(before)
        assert before == 0o077, "what it makes is its owner's alone"

    async def token(self, **wanted: Any) -> Any:
        self.asked.append(wanted)
        return admin_pb2.CreateJoinTokenResponse(token="sr1.x", token_id="t", expires=EXPIRES)

    async def wait_for_end(self) -> None:
        while len(self.admin.calls("ListNodes")) < 6:
            await asyncio.sleep(1)


@pytest.fixture
def up(here: Any, host: Any, coordinator: Any) -> Any:
    host.machine = Machine
    return lambda *options: here("up", *options)


def test_it_says_what_was_chosen_what_to_type_elsewhere_and_what_happens(up: Any) -> None:
    done = up()
    assert done.status == 0
    assert Machine.made.asked == [{"uses": 16, "seconds": 3600}]
    assert done.out == "  sealring join sr1.x\n", "the one thing to copy"
    lines = [line for line in done.err.splitlines() if line]
    begins = lines.index("starting the coordinator")
    assert [line.partition(":")[0] for line in lines[:begins]] == ["address", "identity", "models", "trust"]
    assert lines[begins + 1 :] == [
        "coordinator at 10.0.0.1:1, gateway at http://127.0.0.1:3",
        f"logs: {Machine.made.state_dir / 'logs'}",
        f"On each other machine (up to 16, until {moment(EXPIRES)}) type:",
        "Then here, in another terminal: sealring deploy MODEL (demo is the bundled one), sealring chat",
        "Another token: sealring token create. Ctrl-C stops what runs on this machine.",
        "mac-2 has joined, trust level software",
        "mac-2 is online",
        "stopping",
    ]


def test_what_programs_read_of_it(up: Any) -> None:
    found = up("--json").data
    assert (found["join"], found["token_id"], found["expires"]) == ("sealring join sr1.x", "t", EXPIRES)
    assert (found["coordinator"], found["operator"]) == ("10.0.0.1:1", "/bundle")
    assert found["processes"] == {"coordinator": 7}


def test_the_home_folder_is_found_where_no_shell_does(up: Any, home: Path) -> None:
    (home / "kept").mkdir()
    assert up("--models=~/kept", "--models", ".").status == 0
    assert Machine.made.settings["node"]["models"] == [str(home / "kept"), str(home)]
    assert "there is no folder" in up("--models", "none").err


@pytest.mark.parametrize(("typed", "chosen"), [([2], "b"), ([0, 4, 3], "c"), ([1], "a"), (None, "a")])
def test_the_address_is_asked_for_where_somebody_can_answer(
    host: Any, capsys: pytest.CaptureFixture[str], typed: list[int] | None, chosen: str
) -> None:
    host.typed = typed
    found = [OwnAddress(name, "en0") for name in "abc"]
    assert choose_address(host, found).host == chosen
    assert not typed
    listed = "  1  a (en0)\n  2  b (en0)\n  3  c (en0)\n"
    assert capsys.readouterr().err == (listed if typed is not None else "")
