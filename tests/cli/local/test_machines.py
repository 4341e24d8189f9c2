"""The machines of `sealring up` and `sealring join`. Their lives are shown by tests/integration."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from bundles import SigningCluster
from commands import Coordinator, FakeHost, quickly
from patience import until

from sealring.cli.here.leftovers import gateway_of
from sealring.cli.here.settings_files import read_settings, settings_file_of
from sealring.cli.local.machines import NOTHING, FirstMachine, OtherMachine, describe_place
from sealring.mesh.errors import DeadlineExceeded
from sealring.mesh.pki import Role
from sealring.mesh.roster import Ring, RingMember
from sealring.node.daemon.watch import DOING, Doing, note_doing
from sealring.v1 import admin_pb2

LISTENS = {"listen": "127.0.0.1:7"}


async def test_one_token_of_up_is_good_at_a_time(tmp_path: Path) -> None:
    tokens = [admin_pb2.JoinTokenInfo(token_id="somebody's", note="for the attic")]

    def create(asked: Any) -> Any:
        tokens.append(admin_pb2.JoinTokenInfo(token_id=f"id-{len(tokens)}", note=asked.note))
        return admin_pb2.CreateJoinTokenResponse(token_id=tokens[-1].token_id)

    def revoke(asked: Any) -> None:
        tokens[:] = [one for one in tokens if one.token_id != asked.token_id]

    machine: Any = FirstMachine(tmp_path, {})
    machine.admin = Coordinator(
        CreateJoinToken=create,
        RevokeJoinToken=revoke,
        ListJoinTokens=lambda _: admin_pb2.ListJoinTokensResponse(tokens=tokens),
    )
    for _ in range(3):
        made = await machine.token(uses=2, seconds=60)
        assert [one.token_id for one in tokens] == ["somebody's", made.token_id]


def test_where_the_gateway_is_found_and_what_each_is_set_to(tmp_path: Path) -> None:
    settings = {"gateway": {"grpc_listen": "127.0.0.1:4711"}, "node": {"name": "mac-1"}}
    FirstMachine(tmp_path, settings).write_configs()
    assert gateway_of(tmp_path) == "127.0.0.1:4711"
    for name, section in settings.items():
        assert read_settings(settings_file_of(tmp_path, name), name) == section


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        ("up", "serves demo: {}"),
        ("forming", "demo is about to be served: {}"),
        ("", "demo is about to be served: {}"),
        ("ended", "demo is not served now: {} (`sealring status` says why)"),
    ],
)
def test_a_node_says_what_it_does_and_not_what_the_roster_wants_it_to_do(phase: str, said: str) -> None:
    members = (RingMember("me", 1, (4, 8)), RingMember("other", 0, (0, 4)))
    ring = Ring("demo-0", "demo", 0, "m", b"", "pipeline", 1, 8, b"", 0, 0, members)
    assert describe_place(ring, "me", phase) == said.format("layers 4 to 7 of 8, node 2 of 2")


def test_a_machine_that_knows_nothing_yet_says_that_it_serves_nothing(tmp_path: Path) -> None:
    machine = OtherMachine(tmp_path, {"node": {"state_dir": str(tmp_path)}})
    assert machine.look() == ("", NOTHING, "")
    SigningCluster(tmp_path / "signed").save(tmp_path, Role.MEMBER)
    note_doing(tmp_path, Doing(True, {}))
    assert machine.look() == ("", NOTHING, ""), "it has no roster"


@pytest.fixture
def machine(tmp_path: Path, host: FakeHost) -> OtherMachine:
    """A node that was up before, and is a process that only lives now."""
    host.components = ("/bin/sh", "-c", "exec sleep 60")
    note_doing(tmp_path, Doing(True, {}))
    return OtherMachine(tmp_path, {"node": {**LISTENS, "state_dir": str(tmp_path)}}, host=host)


async def test_a_node_has_started_once_it_listens_and_has_done_nothing_yet(
    machine: OtherMachine, host: FakeHost, tmp_path: Path
) -> None:
    async with machine:
        starting = asyncio.create_task(machine.start())
        await until(lambda: "node" in machine.processes)
        assert not starting.done()
        host.ports.add(7)
        await starting
        assert not (tmp_path / DOING).exists()
        assert (tmp_path / "config" / "node.toml").exists()


def test_a_node_that_does_not_listen_is_not_waited_for_for_ever(
    machine: OtherMachine, host: FakeHost
) -> None:
    async def start() -> None:
        async with machine:
            await machine.wait_until_it_listens()

    with pytest.raises(DeadlineExceeded, match="within 300 s"):
        quickly(start())
