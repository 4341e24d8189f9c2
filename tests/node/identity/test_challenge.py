"""What a node answers to a challenge, as the coordinator verifies it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from macs_tools import FILEVAULT, Tools

from sealring.mesh.crypto import Label, SoftwareSigner
from sealring.mesh.errors import AttestationError, Unavailable
from sealring.mesh.trust.attestation import Expected, verify_statement
from sealring.node.identity import challenge as module
from sealring.node.identity.attestor import Attestor
from sealring.node.identity.challenge import Prover
from sealring.v1 import membership_pb2

NONCE = b"n" * 32
SEALING_KEY = b"s" * 32
MODEL = b"m" * 32


class Broken(SoftwareSigner):
    def sign(self, label: Label, content: bytes) -> bytes:
        raise Unavailable("the enclave does not answer", reason="ENCLAVE_UNAVAILABLE")


async def models() -> tuple[bytes, ...]:
    return (MODEL,)


@pytest.fixture
def signer() -> SoftwareSigner:
    return SoftwareSigner.generate()


def prover(signer: SoftwareSigner, **options: Any) -> Prover:
    return Prover("demo", signer, SEALING_KEY, models, **options)


def expected(signer: SoftwareSigner) -> Expected:
    return Expected("demo", NONCE, signer.public_key, signer.key_type, SEALING_KEY)


async def test_the_answer_is_measured_anew_and_signed_for_this_challenge(
    signer: SoftwareSigner, tmp_path: Path
) -> None:
    tools = Tools(tmp_path)
    asked = prover(signer, attestor=Attestor(system="darwin", root=tmp_path))
    for filevault in (True, False):
        tools.say(FILEVAULT, f"FileVault is {'On' if filevault else 'Off'}.")
        message = await asked.answer(membership_pb2.Challenge(nonce=NONCE))
        assert message is not None
        said = message.challenge_answer
        verdict = verify_statement(
            said.statement, said.signature, expected(signer), now=time.time(), label=Label.CHALLENGE
        )
        assert (verdict.statement.posture.filevault, verdict.statement.models) == (filevault, (MODEL,))
        with pytest.raises(AttestationError):
            verify_statement(said.statement, said.signature, expected(signer), now=time.time())


async def test_the_manifest_is_the_one_that_it_joined_with(signer: SoftwareSigner) -> None:
    message = await prover(signer).answer(membership_pb2.Challenge(nonce=NONCE))
    assert message is not None
    said = message.challenge_answer
    verdict = verify_statement(
        said.statement, said.signature, expected(signer), now=time.time(), label=Label.CHALLENGE
    )
    assert verdict.statement.manifest_hash == module.manifest_hash()


@pytest.mark.parametrize("nonce", [b"", b"n" * 31, b"n" * 33])
async def test_a_nonce_of_another_length_is_not_signed(signer: SoftwareSigner, nonce: bytes) -> None:
    assert await prover(signer).answer(membership_pb2.Challenge(nonce=nonce)) is None


async def test_a_key_that_cannot_sign_is_silence() -> None:
    assert await prover(Broken.generate()).answer(membership_pb2.Challenge(nonce=NONCE)) is None
