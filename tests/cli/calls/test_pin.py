"""The root key of a command's cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from bundles import SigningCluster

from sealring.cli.calls.pin import root_pin
from sealring.cli.settings import CliSettings
from sealring.mesh.errors import ConfigError, InvalidInput, RosterError
from sealring.mesh.pki import Role
from sealring.mesh.settings.config import Loaded


def pin_of(root: Path, operator: Path | None = None, named: str | None = None) -> bytes:
    given = {} if operator is None else {"operator": operator}
    origin = {"operator": "flag --operator" if given else "default"}
    return root_pin(named, Loaded(CliSettings(**given), origin), root)


def test_the_first_machine_and_a_joined_one_know_the_root_key(tmp_path: Path) -> None:
    root = tmp_path / "state"
    with pytest.raises(ConfigError) as nowhere:
        pin_of(root)
    assert nowhere.value.reason == "NO_ROOT_HASH"
    first, other = (SigningCluster(tmp_path / name) for name in ("first", "other"))
    other.save(root / "node", Role.MEMBER)
    assert pin_of(root) == other.authority.root.fingerprint
    first.save(root / "coordinator" / "operator", Role.OPERATOR)
    assert pin_of(root) == first.authority.root.fingerprint
    assert pin_of(root, other.bundle) == other.authority.root.fingerprint
    assert pin_of(root, named="ab" * 32) == bytes.fromhex("ab" * 32)


def test_a_bundle_or_a_hash_that_is_named_is_not_passed_over(tmp_path: Path) -> None:
    SigningCluster(tmp_path).save(tmp_path / "node", Role.MEMBER)
    with pytest.raises(ConfigError) as missing:
        pin_of(tmp_path, tmp_path / "none")
    assert missing.value.reason == "NO_OPERATOR_BUNDLE"
    with pytest.raises(InvalidInput) as malformed:
        pin_of(tmp_path, named="ab")
    assert malformed.value.reason == "BAD_ROOT_HASH"


def test_a_damaged_enrolment_is_an_error(tmp_path: Path) -> None:
    cluster = SigningCluster(tmp_path)
    for name in ("node", "gateway"):
        cluster.save(tmp_path / name, Role.MEMBER)
    (tmp_path / "node" / "root.dsse").write_bytes(b"")
    with pytest.raises(RosterError) as caught:
        pin_of(tmp_path)
    assert caught.value.reason == "ROOT_CHAIN_LENGTH"
    (tmp_path / "node" / "member.json").write_text("{")
    with pytest.raises(ConfigError) as corrupt:
        pin_of(tmp_path)
    assert corrupt.value.reason == "MEMBER_STATE_CORRUPT", "and no other enrolment's root key is taken"
