"""An enrolment on disk: whole, private, and found again after a crash at any write."""

from __future__ import annotations

import dataclasses
import json
import os
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from refusals import refused

from sealring.mesh.errors import AlreadyExists, ConfigError, RosterError, SealringError
from sealring.mesh.member import (
    MachineState,
    check_may_join,
    forget_enrolment,
    load_machine_state,
    parse_pem_leaf,
    save_machine_state,
    save_tls,
)
from sealring.mesh.member import state as memberstate
from sealring.mesh.pki import LeafKey, PeerIdentity, Role, TlsMaterial, sign_root, to_pem
from sealring.mesh.system.paths import is_enrolled

if TYPE_CHECKING:
    from sealring.testing.authority import Authority

NOW = 1_800_000_000
PEER = PeerIdentity("demo", Role.MEMBER, "m" * 52)


def material(authority: Authority) -> TlsMaterial:
    leaf = LeafKey()
    certificate = authority.ca.issue(leaf.csr(), PEER, lifetime=3600, now=NOW)
    return TlsMaterial(leaf.private_pem(), certificate, authority.root.authorities)


@pytest.fixture
def state(authority: Authority) -> MachineState:
    root = authority.root
    pin, tls = root.fingerprint, material(authority)
    return MachineState(PEER, "alpha", "127.0.0.1:7700", pin, root, tls, "127.0.0.1:7701")


def test_what_is_saved_comes_back_and_is_private(state: MachineState, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    assert not is_enrolled(folder)
    save_machine_state(folder, state)
    assert load_machine_state(folder) == state
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_root_metadata_that_has_expired_is_loaded_so_that_newer_can_be_fetched(
    state: MachineState, authority: Authority, tmp_path: Path
) -> None:
    draft = dataclasses.replace(authority.root, issued=1, expires=2, chain=())
    old = sign_root(draft, authority.root_signers)
    save_machine_state(tmp_path, dataclasses.replace(state, root=old))
    assert load_machine_state(tmp_path).root == old


def test_an_enrolment_of_an_older_release_has_no_join_address(state: MachineState, tmp_path: Path) -> None:
    save_machine_state(tmp_path, state)
    described = json.loads((tmp_path / "member.json").read_text())
    del described["join"]
    (tmp_path / "member.json").write_text(json.dumps(described))
    assert load_machine_state(tmp_path) == dataclasses.replace(state, join="")


@pytest.mark.parametrize("under_way", [False, True], ids=["all of it", "the rename"])
def test_a_pair_that_is_replaced_while_it_is_read_is_the_new_one(
    state: MachineState,
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    under_way: bool,
) -> None:
    folder, new = tmp_path / "state", material(authority)
    save_machine_state(folder, state)
    if under_way:
        memberstate.write_atomic(folder / "tls.key.next", new.private_key)
        (folder / "tls.pem").write_bytes(to_pem(new.certificate))
    read, replaced = memberstate.read_secret, False

    def reading(path: Path) -> bytes:
        nonlocal replaced
        if path.name.startswith("tls.key") and not replaced:
            replaced = True
            if under_way:
                os.replace(folder / "tls.key.next", folder / "tls.key")
            else:
                save_tls(folder, new)
        return read(path)

    monkeypatch.setattr(memberstate, "read_secret", reading)
    assert load_machine_state(folder).tls == new
    assert replaced


@pytest.mark.parametrize("blocked", ["tls.key.next", "tls.pem", "tls.key"])
def test_a_rotated_pair_is_found_after_a_failure_at_any_write(
    state: MachineState, authority: Authority, tmp_path: Path, blocked: str
) -> None:
    """A folder in the place of a file keeps it from being replaced."""
    new = material(authority)
    save_machine_state(tmp_path, state)
    aside = tmp_path / "aside"
    if (tmp_path / blocked).exists():
        (tmp_path / blocked).rename(aside)
    (tmp_path / blocked).mkdir()
    with pytest.raises(OSError):
        save_tls(tmp_path, new)
    (tmp_path / blocked).rmdir()
    if aside.exists():
        aside.rename(tmp_path / blocked)
    assert load_machine_state(tmp_path).tls == (new if blocked == "tls.key" else state.tls)
    save_tls(tmp_path, new)
    assert load_machine_state(tmp_path).tls == new


def test_a_half_written_enrolment_is_none(state: MachineState, tmp_path: Path) -> None:
    save_machine_state(tmp_path, state)
    (tmp_path / "tls.pem").unlink()
    (tmp_path / "tls.pem").mkdir()
    with pytest.raises(OSError):
        save_machine_state(tmp_path, state)
    assert not is_enrolled(tmp_path)


@pytest.mark.parametrize("name", ["tls.key", "tls.pem", "root.dsse", "member.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "noise", "another"])
def test_a_damaged_enrolment_is_refused(
    state: MachineState, authority: Authority, tmp_path: Path, name: str, damage: str
) -> None:
    save_machine_state(tmp_path, state)
    path = tmp_path / name
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        damaged = {
            "cut": data[: len(data) // 2],
            "noise": b"noise",
            "another": material(authority).private_key,
        }
        path.write_bytes(damaged[damage])
        path.chmod(0o600)
    with pytest.raises(SealringError) as caught:
        load_machine_state(tmp_path)
    assert caught.value.reason in ("MEMBER_STATE_CORRUPT", "NOT_ENROLLED")


def test_a_root_that_is_not_the_pinned_one_is_refused(
    state: MachineState, make_authority: Callable[[], Authority], tmp_path: Path
) -> None:
    save_machine_state(tmp_path, state)
    memberstate.save_root(tmp_path, make_authority().root)
    with refused("ROOT_PIN", RosterError):
        load_machine_state(tmp_path)


def test_a_key_that_others_can_read_is_refused(state: MachineState, tmp_path: Path) -> None:
    save_machine_state(tmp_path, state)
    (tmp_path / "tls.key").chmod(0o644)
    with refused("SECRET_FILE_UNSAFE", ConfigError):
        load_machine_state(tmp_path)


def test_a_chain_is_bounded_and_of_a_version_that_is_known(authority: Authority) -> None:
    """Even where it begins with a good certificate."""
    der = material(authority).certificate
    pem = to_pem(der)
    assert parse_pem_leaf(pem + b"\n" * ((1 << 17) - len(pem))) == der
    assert parse_pem_leaf(pem + to_pem(authority.ca.certificate)) == der, "the first"
    odd = bytearray(der)
    odd[odd.index(b"\xa0\x03\x02\x01\x02") + 4] = 3
    for chain in (
        b"",
        b"no pem",
        pem + b"\n" * ((1 << 17) + 1 - len(pem)),
        ssl.DER_cert_to_PEM_cert(bytes(odd)).encode(),
    ):
        with pytest.raises(ValueError):
            parse_pem_leaf(chain)


@pytest.mark.parametrize(
    "changes",
    [
        {"extra": 1},
        {"cluster": "Not A Name"},
        {"role": "root"},
        {"member_id": ""},
        {"name": ""},
        {"coordinator": "nowhere"},
        {"coordinator": ""},
        {"coordinator": f"{'h' * 299}:1"},
        {"join": "nowhere"},
        {"join": f"{'h' * 299}:1"},
        {"root_sha256": "00" * 31},
        {"root_sha256": "00" * 33},
        {"root_sha256": "zz" * 32},
    ],
    ids=str,
)
def test_a_description_that_is_none_is_refused(
    state: MachineState, tmp_path: Path, changes: dict[str, Any]
) -> None:
    save_machine_state(tmp_path, state)
    path = tmp_path / "member.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError) as caught:
        load_machine_state(tmp_path)
    assert caught.value.reason == "MEMBER_STATE_CORRUPT"
    assert "leave" in caught.value.hint


@pytest.mark.parametrize("name", ["root.dsse", "tls.pem", "tls.key", "member.json"])
def test_no_file_of_any_size_is_read(state: MachineState, tmp_path: Path, name: str) -> None:
    save_machine_state(tmp_path, state)
    with (tmp_path / name).open("ab") as file:
        file.write(b"\n" * (1 << 20))
    with pytest.raises(ConfigError) as caught:
        load_machine_state(tmp_path)
    secret = name in ("tls.key", "member.json")
    assert caught.value.reason == ("SECRET_FILE_UNSAFE" if secret else "MEMBER_STATE_CORRUPT")


def test_an_open_folder_is_closed(state: MachineState, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    save_machine_state(tmp_path, state)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    save_machine_state(tmp_path / "of" / "another", state)


def test_only_the_same_cluster_may_be_joined_anew(state: MachineState, tmp_path: Path) -> None:
    other = bytes(32)
    check_may_join(tmp_path, other)
    save_machine_state(tmp_path, state)
    check_may_join(tmp_path, state.root_sha256)
    for damaged in (False, True):
        if damaged:
            (tmp_path / "member.json").write_text("{}")
        for pin in [other, *([state.root_sha256] if damaged else [])]:
            with pytest.raises(AlreadyExists) as caught:
                check_may_join(tmp_path, pin)
            assert caught.value.reason == "ALREADY_ENROLLED"
            assert str(tmp_path) in caught.value.message


def test_what_is_forgotten_is_all_but_the_identity(state: MachineState, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    save_machine_state(folder, state)
    for name in ("identity.key", "roster.dsse", "roster-state.json", "tls.key.next"):
        (folder / name).touch()
    for _ in range(2):
        forget_enrolment(folder)
        assert [path.name for path in folder.iterdir()] == ["identity.key"]
