"""SIGMA-I handshake (Krawczyk 2003) between the two ends of a link, as state machines without I/O.

    I -> R  hello:    cluster, roster, ring, epoch, link, expected responder, suite, ephemeral, nonce
    R -> I  reply:    suite, ephemeral, nonce, sealed {identity key, signature, MAC}
    I -> R  proof:    sealed {identity key, signature, MAC}
    R -> I  finished: key confirmation

Each end builds the prologue of the transcript from its own roster, and never from the peer's messages. It
accepts only the suite that the roster lists first: without negotiation there is no downgrade. Signatures
cover role, transcript and both identities. MACs cover role, own identity and signature, which prevents
identity misbinding. After a failure the machine is unusable; the caller closes the stream without a reason.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NoReturn

from cryptography.exceptions import InvalidTag

from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.crypto.encoding import FormatError, pack_fields, unpack_fields
from sealring.mesh.crypto.identity import Signer, member_id, verify
from sealring.mesh.crypto.keys import NONCE_BYTES, Label, Uncopyable
from sealring.mesh.crypto.suites import InitiatorShare, Suite, respond_to_share
from sealring.mesh.errors import HandshakeError, SealringError
from sealring.node.link.keys import SessionKeys, expand, extract
from sealring.node.link.params import LinkParams

MAX_FRAME_BYTES = 16 << 10
DEADLINE_SECONDS = 10.0
HELLO_NONCE_BYTES = 32

_PROTOCOL = b"sealring/v1 sigma"
_HELLO, _REPLY, _PROOF, _FINISHED = b"\x01", b"\x02", b"\x03", b"\x04"
_LINK = struct.Struct(">QIIQ")
_INITIATOR, _RESPONDER = b"initiator", b"responder"


@dataclass(frozen=True)
class Outcome:
    """The result of a message: bytes for the peer, the session keys, or both."""

    message: bytes | None
    session: SessionKeys | None


class EphemeralLedger:
    """The ephemeral shares that a daemon has answered, each once. Bounded; the oldest is dropped first.

    Safe to use from several threads, as handshakes run in them.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def claim(self, share: bytes) -> None:
        """Use up the one attempt of an ephemeral share. Raises HandshakeError (REPLAYED)."""
        name = hashlib.sha256(share).digest()
        with self._lock:
            if name in self._seen:
                raise HandshakeError("ephemeral share was used before", reason="REPLAYED")
            self._seen[name] = None
            if len(self._seen) > self._capacity:
                self._seen.popitem(last=False)


class _Machine(Uncopyable):
    """The part that both ends share: deadline, order of messages, and final failure."""

    def __init__(self, params: LinkParams, signer: Signer, clock: Clock, *, initiates: bool) -> None:
        if params.initiates is not initiates:
            raise HandshakeError("the lower rank initiates", reason="WRONG_ROLE")
        if member_id(signer.public_key) != params.own_id:
            raise HandshakeError("identity key is not that of this member", reason="WRONG_IDENTITY")
        self._params = params
        self._signer = signer
        self._clock = clock
        self._ends = clock() + DEADLINE_SECONDS
        self._expects = b""
        self._over = False
        self._secret = b""
        self._transcript = _prologue(params)

    def on_message(self, frame: bytes) -> Outcome:
        """Take the peer's next frame.

        Raises HandshakeError with a reason for the own log. After that, and after the keys were handed out,
        every call raises.
        """
        # Set until this message has passed every check: any exception leaves the machine unusable.
        over, self._over = self._over, True
        try:
            if self._clock() >= self._ends:
                raise HandshakeError("handshake took too long", reason="HANDSHAKE_TIMEOUT")
            if len(frame) > MAX_FRAME_BYTES:
                raise HandshakeError("handshake message is too large", reason="FRAME_TOO_LARGE")
            if over or not self._expects or frame[:1] != self._expects:
                raise HandshakeError("handshake message is out of order", reason="OUT_OF_ORDER")
            outcome = self._take(self._expects, frame)
        except FormatError:
            self._fail("handshake message is malformed", "MALFORMED")
        except SealringError as error:
            self._fail(error.message, error.reason)
        self._over = outcome.session is not None
        return outcome

    def _take(self, kind: bytes, frame: bytes) -> Outcome:
        raise NotImplementedError

    def _fail(self, message: str, reason: str) -> NoReturn:
        self._secret = b""
        raise HandshakeError(message, reason=reason) from None

    def _absorb(self, *fields: bytes) -> None:
        self._transcript = hashlib.sha256(pack_fields(self._transcript, *fields)).digest()

    def _prove(self, suite: Suite, role: bytes) -> bytes:
        """The sealed identity, signature and MAC of this end over the transcript so far."""
        key = self._signer.public_key
        signed = _signed_content(role, self._transcript, key, self._params.peer_id)
        signature = self._signer.sign(Label.HANDSHAKE, signed)
        proof = pack_fields(key, signature, self._mac(role, key, signature))
        aead = suite.aead(expand(self._secret, role + b" handshake key", self._transcript))
        return aead.encrypt(bytes(NONCE_BYTES), proof, self._transcript)

    def _check_proof(self, suite: Suite, role: bytes, sealed: bytes) -> None:
        """Open and check the peer's proof against the peer that the roster names."""
        aead = suite.aead(expand(self._secret, role + b" handshake key", self._transcript))
        try:
            proof = aead.decrypt(bytes(NONCE_BYTES), sealed, self._transcript)
        except InvalidTag:
            raise HandshakeError("proof cannot be decrypted", reason="BAD_PROOF") from None
        key, signature, mac = unpack_fields(proof, count=3, max_bytes=512)
        if hmac.compare_digest(key, self._signer.public_key):
            raise HandshakeError("peer sent my own identity back", reason="OWN_IDENTITY")
        if not hmac.compare_digest(key, self._params.peer_key):
            raise HandshakeError("peer is not the one that the roster names", reason="WRONG_PEER")
        # The MAC binds the identity to this session's secret. With the signature alone, another member could
        # claim the session as its own (identity misbinding, which SIGMA prevents).
        if not hmac.compare_digest(mac, self._mac(role, key, signature)):
            raise HandshakeError("proof's MAC does not verify", reason="BAD_MAC")
        verify(
            key,
            Label.HANDSHAKE,
            _signed_content(role, self._transcript, key, self._params.own_id),
            signature,
        )

    def _mac(self, role: bytes, key: bytes, signature: bytes) -> bytes:
        mac_key = expand(self._secret, role + b" mac", self._transcript)
        return hmac.digest(mac_key, pack_fields(role, self._transcript, key, signature), "sha256")

    def _confirmation(self) -> bytes:
        key = expand(self._secret, b"finished", self._transcript)
        return hmac.digest(key, pack_fields(_FINISHED, self._transcript), "sha256")

    def _finish(self, suite: Suite) -> SessionKeys:
        master = expand(self._secret, b"master", self._transcript)
        self._secret = b""
        return SessionKeys.derive(suite, self._params.context, master, self._transcript)


class Initiator(_Machine):
    """The end of a link with the lower rank. Single use: `start`, then `on_message` twice."""

    def __init__(self, params: LinkParams, signer: Signer, *, clock: Clock = monotonic_clock) -> None:
        """Raises HandshakeError (WRONG_ROLE, WRONG_IDENTITY)."""
        super().__init__(params, signer, clock, initiates=True)
        self._suite = _suite(params)
        self._share = InitiatorShare.generate(self._suite.group)
        self._hello = b""

    def start(self) -> bytes:
        """The first frame. Raises HandshakeError (OUT_OF_ORDER) the second time."""
        if self._hello or self._over:
            raise HandshakeError("handshake was started before", reason="OUT_OF_ORDER")
        params = self._params
        self._hello = _HELLO + pack_fields(
            *_hello_header(params, responder_id=params.peer_id),
            bytes([self._suite.code]),
            self._share.public,
            secrets.token_bytes(HELLO_NONCE_BYTES),
        )
        self._expects = _REPLY
        return self._hello

    def _take(self, kind: bytes, frame: bytes) -> Outcome:
        return self._take_reply(frame) if kind == _REPLY else self._take_finished(frame)

    def _take_reply(self, frame: bytes) -> Outcome:
        code, share, nonce, sealed = unpack_fields(frame[1:], count=4, max_bytes=MAX_FRAME_BYTES)
        if len(nonce) != HELLO_NONCE_BYTES:
            raise FormatError("wrong nonce length")
        suite = self._suite
        _check_suite(code, suite)
        secret = self._share.agree(share)
        self._absorb(self._hello, code, share, nonce)
        self._secret = extract(self._transcript, secret)
        self._check_proof(suite, _RESPONDER, sealed)
        self._absorb(frame)
        proof = _PROOF + self._prove(suite, _INITIATOR)
        self._absorb(proof)
        self._expects = _FINISHED
        return Outcome(proof, None)

    def _take_finished(self, frame: bytes) -> Outcome:
        if not hmac.compare_digest(frame[1:], self._confirmation()):
            raise HandshakeError("key confirmation does not verify", reason="BAD_CONFIRMATION")
        return Outcome(None, self._finish(self._suite))


class Responder(_Machine):
    """The end of a link with the higher rank. Single use: `on_message` twice."""

    def __init__(
        self,
        params: LinkParams,
        signer: Signer,
        ledger: EphemeralLedger,
        *,
        clock: Clock = monotonic_clock,
    ) -> None:
        """`ledger` is one per daemon. Raises HandshakeError (WRONG_ROLE, WRONG_IDENTITY)."""
        super().__init__(params, signer, clock, initiates=False)
        self._ledger = ledger
        self._suite = _suite(params)
        self._expects = _HELLO

    def _take(self, kind: bytes, frame: bytes) -> Outcome:
        return self._take_hello(frame) if kind == _HELLO else self._take_proof(frame)

    def _take_hello(self, frame: bytes) -> Outcome:
        fields = unpack_fields(frame[1:], count=9, max_bytes=MAX_FRAME_BYTES)
        _check_hello_header(self._params, fields[:6])
        code, share, hello_nonce = fields[6:]
        suite = self._suite
        _check_suite(code, suite)
        if len(share) != suite.group.initiator_share_bytes:
            raise HandshakeError("ephemeral share has a wrong length", reason="BAD_SHARE")
        if len(hello_nonce) != HELLO_NONCE_BYTES:
            raise FormatError("wrong nonce length")
        # Claimed before any computation: a failed attempt uses up its share too.
        self._ledger.claim(share)
        own_share, secret = respond_to_share(suite.group, share)
        nonce = secrets.token_bytes(HELLO_NONCE_BYTES)
        self._absorb(frame, code, own_share, nonce)
        self._secret = extract(self._transcript, secret)
        reply = _REPLY + pack_fields(code, own_share, nonce, self._prove(suite, _RESPONDER))
        self._absorb(reply)
        self._expects = _PROOF
        return Outcome(reply, None)

    def _take_proof(self, frame: bytes) -> Outcome:
        self._check_proof(self._suite, _INITIATOR, frame[1:])
        self._absorb(frame)
        confirmation = _FINISHED + self._confirmation()
        return Outcome(confirmation, self._finish(self._suite))


def _suite(params: LinkParams) -> Suite:
    """The suite of a link, from the roster. Raises HandshakeError (SUITE_NOT_SUPPORTED)."""
    suite = params.suites[0]
    if not suite.supported:
        raise HandshakeError(
            f"this build of the cryptographic library lacks the roster's suite {suite}",
            hint="install the cryptography package that sealring asks for",
            reason="SUITE_NOT_SUPPORTED",
        )
    return suite


def _check_suite(code: bytes, suite: Suite) -> None:
    if code != bytes([suite.code]):
        raise HandshakeError("peer uses another suite than the roster's first", reason="WRONG_SUITE")


def _hello_header(params: LinkParams, *, responder_id: str) -> list[bytes]:
    return [
        _PROTOCOL,
        params.cluster.encode(),
        params.ring.encode(),
        _LINK.pack(params.epoch, params.from_rank, params.to_rank, params.roster_version),
        params.roster_hash,
        responder_id.encode(),
    ]


_HEADER_REASONS = (
    "WRONG_PROTOCOL",
    "WRONG_CLUSTER",
    "WRONG_RING",
    "WRONG_EPOCH_OR_LINK",
    "ROSTER_MISMATCH",
    "NOT_FOR_ME",
)


def _check_hello_header(params: LinkParams, fields: list[bytes]) -> None:
    expected = _hello_header(params, responder_id=params.own_id)
    for field, own, reason in zip(fields, expected, _HEADER_REASONS, strict=True):
        if field != own:
            raise HandshakeError("hello is for another link or roster", reason=reason)


def _prologue(params: LinkParams) -> bytes:
    initiator, responder = (
        (params.own_id, params.peer_id) if params.initiates else (params.peer_id, params.own_id)
    )
    return hashlib.sha256(
        pack_fields(
            *_hello_header(params, responder_id=responder),
            initiator.encode(),
        )
    ).digest()


def _signed_content(role: bytes, transcript: bytes, key: bytes, peer_id: str) -> bytes:
    return pack_fields(_PROTOCOL, role, transcript, key, peer_id.encode())
