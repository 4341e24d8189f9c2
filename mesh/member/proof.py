"""Proof of identity at the start of a control stream: both ends show more than a certificate.

With mTLS alone, a thief of the certificate authority's key could pose as any machine. The first messages of a
stream are therefore an offer (caller), an answer (called) and a proof (caller). Each end signs one transcript
with the key that the signed roster or root metadata names. Neither accepts anything from the other before
this signature has verified.

The key of the *caller's* certificate binds the transcript to this connection: the called end reads it from
the handshake, the caller from its own material. In TLS 1.3 (RFC 8446 section 4.4.3) the caller signs the
whole handshake with that key, including the called end's certificate and ephemeral key. Both ends therefore
see this key on one connection only, and a machine in the middle cannot open a second one with it. The
certificate of the called end, which gRPC does not show to callers, adds nothing.

A stream may outlive that certificate: the caller then signs the same transcript again, together with the
renewed certificate (`mesh/member/tenure.py`).
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sealring.mesh.crypto.dsse import Ed25519Signer, check_threshold, parse_envelope, sign_envelope
from sealring.mesh.crypto.encoding import pack_fields
from sealring.mesh.crypto.identity import Signer, verify
from sealring.mesh.crypto.keys import Label
from sealring.mesh.errors import FailedPrecondition, RosterError, SealringError, Unauthenticated
from sealring.mesh.pki.root import RootMetadata
from sealring.mesh.rpc.protocol import check_release, own_release
from sealring.v1 import proof_pb2

NONCE_BYTES = 32
PROOF_SECONDS = 10.0
"""How long either end waits for the other's proof before a stream begins."""

_PROTOCOL = b"sealring/v1 connection"
_PAYLOAD_TYPES = {
    Label.CONNECTION: "application/vnd.sealring.connection",
    Label.RENEWAL: "application/vnd.sealring.renewal",
}
_HASH_BYTES = 32
_MAX_PROOF_BYTES = 16 << 10
_MAX_TRANSCRIPT_BYTES = 2048


class Purpose(enum.Enum):
    """The stream that a proof is for, and so the role of either end."""

    SCHEDULE = b"gateway schedules member"
    SESSION = b"member reports to coordinator"
    WATCH = b"gateway watches coordinator"


class Side(enum.Enum):
    """The end that makes a proof, and when."""

    CALLER = b"caller"
    CALLED = b"called"
    RENEWED = b"caller with another certificate"


@dataclass(frozen=True)
class HeldRoster:
    """The roster that an end uses; version 0 and an empty hash if it has no valid one."""

    version: int = 0
    hash: bytes = b""


@dataclass(frozen=True)
class Connection:
    """A stream between two machines of a cluster. `called` is a member's id, empty for the coordinator.

    `caller_key` is the SHA-256 of the SubjectPublicKeyInfo of the caller's certificate
    (`sealring.mesh.pki.certificates.key_hash`).
    """

    purpose: Purpose
    cluster: str
    caller: str
    called: str
    caller_key: bytes

    @property
    def ends(self) -> tuple[str, str]:
        """The caller and the called end, as errors name them."""
        role = "node" if self.purpose is Purpose.SESSION else "gateway"
        return f"{role} {self.caller}", f"node {self.called}" if self.called else "the coordinator"


SignProof: TypeAlias = Callable[[bytes], bytes]
"""Signs a transcript with its owner's keys; may block for milliseconds."""

VerifyProof: TypeAlias = Callable[[bytes, bytes], None]
"""Checks a proof, the second argument, over a transcript against the expected signer's key.

Raises SealringError.
"""


class CallerProof:
    """The caller's part: `offer` is the first message, then `check` the answer, then `finish`."""

    def __init__(self, connection: Connection, roster: HeldRoster) -> None:
        self._connection = connection
        self._roster = roster
        self.offer = proof_pb2.ProofOffer(
            nonce=secrets.token_bytes(NONCE_BYTES),
            roster_version=roster.version,
            roster_hash=roster.hash,
            release=own_release(),
        )
        self._answer: proof_pb2.ProofAnswer | None = None

    def check(self, answer: proof_pb2.ProofAnswer, verify_proof: VerifyProof) -> None:
        """Raises Unauthenticated (NO_PROOF, BAD_PROOF), FailedPrecondition (INCOMPATIBLE_VERSION,
        ROSTER_EQUIVOCATION)."""
        own, called = self._connection.ends
        _check_opening(answer, called, own, self._roster, self._connection.purpose)
        check_proof(self._content(answer, Side.CALLED), answer.proof, verify_proof)
        self._answer = answer

    async def finish(self, sign: SignProof) -> proof_pb2.ProofFinish:
        """The caller's own proof; only after `check` has accepted the called end's."""
        if self._answer is None:
            raise no_proof()
        content = self._content(self._answer, Side.CALLER)
        return proof_pb2.ProofFinish(proof=await asyncio.to_thread(sign, content))

    async def renew(self, certificate: bytes, sign: SignProof) -> proof_pb2.ProofRenewal:
        """The proof that extends the stream until `certificate` (DER) ends; only after `finish`."""
        if self._answer is None:
            raise no_proof()
        content = _renewed(self._content(self._answer, Side.RENEWED), certificate)
        proof = await asyncio.to_thread(sign, content)
        return proof_pb2.ProofRenewal(certificate=certificate, proof=proof)

    def _content(self, answer: proof_pb2.ProofAnswer, side: Side) -> bytes:
        return transcript(self._connection, self.offer, answer, side)


class CalledProof:
    """The called end's part: `answer` an offer, then `check` the caller's proof."""

    def __init__(
        self,
        connection: Connection,
        offer: proof_pb2.ProofOffer,
        roster: HeldRoster,
        *,
        root_version: int = 0,
    ) -> None:
        """Raises Unauthenticated (NO_PROOF), FailedPrecondition (INCOMPATIBLE_VERSION,
        ROSTER_EQUIVOCATION).
        """
        caller, own = connection.ends
        _check_opening(offer, caller, own, roster, connection.purpose)
        self._connection = connection
        self._offer = offer
        self._answer = proof_pb2.ProofAnswer(
            nonce=secrets.token_bytes(NONCE_BYTES),
            roster_version=roster.version,
            roster_hash=roster.hash,
            root_version=root_version,
            release=own_release(),
        )

    async def answer(self, sign: SignProof) -> proof_pb2.ProofAnswer:
        """The called end's own proof."""
        content = transcript(self._connection, self._offer, self._answer, Side.CALLED)
        self._answer.proof = await asyncio.to_thread(sign, content)
        return self._answer

    def check(self, finish: proof_pb2.ProofFinish, verify_proof: VerifyProof) -> None:
        """Raises Unauthenticated (BAD_PROOF)."""
        content = transcript(self._connection, self._offer, self._answer, Side.CALLER)
        check_proof(content, finish.proof, verify_proof)

    def check_renewal(self, renewal: proof_pb2.ProofRenewal, verify_proof: VerifyProof) -> None:
        """Checks that this stream's own caller signed the certificate. Raises Unauthenticated (BAD_PROOF)."""
        content = transcript(self._connection, self._offer, self._answer, Side.RENEWED)
        check_proof(_renewed(content, renewal.certificate), renewal.proof, verify_proof)


@dataclass(frozen=True)
class Credentials:
    """A name and key that an enrolled machine proves itself with; `roster` returns the one in use now."""

    cluster: str
    id: str
    sign: SignProof
    roster: Callable[[], HeldRoster]


def transcript(
    connection: Connection, offer: proof_pb2.ProofOffer, answer: proof_pb2.ProofAnswer, side: Side
) -> bytes:
    """The bytes that one side signs: both ends' messages and names of the connection, each field behind its
    length."""
    return pack_fields(
        _PROTOCOL,
        side.value,
        connection.purpose.value,
        connection.cluster.encode(),
        connection.caller.encode(),
        connection.called.encode(),
        connection.caller_key,
        offer.nonce,
        _number(offer.roster_version),
        offer.roster_hash,
        _release(offer.release),
        answer.nonce,
        _number(answer.roster_version),
        answer.roster_hash,
        _number(answer.root_version),
        _release(answer.release),
    )


def _renewed(content: bytes, certificate: bytes) -> bytes:
    return pack_fields(content, hashlib.sha256(certificate).digest())


def by_identity(signer: Signer) -> SignProof:
    """Proofs of a member or gateway: one signature by its identity key."""
    return lambda content: signer.sign(Label.CONNECTION, content)


def of_identity(identity_key: bytes) -> VerifyProof:
    """Checks that a proof was made with this identity key."""
    return lambda content, proof: verify(identity_key, Label.CONNECTION, content, proof)


def renewal(csr: bytes, certificate_chain: bytes, root_metadata: bytes) -> bytes:
    """The hash that the coordinator signs to renew a certificate: its answer to this signing request."""
    return hashlib.sha256(pack_fields(csr, certificate_chain, root_metadata)).digest()


def refusal(csr: bytes, identity_key: bytes) -> bytes:
    """The hash that the coordinator signs instead of a renewal: this identity key is not enrolled.

    It covers the signing request, whose key is fresh, so an earlier refusal cannot be replayed.
    """
    return hashlib.sha256(pack_fields(csr, b"", b"not enrolled", identity_key)).digest()


def by_roster_keys(signers: Sequence[Ed25519Signer], label: Label = Label.CONNECTION) -> SignProof:
    """Proofs of the coordinator: an envelope around the transcript, signed by its roster keys."""
    return lambda content: sign_envelope(_PAYLOAD_TYPES[label], content, signers)


def of_coordinator(root: RootMetadata, label: Label = Label.CONNECTION) -> VerifyProof:
    """Checks that a threshold of the root's roster keys signed a proof."""

    def check(content: bytes, proof: bytes) -> None:
        opened = parse_envelope(proof, payload_type=_PAYLOAD_TYPES[label], max_payload=_MAX_TRANSCRIPT_BYTES)
        check_threshold(opened, root.roster_keys, root.roster_threshold)
        if opened.payload != content:
            raise RosterError("the proof is about something else", reason="BAD_PROOF")

    return check


def _check_opening(
    opening: proof_pb2.ProofOffer | proof_pb2.ProofAnswer,
    theirs: str,
    ours: str,
    own: HeldRoster,
    purpose: Purpose,
) -> None:
    # The release comes first: a proof of another protocol may have other sizes.
    if opening.nonce:
        check_release(opening.release, theirs, ours)
    sizes = (len(opening.nonce), len(opening.roster_hash))
    if sizes != (NONCE_BYTES, _HASH_BYTES if opening.roster_version else 0):
        raise no_proof()
    differs = opening.roster_version == own.version and opening.roster_hash != own.hash
    # Streams to the coordinator carry the rosters themselves; it compares them and records two of one
    # version.
    if differs and purpose is Purpose.SCHEDULE:
        raise FailedPrecondition(
            "the other end of the connection has another roster of the same version",
            hint="two rosters of one version were signed: see the coordinator's log",
            reason="ROSTER_EQUIVOCATION",
        )


def check_proof(content: bytes, proof: bytes, verify_proof: VerifyProof) -> None:
    """Raises Unauthenticated (BAD_PROOF), the same error for every defect of a proof."""
    try:
        if len(proof) > _MAX_PROOF_BYTES:
            raise Unauthenticated("the proof is too long", reason="BAD_PROOF")
        verify_proof(content, proof)
    except SealringError:
        raise Unauthenticated(
            "the other end of the connection does not hold the key that is on record for it",
            hint="check its address, and whether it was restored with another key",
            reason="BAD_PROOF",
        ) from None


def no_proof() -> Unauthenticated:
    """The error for a stream that begins without a proof."""
    return Unauthenticated(
        "a stream has to begin with a proof of identity", hint="use this release", reason="NO_PROOF"
    )


def _release(release: proof_pb2.Release) -> bytes:
    return pack_fields(release.software.encode(), _number(release.protocol), _number(release.oldest))


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")
