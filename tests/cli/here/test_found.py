"""The cluster that commands mean where none is named."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path

import pytest
from bundles import SigningCluster

from sealring.cli.calls.member import MemberChannels
from sealring.cli.calls.operator import read_bundle
from sealring.cli.here import found
from sealring.cli.here.found import Here, cluster_here
from sealring.cli.here.leftovers import temporary_folder
from sealring.mesh.errors import PermissionDenied
from sealring.mesh.pki import Role
from sealring.mesh.system.lock import lock_state
from sealring.mesh.system.paths import default_state_root


@pytest.fixture(autouse=True)
def own(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own state folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    root = default_state_root()
    root.mkdir(parents=True)
    return root


def runs(folder: Path, gateway: int) -> Path:
    (folder / "ports.json").write_text(json.dumps({"gateway": gateway}))
    return folder


def test_the_users_own_cluster_is_meant_while_no_demo_runs(own: Path) -> None:
    here = cluster_here()
    assert (here.root, here.own, here.gateway) == (own, True, "127.0.0.1:7780")
    assert here.operator == own / "coordinator" / "operator"
    runs(own, 4711)
    assert cluster_here().gateway == "127.0.0.1:7780", "it does not run"
    with lock_state(own):
        assert cluster_here().gateway == "127.0.0.1:4711"


def test_a_demo_that_runs_is_meant_where_the_own_one_does_not(own: Path) -> None:
    runs(own, 4711)
    with temporary_folder() as folder:
        assert cluster_here().own, "it has not begun"
        runs(folder, 4712)
        here = cluster_here()
        assert (here.root, here.own, here.gateway) == (folder, False, "127.0.0.1:4712")
        assert here.operator == folder / "coordinator" / "operator"
        with lock_state(own):
            assert cluster_here().own
            assert cluster_here(["127.0.0.1:4712"]).root == folder, "its gateway is named"
        (folder / "node-0").mkdir()
        (folder / "gateway").mkdir()
        assert [here.folder(one).name for one in ("gateway", "node")] == ["gateway", "node-0"]
    assert cluster_here().own


def test_a_member_looks_with_its_certificate_and_asks_over_gateways_elsewhere(
    own: Path, tmp_path: Path
) -> None:
    cluster = SigningCluster(tmp_path)
    cluster.save(own / "node" / "client", Role.CLIENT)
    here = Here(own)
    assert here.member == here.operator == own / "node" / "client"
    cluster.save(own / "gateway", Role.GATEWAY)
    assert here.member is None, "it has a gateway of its own"
    cluster.save(own / "coordinator" / "operator", Role.OPERATOR)
    assert here.operator == own / "coordinator" / "operator"


def test_the_services_of_this_machine_are_meant_where_the_user_has_no_cluster(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They belong to another account, as which one has to look."""
    services = tmp_path / "services"
    monkeypatch.setattr(found, "SERVICES", services)
    (own / "ports.json").write_text(json.dumps({"proxy": 8085}))  # as `join --service` leaves it
    assert cluster_here().root == own
    client = services / "node" / "client"
    SigningCluster(tmp_path).save(client, Role.CLIENT)
    here = cluster_here()
    assert (here.root, here.own, here.operator, here.member) == (services, True, client, client)
    assert here.edges[0] == "http://127.0.0.1:8085"
    found.require_account(client)
    if os.geteuid() == 0:
        os.chown(client, pwd.getpwnam("nobody").pw_uid, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 1 << 20)
    with pytest.raises(PermissionDenied) as refused:
        read_bundle(here.operator)
    assert (refused.value.reason, "sudo -H -u" in refused.value.hint) == ("OTHERS_STATE", True)

    def closed(folder: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(found, "is_enrolled", closed)
    assert cluster_here().root == services
    assert cluster_here().member is None, "it may have a gateway of its own"
    with pytest.raises(PermissionDenied):
        MemberChannels(client)
    (own / "node").mkdir()
    assert cluster_here().root == own


def test_programs_are_answered_by_what_seals_first(own: Path) -> None:
    assert Here(own).edges == ["http://127.0.0.1:8081", "http://127.0.0.1:8080"]
    (own / "config").mkdir()
    (own / "config" / "gateway.toml").write_text('[gateway]\nhttp_listen = "127.0.0.1:9000"\n')
    (own / "ports.json").write_text(json.dumps({"proxy": 9001}))
    assert Here(own).edges == ["http://127.0.0.1:9001", "http://127.0.0.1:8081", "http://127.0.0.1:9000"]
    (own / "ports.json").write_text(json.dumps({"proxy": 9000}))
    assert Here(own).edges == ["http://127.0.0.1:9000", "http://127.0.0.1:8081"], "a standby has one door"
