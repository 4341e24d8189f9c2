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
from sealring.mesh.system.paths import default_state_root


@pytest.fixture(autouse=True)
def root(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own state folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    return default_state_root()


def pin_of(operator: Path | None = None, named: str | None = None) -> bytes:
    given = {} if operator is None else {"operator": operator}
    origin = {"operator": "flag --operator" if given else "default"}
    return root_pin(named, Loaded(CliSettings(**given), origin))


def test_the_first_machine_and_a_joined_one_know_the_root_key(tmp_path: Path, root: Path) -> None:
    with pytest.raises(ConfigError) as nowhere:
        pin_of()
    assert nowhere.value.reason == "NO_ROOT_HASH"
    first, other = (SigningCluster(tmp_path / name) for name in ("first", "other"))
    other.save(root / "node", Role.MEMBER)
    assert pin_of() == other.authority.root.fingerprint
    first.save(root / "coordinator" / "operator", Role.OPERATOR)
    assert pin_of() == first.authority.root.fingerprint
    assert pin_of(other.bundle) == other.authority.root.fingerprint
    assert pin_of(named="ab" * 32) == bytes.fromhex("ab" * 32)


def test_a_bundle_or_a_hash_that_is_named_is_not_passed_over(tmp_path: Path, root: Path) -> None:
    SigningCluster(tmp_path).save(root / "node", Role.MEMBER)
    with pytest.raises(ConfigError) as missing:
        pin_of(tmp_path / "none")
    assert missing.value.reason == "NO_OPERATOR_BUNDLE"
    with pytest.raises(InvalidInput) as malformed:
        pin_of(named="ab")
    assert malformed.value.reason == "BAD_ROOT_HASH"


def test_a_damaged_enrolment_is_an_error(tmp_path: Path, root: Path) -> None:
    cluster = SigningCluster(tmp_path)
    for name in ("node", "gateway"):
        cluster.save(root / name, Role.MEMBER)
    (root / "node" / "root.dsse").write_bytes(b"")
    with pytest.raises(RosterError) as caught:
        pin_of()
    assert caught.value.reason == "ROOT_CHAIN_LENGTH"
    (root / "node" / "member.json").write_text("{")
    with pytest.raises(ConfigError) as corrupt:
        pin_of()
    assert corrupt.value.reason == "MEMBER_STATE_CORRUPT", "and no other enrolment's root key is taken"
