"""Calls with an operator's bundle: which bundles open anything, and what is made of answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from bundles import SigningCluster

from sealring.cli.calls import operator
from sealring.cli.calls.operator import Admin, connect, read_bundle
from sealring.mesh.errors import ConfigError, RosterError, Unavailable
from sealring.mesh.pki.certificates import Role, expires_at
from sealring.v1 import admin_pb2


@pytest.fixture
def cluster(tmp_path: Path) -> SigningCluster:
    return SigningCluster(tmp_path)


def refused(folder: Path) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        read_bundle(folder)
    return raised.value


def test_a_folder_without_a_bundle_is_named(
    cluster: SigningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_bundle(cluster.bundle).peer.role is Role.OPERATOR
    cluster.save(tmp_path / "node", Role.MEMBER)
    for folder, said in (
        (tmp_path / "none", f"there is no operator bundle in {tmp_path / 'none'}"),
        (tmp_path / "node", f"{tmp_path / 'node'} holds the enrolment of a member, not an operator bundle"),
    ):
        error = refused(folder)
        assert (error.message, error.reason) == (said, "NO_OPERATOR_BUNDLE")
        assert "--operator" in error.hint

    def deny(folder: Path) -> None:
        raise PermissionError

    monkeypatch.setattr("sealring.mesh.member.state.load_machine_state", deny)
    assert refused(cluster.bundle).message == f"the operator bundle in {cluster.bundle} cannot be read"


def test_a_damaged_bundle_is_not_called_a_missing_one(cluster: SigningCluster) -> None:
    (cluster.bundle / "member.json").write_text("{")
    assert refused(cluster.bundle).reason == "MEMBER_STATE_CORRUPT"


def test_a_bundle_opens_nothing_from_the_second_on_in_which_its_certificate_ends(
    cluster: SigningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(operator, "time", SimpleNamespace(time=lambda: now[0]))
    ends = expires_at(read_bundle_at(now, cluster).tls.certificate)
    now[0] = ends - 1
    assert read_bundle(cluster.bundle)
    for now[0] in (ends, ends + 1):
        assert refused(cluster.bundle).reason == "OPERATOR_CERTIFICATE_EXPIRED"
    now[0] = cluster.root.expires + 1e9
    with pytest.raises(RosterError):
        read_bundle(cluster.bundle)


def read_bundle_at(now: list[float], cluster: SigningCluster) -> Any:
    now[0] = float(cluster.root.issued)
    return read_bundle(cluster.bundle)


async def test_a_call_is_made_of_its_fields_and_lasts_as_long_as_it_may() -> None:
    asked: list[Any] = []

    async def drain(request: Any, **options: Any) -> Any:
        asked.append((request, options))
        return admin_pb2.DrainNodeResponse()

    admin = Admin(SimpleNamespace(DrainNode=drain), "h:1", 30.0)
    await admin.call("DrainNode", id="a", undo=True)
    await admin.call("DrainNode", seconds=5.0, wait_for_ready=True)
    assert asked == [
        (admin_pb2.DrainNodeRequest(id="a", undo=True), {"timeout": 30.0, "wait_for_ready": False}),
        (admin_pb2.DrainNodeRequest(), {"timeout": 5.0, "wait_for_ready": True}),
    ]


@pytest.mark.parametrize("known", [False, True])
async def test_who_cannot_be_reached_is_named_and_other_errors_are_the_coordinators(known: bool) -> None:
    async def fail(request: Any, **_: Any) -> Any:
        status = grpc.StatusCode.NOT_FOUND if known else grpc.StatusCode.UNAVAILABLE
        raise grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), "no such node")

    admin = Admin(SimpleNamespace(DrainNode=fail), "h:1", 30.0)
    with pytest.raises(Exception) as raised:
        await admin.call("DrainNode")
    assert isinstance(raised.value, Unavailable) != known
    assert ("the coordinator at h:1 cannot be reached" in str(raised.value)) != known


async def test_calls_go_where_the_bundle_or_somebody_says(cluster: SigningCluster) -> None:
    async with connect(cluster.bundle) as admin:
        assert (admin.address, admin.seconds, admin.root) == (cluster.address, 30.0, cluster.root)
    async with connect(cluster.bundle, address="other:2", seconds=3.0) as admin:
        assert (admin.address, admin.seconds) == ("other:2", 3.0)
