"""Which root is pinned, and what is believed after it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from sealring.client import trust
from sealring.client.trust import RosterVerifier, default_state_file, parse_root_sha256
from sealring.mesh.crypto import encode_base32
from sealring.mesh.errors import InvalidInput, RosterError, SealringError
from sealring.mesh.pki import decode_chain
from sealring.testing import PaperCluster
from sealring.v1 import inference_pb2 as inference

PIN = bytes(range(32))


@pytest.mark.parametrize("value", [PIN, PIN.hex(), PIN.hex().upper(), encode_base32(PIN)])
def test_a_root_is_pinned_in_any_of_three_forms(value: str | bytes) -> None:
    assert parse_root_sha256(value) == PIN


@pytest.mark.parametrize(
    "value",
    [
        b"",
        PIN[:-1],
        PIN + b"x",
        PIN.hex()[:-1],
        PIN.hex() + "0",
        "g" * 64,
        encode_base32(PIN)[:-1],
        "",
        "00 " * 21 + "0",
    ],
)
def test_anything_else_is_refused(value: str | bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_root_sha256(value)
    assert (caught.value.reason, caught.value.metadata["param"]) == ("BAD_ROOT_HASH", "root_sha256")


def served(cluster: PaperCluster) -> inference.GetRosterResponse:
    return inference.GetRosterResponse(roster=cluster.envelope, root_metadata=cluster.root_chain)


def test_what_was_verified_is_not_verified_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = PaperCluster(clock=lambda: 1_800_000_000)
    chains: list[object] = []
    verify = trust.verify_root_chain

    def noting(*args: object, **more: object) -> object:
        chains.append(args)
        return verify(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(trust, "verify_root_chain", noting)
    file = tmp_path / "made" / "roster-state.json"
    verifier = RosterVerifier(cluster.root.fingerprint, file, clock=lambda: 1_800_000_000)
    with pytest.raises(SealringError):
        verifier.verify(inference.GetRosterResponse())
    chains.clear()
    first = verifier.verify(served(cluster))
    assert verifier.verify(served(cluster)) is first
    cluster.publish()
    second = verifier.verify(served(cluster))
    assert (first.version, second.version) == (1, 2)
    assert len(chains) == 1
    assert file.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(SealringError):
        verifier.verify(inference.GetRosterResponse(root_metadata=cluster.root_chain))
    assert verifier.verify(served(cluster)).version == 2


def test_a_root_that_is_told_in_other_bytes_is_no_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another coordinator of the cluster may have its signatures in another order."""
    cluster = PaperCluster(clock=lambda: 1_800_000_000)
    verifier = RosterVerifier(cluster.root.fingerprint, None, clock=lambda: 1_800_000_000)
    assert verifier.verify(served(cluster)).hash == cluster.roster.hash
    monkeypatch.setattr(trust, "decode_chain", lambda chain: decode_chain(cluster.root_chain))
    again = inference.GetRosterResponse(roster=cluster.envelope, root_metadata=b"in other bytes")
    assert verifier.verify(again).hash == cluster.roster.hash


def test_a_memory_without_a_file_refuses_an_older_roster_and_is_on_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cluster = PaperCluster(clock=lambda: 1_800_000_000)
    verifier = RosterVerifier(cluster.root.fingerprint, None, clock=lambda: 1_800_000_000)
    old = served(cluster)
    cluster.publish()
    verifier.verify(served(cluster))
    with pytest.raises(RosterError) as caught:
        verifier.verify(old)
    assert caught.value.reason == "ROSTER_ROLLBACK"
    assert not any(tmp_path.rglob("*"))


def test_programs_of_one_user_have_one_memory_of_a_cluster() -> None:
    file = default_state_file(PIN)
    assert file.name == "000102030405060708090a0b0c0d0e0f.roster"
    assert (file.parent.name, default_state_file(PIN[::-1]).parent) == ("client", file.parent)
