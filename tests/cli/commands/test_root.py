"""Root keys kept offline: made, rotated, and what they sign shown."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sealring.coordinator.init import init
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.settings import CoordinatorSettings
from sealring.mesh.crypto import Ed25519Signer, key_id
from sealring.mesh.pki import decode_chain, encode_chain, expires_at, verify_root_chain
from sealring.testing import PaperCluster
from sealring.testing.authority import Authority

Sealring = Callable[..., Any]


@pytest.fixture
def paper(home: Path) -> PaperCluster:
    root = Ed25519Signer.create(home / "root.key")
    made = PaperCluster(authority=Authority.create("paper", now=time.time(), root_signers=[root]))
    (home / "root.dsse").write_bytes(made.root_chain)
    return made


class Offline:
    """Root key holders with the command line."""

    def __init__(self, here: Sealring, home: Path, paper: PaperCluster) -> None:
        self.here, self.home, self.paper = here, home, paper
        self.keys = [here("root", "init", "--key", f"{name}.key").out.strip() for name in ("a", "b")]

    def rotate(self, *more: str) -> None:
        keys = [part for key in self.keys for part in ("--root-key", key)]
        done = self.here("root", "rotate", "root.dsse", "--out", "draft", *keys, "--threshold", "2", *more)
        assert done.status == 0, done.err

    def sign(self, *names: str) -> None:
        for name in names:
            done = self.here("root", "sign", "draft", "--key", f"{name}.key")
            assert done.status == 0, done.err

    def install(self) -> Any:
        return self.here("root", "install", "draft", "root.dsse")


@pytest.fixture
def offline(here: Sealring, home: Path, paper: PaperCluster) -> Offline:
    return Offline(here, home, paper)


def test_a_root_is_rotated_to_offline_keys(offline: Offline) -> None:
    assert ((offline.home / "a.key").stat().st_mode & 0o777) == 0o600
    offline.rotate()
    shown = offline.here("root", "show", "draft", "--json").data
    assert (shown["version"], shown["state"], shown["signed_by"]) == (2, "draft, not verified", [])
    offline.sign("root", "a", "b")
    assert offline.install().status == 0
    chain = decode_chain((offline.home / "root.dsse").read_bytes())
    found = verify_root_chain(chain, bytes.fromhex(offline.paper.pin), now=time.time())
    assert (found.version, found.root_threshold) == (2, 2)
    assert {key.hex() for key in found.root_keys} == set(offline.keys)
    shown = offline.here("root", "show", "root.dsse", "--json").data
    assert (shown["state"], shown["version"], len(shown["signed_by"])) == ("valid chain", 2, 3)
    assert "version 2" in offline.here("root", "show", "root.dsse").out


def test_the_next_root_of_a_coordinator_has_a_longer_life_for_its_authority(
    here: Sealring, home: Path
) -> None:
    settings = CoordinatorSettings(state_dir=home / "made", cluster="demo")
    made = time.time() - 8 * 365 * 86_400
    init(settings, clock=lambda: made)
    first = ClusterKeys.load(settings, now=time.time())
    assert here("root", "rotate", "made/root.dsse", "--out", "draft").status == 0
    assert here("root", "sign", "draft", "--key", "made/root.key").status == 0
    assert here("root", "install", "draft", "made/root.dsse").status == 0
    second = ClusterKeys.load(settings, now=time.time())
    assert (second.root.version, second.pin) == (2, first.pin)
    assert expires_at(second.ca.certificate) - expires_at(first.ca.certificate) > 7 * 365 * 86_400
    assert second.root.ends == pytest.approx(time.time() + 3650 * 86_400, abs=3600)


@pytest.mark.parametrize("signers", [(), ("root",), ("root", "a"), ("a", "b")])
def test_old_and_new_keys_both_have_to_sign(offline: Offline, signers: tuple[str, ...]) -> None:
    offline.rotate()
    offline.sign(*signers)
    before = (offline.home / "root.dsse").read_bytes()
    done = offline.install()
    assert done.status != 0
    assert "THRESHOLD_NOT_MET" in done.err or "ENVELOPE_MALFORMED" in done.err
    assert (offline.home / "root.dsse").read_bytes() == before


def test_a_stranger_cannot_rotate(offline: Offline) -> None:
    stranger = Ed25519Signer.create(offline.home / "stranger.key")
    offline.rotate()
    offline.sign("stranger", "a", "b")
    assert key_id(stranger.public_key) in offline.here("root", "show", "draft", "--json").data["signed_by"]
    assert "THRESHOLD_NOT_MET" in offline.install().err


@pytest.mark.parametrize("content", [b"", b"junk", b"\x00\x00\x00\x05ab", encode_chain([b"x"])])
def test_files_that_are_no_chain_are_refused(here: Sealring, home: Path, content: bytes) -> None:
    (home / "file").write_bytes(content)
    for arguments in (("show", "file"), ("rotate", "file", "--out", "draft"), ("install", "file", "file")):
        done = here("root", *arguments)
        assert done.status not in (0, 70), done.err
        assert "Traceback" not in done.err
    assert not (home / "draft").exists()


def test_a_key_is_never_overwritten_and_has_to_be_one(here: Sealring, offline: Offline) -> None:
    assert "KEY_EXISTS" in here("root", "init", "--key", "a.key").err
    done = here("root", "rotate", "root.dsse", "--out", "draft", "--root-key", "abc")
    assert "BAD_KEY" in done.err


def coordinator(here: Sealring, verb: str, *more: str) -> Any:
    named = ("--cluster", "attic") if verb in ("init", "prepare") else ()
    return here("coordinator", verb, "--state-dir", "c", *named, *more)


def test_a_cluster_is_begun_under_offline_root_keys(here: Sealring, home: Path) -> None:
    """Two holders of three, two roster keys: prepare, look, sign, complete."""
    holders = [here("root", "init", "--key", f"{name}.key").out.strip() for name in "abc"]
    keys = [part for key in holders for part in ("--root-key", key)]
    rosters = ("--roster-key-files", "second.key")
    thresholds = ("--root-threshold", "2", "--roster-threshold", "2")
    done = coordinator(here, "prepare", *keys, *thresholds, *rosters, "--out", "draft")
    assert done.status == 0, done.err
    assert done.out.strip() == hashlib.sha256((home / "draft").read_bytes()).hexdigest()
    shown = here("root", "show", "draft", "--json").data
    assert (shown["root_threshold"], shown["roster_threshold"], len(shown["roster_keys"])) == (2, 2, 2)
    (authority,) = shown["authorities_sha256"]
    assert authority in here("root", "show", "draft").out
    complete = ("init", "--root-metadata", "draft", *rosters)
    assert here("root", "sign", "draft", "--key", "a.key").status == 0
    assert "THRESHOLD_NOT_MET" in coordinator(here, *complete).err
    assert here("root", "sign", "draft", "--key", "c.key").status == 0
    done = coordinator(here, *complete, "--json")
    assert done.status == 0, done.err
    assert not (home / "c" / "root.key").exists()
    found = here("root", "show", "c/root.dsse", "--json").data
    assert (found["state"], found["root_keys"], found["cluster"]) == ("valid chain", holders, "attic")
    again = coordinator(here, *complete)
    assert "NOT_PREPARED" in again.err
    assert coordinator(here, "new-operator", *rosters).status == 0
    assert "TOO_FEW_ROSTER_KEYS" in coordinator(here, "new-operator").err


def test_the_roster_threshold_is_raised_by_rotation(offline: Offline) -> None:
    second = offline.here("root", "roster-key", "--key", "second.key").out.strip()
    known = offline.here("root", "show", "root.dsse", "--json").data["roster_keys"]
    keys = [part for key in (*known, second) for part in ("--roster-key", key)]
    offline.rotate(*keys, "--roster-threshold", "2")
    offline.sign("root", "a", "b")
    assert offline.install().status == 0
    shown = offline.here("root", "show", "root.dsse", "--json").data
    assert (shown["roster_threshold"], shown["roster_keys"]) == (2, [*known, second])
    done = offline.here("root", "rotate", "root.dsse", "--out", "next", "--roster-key", second)
    assert "ROOT_MALFORMED" in done.err, "a threshold stays what it was unless it is named"


def test_files_of_no_end_are_not_read(here: Sealring, home: Path) -> None:
    for size, reason in ((128 << 10, "ENVELOPE_TOO_LARGE"), ((128 << 10) + 1, "FILE_TOO_LARGE")):
        (home / "file").write_bytes(bytes(size))
        assert f"[{reason}]" in here("root", "show", "file").err
