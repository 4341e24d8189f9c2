"""Addresses that a daemon tries: only the roster's, few at once, and only for the node itself."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from sealring.mesh.errors import Unavailable
from sealring.mesh.roster import Roster
from sealring.mesh.rpc import Server, channel_options, from_rpc_error, secure_channel, server_credentials
from sealring.node.daemon import diagnosis as module
from sealring.node.daemon.diagnosis import SERVICE, Diagnosis, DiagnosisService
from sealring.node.settings import NodeSettings
from sealring.testing import ManualClock
from sealring.v1 import diagnosis_pb2, diagnosis_pb2_grpc

Make = Callable[..., Diagnosis]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make(tmp_path: Path, clock: ManualClock) -> Make:
    def diagnosis(roster: Roster | None, own_id: str = "me", **parts: Any) -> Diagnosis:
        settings = NodeSettings(state_dir=tmp_path, name="mini", models=[Path("/models")])
        return Diagnosis(settings, own_id, lambda: roster, lambda: True, clock=clock, **parts)

    return diagnosis


def with_addresses(roster: Roster, *addresses: tuple[str, ...]) -> Roster:
    members = zip(roster.members, addresses, strict=True)
    return dataclasses.replace(
        roster, members=tuple(dataclasses.replace(one, addresses=given) for one, given in members)
    )


async def test_every_address_of_the_others_is_tried(cluster: Any, make: Make) -> None:
    parties = [cluster.party() for _ in range(2)]
    _, roster = cluster.roster(parties)
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as closed:
        reached = f"127.0.0.1:{there.getsockname()[1]}"
        refused = f"127.0.0.1:{closed.getsockname()[1]}"
        closed.close()
        wrong = "no-port"
        own, other = roster.members
        roster = with_addresses(roster, ("127.0.0.1:1",), (reached, refused, wrong))
        found = await make(roster, own.id).connect()
    assert [(one.member, one.address, one.error) for one in found.connections] == [
        (other.id, reached, ""),
        (other.id, refused, "ECONNREFUSED"),
        (other.id, wrong, "BAD_ADDRESS"),
    ]
    assert (found.left_out, found.session, found.launchd) == (0, True, False)
    assert Path(found.executable).is_absolute()
    assert found.file_limit > 0


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(65_000, "?"), "UNREACHABLE"),
        (OSError("Multiple exceptions"), "UNREACHABLE"),
        (PermissionError(1, "Operation not permitted"), "EPERM"),
        (socket.gaierror(8, "nodename nor servname provided"), "UNKNOWN_HOST"),
        (TimeoutError(), "TIMEOUT"),
    ],
)
async def test_errors_are_named(error: Exception, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(asyncio, "open_connection", fails)
    assert await module.try_address("10.0.0.1:7710") == named


async def test_it_is_no_scanner(cluster: Any, make: Make, clock: ManualClock) -> None:
    """It tries few addresses at once, a bounded number in all, and none again at once."""
    _, roster = cluster.roster([cluster.party() for _ in range(2)])
    roster = with_addresses(roster, (), tuple(f"10.0.0.1:{port}" for port in range(1, 301)))
    tried: list[str] = []
    at_once: list[int] = []
    running = 0

    async def tries(address: str) -> str:
        nonlocal running
        running += 1
        at_once.append(running)
        tried.append(address)
        await asyncio.sleep(0)
        running -= 1
        return ""

    diagnosis = make(roster, reach=tries)
    first, second = await asyncio.gather(diagnosis.connect(), diagnosis.connect())
    assert first is second
    assert (len(tried), first.left_out) == (128, 172)
    assert max(at_once) == 16
    clock.now += module.KEPT_SECONDS - 1
    assert await diagnosis.connect() is first
    clock.now += 1
    assert await diagnosis.connect() is not first
    assert len(tried) == 256


async def test_without_a_roster_nobody_is_tried(make: Make) -> None:
    found = await make(None).connect()
    assert list(found.connections) == []


async def test_a_child_looks_at_the_machine(make: Make, clock: ManualClock) -> None:
    asked: list[Any] = []

    async def listens(data: bytes) -> bytes:
        asked.append(json.loads(data))
        return await module.ask_child(data)

    diagnosis = make(None, examine=listens)
    report = await diagnosis.report()
    assert json.loads(report)["facts"]["name"] == "mini"
    assert "models.folders" in {one["id"] for one in json.loads(report)["findings"]}
    assert asked[0]["settings"]["models"] == ["/models"]
    clock.now += module.KEPT_SECONDS - 1
    assert await diagnosis.report() is report
    assert len(asked) == 1
    clock.now += 1
    assert await diagnosis.report() is not report


@pytest.mark.parametrize(("longer", "whole"), [(0, True), (1, False)])
async def test_the_length_of_a_report_is_bounded(longer: int, whole: bool, tmp_path: Path) -> None:
    (tmp_path / "talking.py").write_text(f"print('x' * {100 + longer}, end='')")
    asking = module.ask_child(b"", "talking", {"PYTHONPATH": str(tmp_path)}, 100)
    if whole:
        assert await asking == b"x" * 100
        return
    with pytest.raises(Unavailable):
        await asking


@pytest.mark.parametrize(("limit", "shown"), [(256, 256), (0, 0), (-1, 1 << 32)])
async def test_no_limit_of_open_files_is_told_as_a_large_one(
    limit: int, shown: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (limit, -1))
    assert (await make(None).connect()).file_limit == shown


@pytest.mark.parametrize(
    "program",
    ["", "raise SystemExit(1)", "import sys; sys.stdout.write('x' * 200_000); sys.stdout.flush(); input()"],
)
async def test_a_child_that_fails_is_an_error(program: str, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(program)
    with pytest.raises(Unavailable) as caught:
        await module.ask_child(b"", "failing", {"PYTHONPATH": str(tmp_path)})
    assert caught.value.reason == "NO_REPORT"


async def test_only_the_node_itself_may_ask(cluster: Any, make: Make) -> None:
    own, other = cluster.party(), cluster.party()
    service = DiagnosisService(make(None), own.peer)
    server = Server([(diagnosis_pb2_grpc.add_DiagnosisServicer_to_server, service, SERVICE)])
    port = server.listen("127.0.0.1:0", server_credentials(own.store()))
    await server.start()
    options = channel_options(own.peer.server_name)
    reasons = []
    try:
        for party in (own, other):
            async with secure_channel(f"127.0.0.1:{port}", party.material, options) as channel:
                stub = diagnosis_pb2_grpc.DiagnosisStub(channel)
                try:
                    told = await stub.Diagnose(diagnosis_pb2.DiagnoseRequest(), timeout=200)
                    reasons.append("" if told.session else "no session")
                except grpc.RpcError as error:
                    reasons.append(from_rpc_error(error).reason)
    finally:
        await server.stop(0)
    assert reasons == ["", "NOT_THIS_NODE"]
