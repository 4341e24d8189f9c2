"""Calls with an operator's bundle: which bundles open anything, and what is made of answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from bundles import SigningCluster
from commands import quickly

from sealring.cli.calls.operator import Admin, connect, read_bundle, wait_for_bundle
from sealring.mesh.errors import ConfigError, Unavailable
from sealring.mesh.pki import Role
from sealring.v1 import admin_pb2


@pytest.fixture
def cluster(tmp_path: Path) -> SigningCluster:
    return SigningCluster(tmp_path)


def refused(folder: Path) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        read_bundle(folder)
    return raised.value


def test_a_folder_without_a_bundle_is_named(cluster: SigningCluster, tmp_path: Path) -> None:
    assert read_bundle(cluster.bundle).peer.role is Role.OPERATOR
    cluster.save(tmp_path / "node", Role.MEMBER)
    for folder, said in (
        (tmp_path / "none", f"this machine has no operator's key: there is none in {tmp_path / 'none'}"),
        (tmp_path / "node", f"{tmp_path / 'node'} holds the enrolment of a member, not an operator bundle"),
    ):
        error = refused(folder)
        assert (error.message, error.reason) == (said, "NO_OPERATOR_BUNDLE")
        assert "--operator" in error.hint


def test_a_damaged_bundle_is_not_called_a_missing_one(cluster: SigningCluster) -> None:
    (cluster.bundle / "member.json").write_text("{")
    assert refused(cluster.bundle).reason == "MEMBER_STATE_CORRUPT"


class Late(SigningCluster):
    """A cluster whose certificates have ended, an hour ago."""

    ahead = -7200.0


class Early(SigningCluster):
    """A cluster whose certificates begin in two hours: its clock was ahead."""

    ahead = 7200.0


@pytest.mark.parametrize("kind", [Late, Early])
def test_a_bundle_opens_nothing_while_its_certificate_is_not_valid(
    kind: type[SigningCluster], tmp_path: Path
) -> None:
    assert refused(kind(tmp_path).bundle).reason == "OPERATOR_CERTIFICATE_EXPIRED"


def test_a_bundle_is_waited_for_until_it_leads_to_the_coordinator(
    cluster: SigningCluster, tmp_path: Path
) -> None:
    """A coordinator that was off renews an ended one; one that stays as it is is used after a while."""
    for address in (cluster.address, "moved:1"):
        quickly(wait_for_bundle(cluster.bundle, address, seconds=60))
    for folder, reason in (
        (Late(tmp_path / "late").bundle, "OPERATOR_CERTIFICATE_EXPIRED"),
        (tmp_path / "none", "NO_OPERATOR_BUNDLE"),
    ):
        with pytest.raises(ConfigError) as raised:
            quickly(wait_for_bundle(folder, cluster.address, seconds=60))
        assert raised.value.reason == reason


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
        assert (admin.address, admin.seconds, admin.root) == (cluster.address, 30.0, cluster.authority.root)
    async with connect(cluster.bundle, address="other:2", seconds=3.0) as admin:
        assert (admin.address, admin.seconds) == ("other:2", 3.0)
