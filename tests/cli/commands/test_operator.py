"""`sealring operator`: making bundles for other operators, and listing them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bundles import SigningCluster

from sealring.cli.commands.operator import bundle_folder
from sealring.mesh.errors import InvalidInput
from sealring.mesh.member import load_machine_state
from sealring.mesh.pki import PeerIdentity, Role


def test_a_bundles_folder_is_there_before_anything_is_asked(tmp_path: Path) -> None:
    bundle = tmp_path / "new" / "bundle"
    with bundle_folder(bundle):
        assert bundle.stat().st_mode & 0o777 == 0o700
    assert bundle.is_dir()
    with pytest.raises(KeyboardInterrupt), bundle_folder(bundle):
        raise KeyboardInterrupt
    assert bundle.is_dir(), "which was there before"


def test_where_no_folder_can_be_made_nothing_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidInput) as refused, bundle_folder(tmp_path / "file" / "bundle"):
        raise AssertionError("asked all the same")
    assert refused.value.reason == "BAD_FILE"
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.fixture
def ask(here: Any, host: Any, tmp_path: Path) -> Any:
    host.coordinator = cluster = SigningCluster(tmp_path)

    def run(*arguments: str) -> Any:
        return here("operator", *arguments, "--operator", str(cluster.bundle)), cluster

    return run


def test_a_new_bundle_says_where_it_is_and_what_it_may(ask: Any, tmp_path: Path) -> None:
    out = tmp_path / "a" / "alice"
    done, cluster = ask("add", "alice", "--role", "read", "--out", str(out))
    assert (done.status, done.out) == (0, f"{out}\n"), done.err
    assert done.err == f"operator alice may read for 30d; use the bundle with --operator {out}\n"
    assert cluster.asked == [
        ("AddOperator", {"name": "alice", "role": "OPERATOR_ROLE_READ", "ttl_seconds": 30 * 86400})
    ]
    state = load_machine_state(out)
    assert (state.peer, state.coordinator) == (PeerIdentity("demo", Role.OPERATOR, "alice"), "coordinator:1")
    assert (state.root_sha256, state.name) == (cluster.authority.root.fingerprint, "alice")
    again, cluster = ask("rotate", "alice", "--out", str(out))
    assert (again.status, "[BUNDLE_EXISTS]" in again.err, len(cluster.asked)) == (4, True, 1)
    newer = tmp_path / "newer"
    done, cluster = ask("rotate", "alice", "--out", str(newer), "--lifetime", "1d", "--json")
    assert done.data == {"name": "alice", "bundle": str(newer)}
    assert done.err == f"operator alice has a new bundle in {newer}\n"
    assert cluster.asked[1:] == [("RotateOperator", {"name": "alice", "ttl_seconds": 86400})]


def test_a_root_that_is_not_the_pinned_one_makes_no_bundle(ask: Any, tmp_path: Path) -> None:
    _, cluster = ask("rotate")
    cluster.authority.root = SigningCluster(tmp_path / "other").authority.root
    out = tmp_path / "alice"
    done, _ = ask("add", "alice", "--role", "read", "--out", str(out))
    assert (done.status, "[ROOT_PIN]" in done.err) == (6, True), done.err
    assert not (out / "member.json").exists()
