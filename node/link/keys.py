"""The keys of a finished handshake, and the context that binds them to one link of one epoch.

Key schedule: HKDF-SHA256 (RFC 5869) with the transcript hash as salt and a label for each use.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from sealring.mesh.crypto.encoding import FormatError, pack_fields, unpack_fields
from sealring.mesh.crypto.keys import KEY_BYTES, NONCE_BYTES, Uncopyable
from sealring.mesh.crypto.suites import Suite
from sealring.mesh.errors import HandshakeError, RecordError

HASH_BYTES = 32
MAX_NOTE_BYTES = 4096
MAX_U64 = (1 << 64) - 1
_CARRIER_MAGIC = b"sealring/v1 carrier keys"
_CARRIER_BYTES = 1024
_EXPORT_LABEL_BYTES = 64
_ROWS_LABEL = b"row parameters"
_NUMBERS = struct.Struct(">QIIIQ")


@dataclass(frozen=True)
class LinkContext:
    """The link of session keys, and the rank of this end.

    `epoch` counts the lives of the ring, `roster_hash` is SHA-256 (32 bytes).
    """

    cluster: str
    ring: str
    epoch: int
    from_rank: int
    to_rank: int
    own_rank: int
    roster_version: int
    roster_hash: bytes

    @property
    def initiates(self) -> bool:
        """Whether this end speaks first in the handshake."""
        return self.own_rank == min(self.from_rank, self.to_rank)

    def same_link(self, other: LinkContext) -> bool:
        """Whether `other` is this end of this link in this epoch, under this or a newer roster."""
        return (
            (self.cluster, self.ring, self.epoch) == (other.cluster, other.ring, other.epoch)
            and (self.from_rank, self.to_rank, self.own_rank)
            == (other.from_rank, other.to_rank, other.own_rank)
            and other.roster_version >= self.roster_version
        )

    def encode(self) -> bytes:
        """The context as bytes."""
        numbers = _NUMBERS.pack(self.epoch, self.from_rank, self.to_rank, self.own_rank, self.roster_version)
        return pack_fields(self.cluster.encode(), self.ring.encode(), numbers, self.roster_hash)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The inverse of `encode`. Raises FormatError."""
        cluster, ring, numbers, roster_hash = unpack_fields(data, count=4, max_bytes=512)
        if len(numbers) != _NUMBERS.size or len(roster_hash) != HASH_BYTES:
            raise FormatError("link context is malformed")
        epoch, from_rank, to_rank, own_rank, version = _NUMBERS.unpack(numbers)
        return cls(cluster.decode(), ring.decode(), epoch, from_rank, to_rank, own_rank, version, roster_hash)


@dataclass(frozen=True, repr=False)
class DirectionKeys(Uncopyable):
    """The key (32 bytes) and IV (12 bytes) of one direction."""

    key: bytes
    iv: bytes


class SessionKeys(Uncopyable):
    """The outcome of a handshake at one end. The record keys can be taken exactly once.

    Either a `sealring.node.link.records.Link` in this process takes them, or `to_carrier`. Exports and notes
    work here afterwards.
    """

    __slots__ = (
        "_exporter",
        "_notes",
        "_receive",
        "_send",
        "context",
        "session_id",
        "suite",
        "transcript_hash",
    )

    def __init__(
        self,
        suite: Suite,
        context: LinkContext,
        session_id: bytes,
        transcript_hash: bytes,
        send: DirectionKeys,
        receive: DirectionKeys,
        exporter: bytes | None,
    ) -> None:
        self.suite = suite
        self.context = context
        self.session_id = session_id
        self.transcript_hash = transcript_hash
        self._send: DirectionKeys | None = send
        self._receive: DirectionKeys | None = receive
        self._exporter = exporter
        self._notes: set[tuple[str, bytes]] = set()

    @classmethod
    def derive(cls, suite: Suite, context: LinkContext, master: bytes, transcript_hash: bytes) -> Self:
        """The session of a finished handshake, from its master secret."""
        initiator, responder = (
            DirectionKeys(
                expand(master, role + b" key", transcript_hash),
                expand(master, role + b" iv", transcript_hash, NONCE_BYTES),
            )
            for role in (b"initiator", b"responder")
        )
        send, receive = (initiator, responder) if context.initiates else (responder, initiator)
        return cls(
            suite,
            context,
            session_id=expand(master, b"session id", transcript_hash),
            transcript_hash=transcript_hash,
            send=send,
            receive=receive,
            exporter=expand(master, b"exporter", transcript_hash),
        )

    def take(self) -> tuple[DirectionKeys, DirectionKeys]:
        """The keys to send and to receive with, once. Raises RecordError (KEYS_TAKEN) the second time."""
        send, receive = self._send, self._receive
        self._send = self._receive = None
        if send is None or receive is None:
            raise RecordError("session keys were taken before", reason="KEYS_TAKEN")
        return send, receive

    def to_carrier(self) -> bytes:
        """Take the record keys as bytes for the carrier process, over a private pipe and nothing else.

        The exporter stays here. Raises RecordError (KEYS_TAKEN).
        """
        send, receive = self.take()
        return pack_fields(
            _CARRIER_MAGIC,
            bytes([self.suite.code]),
            self.context.encode(),
            self.session_id,
            self.transcript_hash,
            send.key + send.iv,
            receive.key + receive.iv,
        )

    @classmethod
    def from_carrier(cls, data: bytes) -> Self:
        """Read what `to_carrier` wrote. Raises RecordError (BAD_CARRIER_KEYS)."""
        try:
            magic, code, context, session_id, transcript_hash, send, receive = unpack_fields(
                data, count=7, max_bytes=_CARRIER_BYTES
            )
            lengths = (len(code), len(session_id), len(transcript_hash), len(send), len(receive))
            pair = KEY_BYTES + NONCE_BYTES
            if magic != _CARRIER_MAGIC or lengths != (1, HASH_BYTES, HASH_BYTES, pair, pair):
                raise FormatError("not carrier keys")
            return cls(
                Suite.from_code(code[0]),
                LinkContext.decode(context),
                session_id,
                transcript_hash,
                DirectionKeys(send[:KEY_BYTES], send[KEY_BYTES:]),
                DirectionKeys(receive[:KEY_BYTES], receive[KEY_BYTES:]),
                exporter=None,
            )
        except (FormatError, HandshakeError, UnicodeDecodeError):
            raise RecordError("carrier keys are malformed", reason="BAD_CARRIER_KEYS") from None

    def export(self, label: bytes, context: bytes = b"", length: int = 32) -> bytes:
        """A secret that both ends derive alike, for `label` and `context` (as TLS 1.3, RFC 8446 7.5).

        Raises RecordError (NO_EXPORTER) in the carrier.
        """
        if self._exporter is None or not 0 < len(label) <= _EXPORT_LABEL_BYTES:
            raise RecordError("exporter is not here, or the label is too long", reason="NO_EXPORTER")
        return expand(self._exporter, b"export " + label, context, length)

    def row_key(self) -> bytes:
        """The suite's code and a key that the head seals parameters of rows under, for the tail: of the
        session of the closing edge. No key is for the way back. Raises RecordError (NO_EXPORTER)."""
        return bytes([self.suite.code]) + self.export(_ROWS_LABEL)

    def seal_note(self, label: bytes, payload: bytes) -> bytes:
        """Seal one small payload (at most 4096 bytes) for the peer: once per label and direction.

        Raises RecordError (NOTE_REUSED, NOTE_TOO_LARGE).
        """
        if len(payload) > MAX_NOTE_BYTES:
            raise RecordError("note is too large", reason="NOTE_TOO_LARGE")
        self._use_note("send", label)
        key, bound = self.note_key(label, sending=True)
        return self.suite.aead(key).encrypt(bytes(NONCE_BYTES), payload, bound)

    def open_note(self, label: bytes, sealed: bytes) -> bytes:
        """Open the peer's note: one attempt per label. Raises RecordError (NOTE_REUSED, NOTE_REFUSED)."""
        self._use_note("receive", label)
        key, bound = self.note_key(label, sending=False)
        try:
            if len(sealed) > MAX_NOTE_BYTES + 16:
                raise InvalidTag
            return self.suite.aead(key).decrypt(bytes(NONCE_BYTES), sealed, bound)
        except InvalidTag:
            raise RecordError("note cannot be decrypted", reason="NOTE_REFUSED") from None

    def _use_note(self, direction: str, label: bytes) -> None:
        if (direction, label) in self._notes:
            raise RecordError("note was used before", reason="NOTE_REUSED")
        self._notes.add((direction, label))

    def note_key(self, label: bytes, *, sending: bool) -> tuple[bytes, bytes]:
        role = b"initiator" if sending == self.context.initiates else b"responder"
        bound = pack_fields(b"note", role, label, self.session_id)
        return self.export(b"note", bound), bound

    def __repr__(self) -> str:
        return f"SessionKeys({self.suite}, {self.session_id.hex()[:16]})"


def extract(salt: bytes, secret: bytes) -> bytes:
    """HKDF-Extract with SHA-256 (RFC 5869 section 2.2), 32 bytes."""
    return hmac.digest(salt, secret, "sha256")


def expand(secret: bytes, label: bytes, context: bytes, length: int = 32) -> bytes:
    """HKDF-Expand with SHA-256 (RFC 5869 section 2.3) under a label of ours."""
    info = pack_fields(b"sealring/v1", label, context)
    return HKDFExpand(algorithm=SHA256(), length=length, info=info).derive(secret)
