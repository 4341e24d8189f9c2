"""The proofs that streams begin with: what is signed, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.crypto import Ed25519Signer, Label, SoftwareSigner, member_id
from sealring.mesh.errors import FailedPrecondition, Unauthenticated
from sealring.mesh.member import (
    CalledProof,
    CallerProof,
    Connection,
    HeldRoster,
    Purpose,
    by_identity,
    by_roster_keys,
    check_proof,
    of_coordinator,
    of_identity,
)
from sealring.mesh.rpc import own_release
from sealring.v1 import proof_pb2

GATEWAY, MEMBER = SoftwareSigner.generate(), SoftwareSigner.generate()
HELD = HeldRoster(7, b"\x07" * 32)
CONNECTION = Connection(
    Purpose.SCHEDULE, "demo", member_id(GATEWAY.public_key), member_id(MEMBER.public_key), b"\x01" * 32
)


async def run(
    caller: Connection = CONNECTION,
    called: Connection = CONNECTION,
    *,
    caller_key: Any = GATEWAY,
    called_key: Any = MEMBER,
    caller_holds: HeldRoster = HELD,
    called_holds: HeldRoster = HELD,
) -> tuple[CallerProof, CalledProof, proof_pb2.ProofAnswer, proof_pb2.ProofFinish]:
    """Both ends as they see the connection, each with what it signs with; each checks the other."""
    first = CallerProof(caller, caller_holds)
    second = CalledProof(called, first.offer, called_holds)
    answer = await second.answer(by_identity(called_key))
    first.check(answer, of_identity(MEMBER.public_key))
    finish = await first.finish(by_identity(caller_key))
    second.check(finish, of_identity(GATEWAY.public_key))
    return first, second, answer, finish


def refused(error: Any) -> str:
    assert isinstance(error.value, Unauthenticated)
    assert "signature" not in error.value.message
    return error.value.reason


async def test_both_ends_believe_each_other() -> None:
    _, _, answer, _ = await run()
    assert answer.root_version == 0
    await run(caller_holds=HeldRoster(8, b"\x08" * 32))
    await run(called_holds=HeldRoster())


@pytest.mark.parametrize(
    "changes",
    [
        {"purpose": Purpose.SESSION},
        {"purpose": Purpose.WATCH},
        {"cluster": "other"},
        {"caller": member_id(MEMBER.public_key)},
        {"called": member_id(GATEWAY.public_key)},
        {"called": ""},
        {"caller_key": b"\x02" * 32},
    ],
    ids=["session", "watch", "cluster", "caller", "called", "coordinator", "tls key"],
)
@pytest.mark.parametrize("whose", ["caller", "called"])
async def test_ends_of_different_connections_refuse(changes: dict[str, Any], whose: str) -> None:
    """Connections with another role, cluster or peer, and above all with another TLS key of the caller."""
    other = dataclasses.replace(CONNECTION, **changes)
    with pytest.raises(Unauthenticated) as error:
        await run(**{whose: other})
    assert refused(error) == "BAD_PROOF"


async def test_a_proof_is_good_on_its_connection_only() -> None:
    """Two connections between the same two, at the same time: nothing of one holds on the other."""
    _, _, answer, finish = await run()
    with pytest.raises(Unauthenticated) as error:
        CallerProof(CONNECTION, HELD).check(answer, of_identity(MEMBER.public_key))
    assert refused(error) == "BAD_PROOF"
    later = CalledProof(CONNECTION, CallerProof(CONNECTION, HELD).offer, HELD)
    with pytest.raises(Unauthenticated) as error:
        later.check(finish, of_identity(GATEWAY.public_key))
    assert refused(error) == "BAD_PROOF"


async def test_the_same_offer_again_gets_another_answer() -> None:
    """A replayed offer does not make the rest of its stream valid again."""
    first, _, _, finish = await run()
    again = CalledProof(CONNECTION, first.offer, HELD)
    with pytest.raises(Unauthenticated) as error:
        again.check(finish, of_identity(GATEWAY.public_key))
    assert refused(error) == "BAD_PROOF"


@pytest.mark.parametrize("whose", ["caller_key", "called_key"])
async def test_without_the_identity_key_there_is_no_proof(whose: str) -> None:
    with pytest.raises(Unauthenticated) as error:
        await run(**{whose: SoftwareSigner.generate()})
    assert refused(error) == "BAD_PROOF"


async def test_what_one_end_has_said_is_not_the_others_proof() -> None:
    """Reflection: a gateway that is its own member's key, and a proof sent back."""
    twin = dataclasses.replace(CONNECTION, called=CONNECTION.caller)
    first = CallerProof(twin, HELD)
    second = CalledProof(twin, first.offer, HELD)
    answer = await second.answer(by_identity(GATEWAY))
    with pytest.raises(Unauthenticated) as error:
        second.check(proof_pb2.ProofFinish(proof=answer.proof), of_identity(GATEWAY.public_key))
    assert refused(error) == "BAD_PROOF"


@pytest.mark.parametrize(
    "change",
    [
        {"roster_version": 8},
        {"roster_version": 8, "roster_hash": b"\x08" * 32},
        {"release": proof_pb2.Release(software="other")},
    ],
    ids=str,
)
async def test_the_roster_and_the_release_that_were_told_are_those_that_are_signed(
    change: dict[str, Any],
) -> None:
    first = CallerProof(CONNECTION, HELD)
    answer = await CalledProof(CONNECTION, first.offer, HELD).answer(by_identity(MEMBER))
    answer.MergeFrom(proof_pb2.ProofAnswer(**change))
    with pytest.raises(Unauthenticated) as error:
        first.check(answer, of_identity(MEMBER.public_key))
    assert refused(error) == "BAD_PROOF"


async def test_two_rosters_of_one_version_are_refused_before_anything_is_signed() -> None:
    other = HeldRoster(HELD.version, b"\x09" * 32)
    with pytest.raises(FailedPrecondition) as error:
        CalledProof(CONNECTION, CallerProof(CONNECTION, other).offer, HELD)
    assert error.value.reason == "ROSTER_EQUIVOCATION"
    first = CallerProof(CONNECTION, HELD)
    answer = proof_pb2.ProofAnswer(
        nonce=bytes(32), roster_version=7, roster_hash=other.hash, release=own_release()
    )
    with pytest.raises(FailedPrecondition) as error:
        first.check(answer, of_identity(MEMBER.public_key))
    assert error.value.reason == "ROSTER_EQUIVOCATION"


async def test_the_coordinator_is_told_of_two_rosters_of_one_version() -> None:
    """A refusal here would keep what the session is there to report from its audit log."""
    session = dataclasses.replace(CONNECTION, purpose=Purpose.SESSION)
    await run(session, session, caller_holds=HeldRoster(HELD.version, b"\x09" * 32))


@pytest.mark.parametrize(
    "offer",
    [
        {},
        {"nonce": bytes(31)},
        {"nonce": bytes(33)},
        {"nonce": bytes(32), "roster_version": 1},
        {"nonce": bytes(32), "roster_version": 1, "roster_hash": bytes(31)},
        {"nonce": bytes(32), "roster_hash": bytes(32)},
    ],
    ids=str,
)
async def test_malformed_openings_are_no_proofs(offer: dict[str, Any]) -> None:
    offer["release"] = own_release()
    with pytest.raises(Unauthenticated) as error:
        CalledProof(CONNECTION, proof_pb2.ProofOffer(**offer), HELD)
    assert refused(error) == "NO_PROOF"
    with pytest.raises(Unauthenticated) as error:
        CallerProof(CONNECTION, HELD).check(proof_pb2.ProofAnswer(**offer), of_identity(MEMBER.public_key))
    assert refused(error) == "NO_PROOF"


async def test_ends_of_different_releases_refuse_before_they_look_at_anything_else() -> None:
    """An older release, which may have other nonces, and a newer: the error names the machine to update."""
    caller, called = f"gateway {CONNECTION.caller}", f"node {CONNECTION.called}"
    old = proof_pb2.ProofOffer(nonce=bytes(16), release=proof_pb2.Release(software="0.0.1"))
    with pytest.raises(FailedPrecondition) as error:
        CalledProof(CONNECTION, old, HELD)
    assert error.value.reason == "INCOMPATIBLE_VERSION"
    assert f"{caller} runs sealring 0.0.1 (protocol 0) and {called} runs" in error.value.message
    assert error.value.hint.startswith(f"update {caller};")
    first = CallerProof(CONNECTION, HELD)
    answer = await CalledProof(CONNECTION, first.offer, HELD).answer(by_identity(MEMBER))
    answer.release.protocol += 1
    answer.release.oldest = answer.release.protocol
    with pytest.raises(FailedPrecondition) as error:
        first.check(answer, of_identity(MEMBER.public_key))
    assert error.value.reason == "INCOMPATIBLE_VERSION"
    assert error.value.hint.startswith(f"update {caller};")


async def test_a_caller_signs_nothing_for_who_has_not_proved_himself() -> None:
    first = CallerProof(CONNECTION, HELD)
    signed: list[bytes] = []
    with pytest.raises(Unauthenticated) as error:
        await first.finish(lambda content: signed.append(content) or b"")  # type: ignore[func-returns-value]
    assert refused(error) == "NO_PROOF"
    second = CalledProof(CONNECTION, first.offer, HELD)
    answer = await second.answer(by_identity(SoftwareSigner.generate()))
    with pytest.raises(Unauthenticated):
        first.check(answer, of_identity(MEMBER.public_key))
    with pytest.raises(Unauthenticated) as error:
        await first.finish(lambda content: signed.append(content) or b"")  # type: ignore[func-returns-value]
    assert refused(error) == "NO_PROOF"
    assert signed == []


@given(proof=st.binary(max_size=400))
def test_garbage_is_a_bad_proof(proof: bytes) -> None:
    with pytest.raises(Unauthenticated) as error:
        check_proof(b"content", proof, of_identity(MEMBER.public_key))
    assert refused(error) == "BAD_PROOF"


def test_a_huge_proof_is_not_looked_at() -> None:
    with pytest.raises(Unauthenticated) as error:
        check_proof(b"content", bytes(1 << 20), lambda content, proof: pytest.fail("it was"))
    assert refused(error) == "BAD_PROOF"
    looked: list[int] = []
    check_proof(b"content", bytes(16 << 10), lambda content, proof: looked.append(len(proof)))
    with pytest.raises(Unauthenticated):
        check_proof(b"content", bytes((16 << 10) + 1), lambda content, proof: looked.append(len(proof)))
    assert looked == [16 << 10]


async def test_the_coordinators_proof_takes_a_threshold_of_roster_keys(make_authority: Any) -> None:
    authority = make_authority(rosters=3, roster_threshold=2)
    keys = authority.roster_signers
    content = b"what both know"
    verify = of_coordinator(authority.root)
    check_proof(content, by_roster_keys(keys)(content), verify)
    check_proof(content, by_roster_keys(keys[:2])(content), verify)
    check_proof(bytes(2048), by_roster_keys(keys)(bytes(2048)), verify)
    strangers = [Ed25519Signer.generate() for _ in range(2)]
    for signers, said, label in (
        (keys[:1], content, Label.CONNECTION),
        (strangers, content, Label.CONNECTION),
        (authority.root_signers, content, Label.CONNECTION),
        (keys, b"something else", Label.CONNECTION),
        (keys, content, Label.RENEWAL),
    ):
        with pytest.raises(Unauthenticated) as error:
            check_proof(content, by_roster_keys(signers, label)(said), verify)
        assert refused(error) == "BAD_PROOF"
    with pytest.raises(Unauthenticated):
        check_proof(bytes(2049), by_roster_keys(keys)(bytes(2049)), verify)
