"""The cluster that commands mean where none is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bundles import SigningCluster

from sealring.cli.here.found import Here, cluster_here
from sealring.cli.here.leftovers import temporary_folder
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


def test_programs_are_answered_by_what_seals_first(own: Path) -> None:
    assert Here(own).edges == ["http://127.0.0.1:8081", "http://127.0.0.1:8080"]
    (own / "config").mkdir()
    (own / "config" / "gateway.toml").write_text('[gateway]\nhttp_listen = "127.0.0.1:9000"\n')
    (own / "ports.json").write_text(json.dumps({"proxy": 9001}))
    assert Here(own).edges == ["http://127.0.0.1:9001", "http://127.0.0.1:8081", "http://127.0.0.1:9000"]
    (own / "ports.json").write_text(json.dumps({"proxy": 9000}))
    assert Here(own).edges == ["http://127.0.0.1:9000", "http://127.0.0.1:8081"], "a standby has one door"
