"""The machines of `sealring up` and `sealring join`."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.commands import join
from sealring.cli.local import machines
from sealring.cli.local.leftovers import gateway_of
from sealring.cli.local.machines import NOTHING, FirstMachine, OtherMachine
from sealring.cli.setup.settings_files import read_settings, settings_file_of
from sealring.mesh.errors import DeadlineExceeded
from sealring.mesh.member.state import ROSTER
from sealring.mesh.roster.model import Ring, RingMember
from sealring.node.daemon.watch import DOING, Doing, note_doing
from sealring.v1 import admin_pb2


class FakeAdmin:
    """Keeps join tokens."""

    def __init__(self) -> None:
        self.tokens = [admin_pb2.JoinTokenInfo(token_id="somebody's", note="for the attic")]

    async def call(self, method: str, **request: Any) -> Any:
        if method == "CreateJoinToken":
            made = admin_pb2.JoinTokenInfo(token_id=f"id-{len(self.tokens)}", note=request["note"])
            self.tokens.append(made)
        elif method == "RevokeJoinToken":
            self.tokens = [one for one in self.tokens if one.token_id != request["token_id"]]
        else:
            return admin_pb2.ListJoinTokensResponse(tokens=self.tokens)
        return admin_pb2.CreateJoinTokenResponse(token_id=self.tokens[-1].token_id)


async def test_one_token_of_up_is_good_at_a_time(tmp_path: Path) -> None:
    machine: Any = FirstMachine(tmp_path, {})
    machine.admin = FakeAdmin()
    for _ in range(3):
        made = await machine.token(uses=2, seconds=60)
        assert [one.token_id for one in machine.admin.tokens] == ["somebody's", made.token_id]


def test_where_the_gateway_is_found_and_what_each_is_set_to(tmp_path: Path) -> None:
    settings = {"gateway": {"grpc_listen": "127.0.0.1:4711"}, "node": {"name": "mac-1"}}
    FirstMachine(tmp_path, settings).write_configs()
    assert gateway_of(tmp_path) == "127.0.0.1:4711"
    for name, section in settings.items():
        assert read_settings(settings_file_of(tmp_path, name), name) == section


def test_a_joined_machine_says_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the roster wants it to do."""
    demo, small = (
        Ring(f"{name}-0", name, 0, "m", b"", "pipeline", 1, 8, b"", 0, 0, (RingMember("me", 1, (4, 8)),))
        for name in ("demo", "small")
    )
    rings: Any = [demo]
    roster = SimpleNamespace(rings_of=lambda _: rings)
    state = SimpleNamespace(coordinator="10.0.0.1:7700", peer=SimpleNamespace(id="me"), root=None)
    monkeypatch.setattr(machines, "load_machine_state", lambda _: state)
    monkeypatch.setattr(machines, "check_roster", lambda *_of, **_how: roster)
    machine = OtherMachine(tmp_path, {"node": {"state_dir": str(tmp_path)}})
    (tmp_path / ROSTER).touch()
    assert machine.looks() == ("", NOTHING), "nothing is known yet"
    where = "layers 4 to 7 of 8, 2 of 1 nodes"
    for answers, phases, said in (
        (True, {}, ("answers", f"demo is not served now: {where} (")),
        (True, {"demo-0": "forming"}, ("answers", f"demo is about to be served: {where}")),
        (True, {"demo-0": "up"}, ("answers", f"serves demo: {where}")),
        (False, {"demo-0": "up"}, ("does not answer; ", f"serves demo: {where}")),
        (False, {"demo-0": "ended"}, ("does not answer; ", f"demo is not served now: {where} (")),
    ):
        note_doing(tmp_path, Doing(answers, phases))
        coordinator, place = machine.looks()
        assert coordinator.startswith(f"the coordinator at 10.0.0.1:7700 {said[0]}")
        assert place.startswith(said[1])
    rings.append(small)
    note_doing(tmp_path, Doing(True, {"demo-0": "up", "small-0": "forming"}))
    assert machine.looks()[1] == f"serves demo: {where}; small is about to be served: {where}"
    rings.clear()
    assert machine.looks()[1] == NOTHING


async def test_a_terminal_says_what_changes_and_nothing_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([("", NOTHING), ("it answers", NOTHING), ("it answers", "serves"), ("it is away", "serves")])
    monkeypatch.setattr("sealring.cli.commands.join._LOOK_SECONDS", 0)
    machine: Any = SimpleNamespace(looks=lambda: next(looks, ("it is away", NOTHING)))
    watching = asyncio.create_task(join._watch(machine))
    said = ""
    async with asyncio.timeout(200):
        while NOTHING not in said:
            await asyncio.sleep(0)
            said += capsys.readouterr().err
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    assert said.splitlines() == ["it answers", "serves", "it is away", NOTHING]


@pytest.mark.parametrize(
    ("name", "coordinator", "there", "again"),
    [
        ("node", "10.0.0.1:7700", True, False),
        ("node", "10.0.0.9:7700", True, True),
        ("node", "10.0.0.1:7700", False, True),
        ("gateway", "10.0.0.1:7700", True, False),
        ("gateway", "10.0.0.1:7700", False, True),
    ],
)
async def test_who_joins_again_when_up_starts_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    coordinator: str,
    there: bool,
    again: bool,
) -> None:
    """Who is not in the roster, as it is or where the coordinator is now."""
    member: Any = SimpleNamespace(id="me")
    roster = SimpleNamespace(members=(), gateways=())
    setattr(roster, "members" if name == "node" else "gateways", (member,) if there else ())
    bundle = SimpleNamespace(coordinator="10.0.0.1:7700", root_sha256=b"")
    state = SimpleNamespace(coordinator=coordinator, peer=SimpleNamespace(id="me"))
    monkeypatch.setattr("sealring.cli.local.cluster.read_bundle", lambda _: bundle)
    monkeypatch.setattr("sealring.mesh.pki.root.decode_chain", lambda _: [])
    monkeypatch.setattr("sealring.mesh.pki.root.verify_root_chain", lambda *_of, **_how: None)
    monkeypatch.setattr("sealring.mesh.roster.reader.check_roster", lambda *_of, **_how: roster)
    monkeypatch.setattr("sealring.mesh.member.state.is_enrolled", lambda _: True)
    monkeypatch.setattr("sealring.mesh.member.state.load_machine_state", lambda _: state)
    settings = {one: {"state_dir": str(tmp_path / one)} for one in ("coordinator", name)}
    machine: Any = FirstMachine(tmp_path, settings)
    joined: list[str] = []

    async def enrol(*of: str) -> None:
        joined.append(name)

    async def call(method: str, **_: Any) -> Any:
        return SimpleNamespace(roster=b"", root_metadata=b"")

    machine.admin = SimpleNamespace(call=call)
    machine.enrol = enrol
    await machine.enrol_all()
    assert joined == [name] * again


async def test_a_node_is_waited_for_until_it_listens_or_for_long_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "_POLL_SECONDS", 0)
    clock, looks = [100.0], list[tuple[str, int]]()

    def listens(*address: Any) -> bool:
        looks.append(address)
        clock[0] += 20.0
        return len(looks) == answers_at

    monkeypatch.setattr(machines, "listens", listens)
    monkeypatch.setattr(machines, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    machine: Any = OtherMachine(tmp_path, {"node": {"listen": "127.0.0.1:7"}})
    machine.children = SimpleNamespace(logs={"node": "node.log"})
    for answers_at in (1, 3):
        looks.clear()
        await machine._wait_until_it_listens()
        assert looks == [("127.0.0.1", 7)] * answers_at
    answers_at = 0
    looks.clear()
    with pytest.raises(DeadlineExceeded, match="within 60 s") as raised:
        await machine._wait_until_it_listens()
    assert (len(looks), raised.value.hint) == (4, "see node.log")


async def test_a_node_starts_without_what_it_did_the_last_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[Any] = []
    machine: Any = OtherMachine(tmp_path, {"node": {"listen": "127.0.0.1:7", "state_dir": str(tmp_path)}})
    note_doing(tmp_path, Doing(True, {}))

    async def start_one(name: str) -> None:
        did.append((name, (tmp_path / DOING).exists()))

    async def or_failure(work: Any) -> None:
        did.append("waits")
        work.close()

    machine.start_one, machine._or_failure = start_one, or_failure
    for _ in range(2):
        await machine.start()
    assert did == [("node", False), "waits"] * 2
    assert (tmp_path / "config" / "node.toml").exists()
