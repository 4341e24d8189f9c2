"""Both ends of a control stream prove who they are with more than a certificate.

mTLS alone would let whoever has the certificate authority's key pose as anybody. So the first messages of a
stream are an offer (caller), an answer (called) and a proof (caller): each end signs one transcript with the
key that the signed roster or root metadata names, and takes nothing from the other before that has verified.

The transcript binds the proof to this connection by the key of the *caller's* certificate: the called end
takes it from the handshake, the caller from its own material. In TLS 1.3 (RFC 8446 section 4.4.3) the caller
signs the whole handshake with that key, the called end's certificate and ephemeral included, so there is one
connection only on which both see this key, and nobody in between can have another with it. The certificate of
the called end, which gRPC does not show to callers, therefore adds nothing.

A stream may outlive that certificate: the caller signs the same transcript once more, together with the one
that it has renewed it by (`mesh/member/tenure.py`).
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
from sealring.mesh.crypto.labels import Label
from sealring.mesh.errors import FailedPrecondition, RosterError, SealringError, Unauthenticated
from sealring.mesh.pki.root import RootMetadata
from sealring.mesh.rpc.protocol import check_release, own_release
from sealring.v1 import proof_pb2

NONCE_BYTES = 32
PROOF_SECONDS = 10.0
"""How long either end waits for what the other has to say before a stream begins."""

_PROTOCOL = b"sealring/v1 connection"
_PAYLOAD_TYPES = {
    Label.CONNECTION: "application/vnd.sealring.connection",
    Label.RENEWAL: "application/vnd.sealring.renewal",
}
_HASH_BYTES = 32
_MAX_PROOF_BYTES = 16 << 10
_MAX_TRANSCRIPT_BYTES = 2048


class Purpose(enum.Enum):
    """Which stream a proof is for; that says the role of either end as well."""

    SCHEDULE = b"gateway schedules member"
    SESSION = b"member reports to coordinator"
    WATCH = b"gateway watches coordinator"


class Side(enum.Enum):
    """Whose proof it is."""

    CALLER = b"caller"
    CALLED = b"called"
    RENEWED = b"caller with another certificate"


@dataclass(frozen=True)
class HeldRoster:
    """The roster that an end goes by: version 0 and no hash where it has none that is valid."""

    version: int = 0
    hash: bytes = b""


@dataclass(frozen=True)
class Connection:
    """One stream between two ends of a cluster. `called` is a member's id, empty for the coordinator.

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
        """The caller and the called end, for people."""
        role = "node" if self.purpose is Purpose.SESSION else "gateway"
        return f"{role} {self.caller}", f"node {self.called}" if self.called else "the coordinator"


SignProof: TypeAlias = Callable[[bytes], bytes]
"""Signs a transcript with whatever key its owner has; may block for milliseconds."""

VerifyProof: TypeAlias = Callable[[bytes, bytes], None]
"""Checks a proof, the second argument, over a transcript against the key of who should have made it.

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
        """What shows the called end who calls; only after its own proof was checked."""
        if self._answer is None:
            raise no_proof()
        content = self._content(self._answer, Side.CALLER)
        return proof_pb2.ProofFinish(proof=await asyncio.to_thread(sign, content))

    async def renew(self, certificate: bytes, sign: SignProof) -> proof_pb2.ProofRenewal:
        """What lets the stream go on until `certificate` (DER) ends; only after `finish`."""
        if self._answer is None:
            raise no_proof()
        content = _renewed(self._content(self._answer, Side.RENEWED), certificate)
        proof = await asyncio.to_thread(sign, content)
        return proof_pb2.ProofRenewal(certificate=certificate, proof=proof)

    def _content(self, answer: proof_pb2.ProofAnswer, side: Side) -> bytes:
        return transcript(self._connection, self.offer, answer, side)


class CalledProof:
    """The called end's part: `answer` an offer, then `check` what comes back."""

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
        """That the caller of this very stream shows its certificate. Raises Unauthenticated (BAD_PROOF)."""
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
    """What one side signs: all that both have said and know of this connection, each behind its length."""
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
    """Checks that the holder of an identity key made a proof."""
    return lambda content, proof: verify(identity_key, Label.CONNECTION, content, proof)


def renewal(csr: bytes, certificate_chain: bytes, root_metadata: bytes) -> bytes:
    """What the coordinator signs when it renews a certificate: its answer, to this signing request."""
    return hashlib.sha256(pack_fields(csr, certificate_chain, root_metadata)).digest()


def refusal(csr: bytes, identity_key: bytes) -> bytes:
    """What the coordinator signs in the place of a renewal: whoever has this key is not enrolled.

    It answers this signing request alone, whose key is fresh: one of an earlier time is worth nothing.
    """
    return hashlib.sha256(pack_fields(csr, b"", b"not enrolled", identity_key)).digest()


def by_roster_keys(signers: Sequence[Ed25519Signer], label: Label = Label.CONNECTION) -> SignProof:
    """Proofs of the coordinator: an envelope around the transcript, signed by its roster keys."""
    return lambda content: sign_envelope(_PAYLOAD_TYPES[label], content, signers)


def of_coordinator(root: RootMetadata, label: Label = Label.CONNECTION) -> VerifyProof:
    """Checks that a threshold of the roster keys that the root names made a proof."""

    def check(content: bytes, proof: bytes) -> None:
        opened = parse_envelope(proof, payload_type=_PAYLOAD_TYPES[label], max_payload=_MAX_TRANSCRIPT_BYTES)
        check_threshold(opened, root.roster_keys, root.roster_threshold)
        if opened.payload != content:
            raise RosterError("the proof is about something else", reason="BAD_PROOF")

    return check


def _check_opening(
    said: proof_pb2.ProofOffer | proof_pb2.ProofAnswer, who: str, name: str, own: HeldRoster, purpose: Purpose
) -> None:
    """With the coordinator rosters themselves are exchanged, and two of one version end in its audit log."""
    if said.nonce:
        check_release(said.release, who, name)
    sizes = (len(said.nonce), len(said.roster_hash))
    if sizes != (NONCE_BYTES, _HASH_BYTES if said.roster_version else 0):
        raise no_proof()
    other = said.roster_version == own.version and said.roster_hash != own.hash
    if other and purpose is Purpose.SCHEDULE:
        raise FailedPrecondition(
            "the other end of the connection has another roster of the same version",
            hint="two rosters of one version were signed: see the coordinator's log",
            reason="ROSTER_EQUIVOCATION",
        )


def check_proof(content: bytes, proof: bytes, verify_proof: VerifyProof) -> None:
    """Whatever is wrong with a proof, one thing is said of it. Raises Unauthenticated (BAD_PROOF)."""
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
    """A stream that begins with something else."""
    return Unauthenticated(
        "a stream has to begin with a proof of identity", hint="use this release", reason="NO_PROOF"
    )


def _release(release: proof_pb2.Release) -> bytes:
    return pack_fields(release.software.encode(), _number(release.protocol), _number(release.oldest))


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")
