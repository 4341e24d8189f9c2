"""Answers the coordinator's challenges: measures the machine anew and signs what it finds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.crypto.identity import Signer
from sealring.mesh.crypto.keys import KeyType, Label
from sealring.mesh.errors import SealringError
from sealring.mesh.trust.attestation import NONCE_BYTES, Statement, sign_sealing_key, sign_statement
from sealring.node.identity.attestor import Attestor
from sealring.node.identity.manifest import manifest_hash
from sealring.v1 import membership_pb2

log = structlog.get_logger()


class Prover:
    """Proves this node's identity, posture and software. `models` returns the digests of the models it
    serves.

    With `serial` the answer includes the machine's serial number, which a device attestation confirms.
    """

    def __init__(
        self,
        cluster: str,
        signer: Signer,
        sealing_key: bytes,
        models: Callable[[], Awaitable[tuple[bytes, ...]]],
        *,
        serial: bool = False,
        attestor: Attestor | None = None,
        clock: Clock = wall_clock,
    ) -> None:
        self._serial = serial
        self._attestor = attestor or Attestor()
        self._cluster = cluster
        self._signer = signer
        self._sealing_key = sealing_key
        self._models = models
        self._clock = clock

    def sealing_key(self) -> tuple[bytes, bytes]:
        """The public key that clients seal prompts to, and its signature. Raises as `Signer.sign`."""
        return self._sealing_key, sign_sealing_key(self._signer, self._cluster, self._sealing_key)

    async def answer(self, challenge: membership_pb2.Challenge) -> membership_pb2.MemberMessage | None:
        """The answer, or None without one. The coordinator counts silence as a failure."""
        if len(challenge.nonce) != NONCE_BYTES:
            log.warning("challenge_refused", reason="BAD_NONCE")
            return None
        try:
            posture, manifest = await asyncio.gather(
                asyncio.to_thread(self._attestor.measure, serial=self._serial),
                asyncio.to_thread(manifest_hash),
            )
            statement = Statement(
                cluster=self._cluster,
                nonce=challenge.nonce,
                timestamp=int(self._clock()),
                identity_key=self._signer.public_key,
                key_type=KeyType(self._signer.key_type),
                sealing_key=self._sealing_key,
                manifest_hash=manifest,
                posture=posture,
                models=await self._models(),
            )
            data, signature = await asyncio.to_thread(
                sign_statement, self._signer, statement, Label.CHALLENGE
            )
        except SealringError as error:
            log.error("challenge_not_answered", reason=error.reason)
            return None
        answer = membership_pb2.ChallengeAnswer(statement=data, signature=signature)
        return membership_pb2.MemberMessage(challenge_answer=answer)
