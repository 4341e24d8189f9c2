"""Prompts sealed to the head of a ring, and its replies sealed to the client (HPKE, RFC 9180, base mode).

A request carries the client's one-time public key inside; the head answers with a stream key sealed to that,
and then chunks under a counter. The gateway in between sees lengths and the `RequestInfo`; both bind it.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)

from sealring.mesh.clock import SKEW_SECONDS, Clock, wall_clock
from sealring.mesh.crypto.encoding import FormatError, pack_fields, unpack_fields
from sealring.mesh.crypto.uncopyable import Uncopyable
from sealring.mesh.errors import EnvelopeError, InvalidInput, ResourceExhausted
from sealring.mesh.names import MAX_DEPLOYMENT_NAME

REQUEST_ID_BYTES = 16
MAX_REQUEST_BYTES = 8 << 20
MAX_CHUNK_BYTES = 1 << 20
MAX_LIFETIME_SECONDS = 3600

_PROTOCOL = b"sealring/v1 envelope"
_REPLY_PROTOCOL = b"sealring/v1 reply"
_KEY_BYTES = 32
_HASH_BYTES = 32
_MLKEM_BYTES = 1184
_TAG_BYTES = 16
_MORE, _LAST = b"\x00", b"\x01"
_U64 = struct.Struct(">Q")

_CLASSIC = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_HYBRID = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_PrivateKey: TypeAlias = X25519PrivateKey | MLKEM768X25519PrivateKey
_PublicKey: TypeAlias = X25519PublicKey | MLKEM768X25519PublicKey


@dataclass(frozen=True)
class RequestInfo:
    """What a sealed request is bound to and travels beside it in clear.

    `request_id` is 16 random bytes, `expires` seconds since 1970 (at most an hour ahead), `roster_hash` that
    of the roster by which the client chose the head.
    """

    deployment: str
    request_id: bytes
    expires: int
    roster_hash: bytes

    def __post_init__(self) -> None:
        sound = (
            0 < len(self.deployment) <= MAX_DEPLOYMENT_NAME
            and len(self.request_id) == REQUEST_ID_BYTES
            and 0 < self.expires < 1 << 62
            and len(self.roster_hash) == _HASH_BYTES
        )
        if not sound:
            raise InvalidInput("sealed request's info is malformed", reason="BAD_REQUEST_INFO")

    def encode(self) -> bytes:
        """The HPKE info string."""
        return pack_fields(
            _PROTOCOL,
            self.deployment.encode(),
            self.request_id,
            _U64.pack(self.expires),
            self.roster_hash,
        )


class SealingKey(Uncopyable):
    """A node's sealing key, in memory only: X25519, or ML-KEM-768 with X25519."""

    def __init__(self, *, hybrid: bool = False) -> None:
        x25519 = X25519PrivateKey.generate()
        self._hybrid = hybrid
        self._key: _PrivateKey = x25519
        self.public_key = x25519.public_key().public_bytes_raw()
        """The public key for the roster: 32 bytes, or 1184 + 32."""
        if hybrid:
            mlkem = MLKEM768PrivateKey.generate()
            self._key = MLKEM768X25519PrivateKey(mlkem, x25519)
            self.public_key = mlkem.public_key().public_bytes_raw() + self.public_key

    def open_request(
        self, sealed: bytes, info: RequestInfo, guard: ReplayGuard, *, epoch: int = 0
    ) -> OpenedRequest:
        """Open a request at the head.

        `guard` is one per node; `epoch` counts the ring's lives, so that the same envelope may come again
        after a fault, and only then. Raises EnvelopeError (ENVELOPE_EXPIRED, ENVELOPE_REPLAYED,
        ENVELOPE_REFUSED, ENVELOPE_TOO_LARGE), ResourceExhausted (REPLAY_GUARD_FULL).
        """
        if len(sealed) > MAX_REQUEST_BYTES:
            raise EnvelopeError("sealed request is too large", reason="ENVELOPE_TOO_LARGE")
        guard.check_times(info)
        try:
            plain = (_HYBRID if self._hybrid else _CLASSIC).decrypt(sealed, self._key, info.encode())
            reply_key, body = unpack_fields(plain, count=2, max_bytes=MAX_REQUEST_BYTES)
            if len(reply_key) != _KEY_BYTES:
                raise FormatError("no reply key")
        except (InvalidTag, ValueError):
            raise _refused() from None
        digest = hashlib.sha256(sealed).digest()
        guard.claim(info, digest, epoch)
        return OpenedRequest(body, ReplySealer(reply_key, info, digest))

    def __repr__(self) -> str:
        return f"SealingKey(hybrid={self._hybrid})"


@dataclass(frozen=True, repr=False)
class OpenedRequest:
    """What a head gets from a sealed request: the body, and how to answer."""

    body: bytes
    reply: ReplySealer


def seal_request(sealing_key: bytes, info: RequestInfo, body: bytes) -> tuple[bytes, ReplyOpener]:
    """Seal `body` to a head's sealing key from a verified roster; the opener is for this request's reply.

    Raises InvalidInput (BAD_SEALING_KEY, REQUEST_TOO_LARGE).
    """
    if len(body) > MAX_REQUEST_BYTES - 4096:
        raise InvalidInput("request is too large to seal", reason="REQUEST_TOO_LARGE")
    suite, key = _recipient(sealing_key)
    reply_key = X25519PrivateKey.generate()
    plain = pack_fields(reply_key.public_key().public_bytes_raw(), body)
    sealed = suite.encrypt(plain, key, info.encode())
    return sealed, ReplyOpener(reply_key, info, hashlib.sha256(sealed).digest())


class ReplySealer(Uncopyable):
    """The head's end of one reply. Chunks are numbered; the last one says so."""

    def __init__(self, reply_key: bytes, info: RequestInfo, request_digest: bytes) -> None:
        self._bound = _reply_info(info, request_digest)
        stream_key = secrets.token_bytes(_KEY_BYTES)
        try:
            recipient = X25519PublicKey.from_public_bytes(reply_key)
            self._opening: bytes | None = _CLASSIC.encrypt(stream_key, recipient, self._bound)
        except ValueError:
            raise _refused() from None
        self._aead = ChaCha20Poly1305(stream_key)
        self._sequence = 0
        self._ended = False

    def seal(self, chunk: bytes, *, last: bool = False) -> bytes:
        """Seal the next chunk (at most 1 MiB). Raises EnvelopeError (REPLY_ENDED, CHUNK_TOO_LARGE)."""
        if self._ended:
            raise EnvelopeError("reply has ended", reason="REPLY_ENDED")
        if len(chunk) > MAX_CHUNK_BYTES:
            raise EnvelopeError("reply chunk is too large", reason="CHUNK_TOO_LARGE")
        self._ended = last
        sequence, self._sequence = self._sequence, self._sequence + 1
        plain = (_LAST if last else _MORE) + chunk
        sealed = self._aead.encrypt(_nonce(sequence), plain, self._bound)
        opening, self._opening = self._opening, None
        return sealed if opening is None else opening + sealed


class ReplyOpener(Uncopyable):
    """The client's end of one reply. Anything but the next sealed chunk ends it for good."""

    def __init__(self, reply_key: X25519PrivateKey, info: RequestInfo, request_digest: bytes) -> None:
        self._reply_key = reply_key
        self._bound = _reply_info(info, request_digest)
        self._aead: ChaCha20Poly1305 | None = None
        self._sequence = 0
        self._ended = self._complete = False

    @property
    def complete(self) -> bool:
        """Whether the last chunk has come: a stream that ends before it was cut off."""
        return self._complete

    def open(self, sealed: bytes) -> tuple[bytes, bool]:
        """The next chunk, and whether it is the last.

        Raises EnvelopeError (REPLY_ENDED, CHUNK_TOO_LARGE, ENVELOPE_REFUSED).
        """
        if self._ended:
            raise EnvelopeError("reply has ended", reason="REPLY_ENDED")
        self._ended = True
        opening = KEM.X25519.enc_length() + _KEY_BYTES + _TAG_BYTES
        if len(sealed) > MAX_CHUNK_BYTES + opening + _TAG_BYTES + 1:
            raise EnvelopeError("reply chunk is too large", reason="CHUNK_TOO_LARGE")
        try:
            if self._aead is None:
                stream_key = _CLASSIC.decrypt(sealed[:opening], self._reply_key, self._bound)
                self._aead, sealed = ChaCha20Poly1305(stream_key), sealed[opening:]
            plain = self._aead.decrypt(_nonce(self._sequence), sealed, self._bound)
        except (InvalidTag, ValueError):
            raise _refused() from None
        if plain[:1] not in (_MORE, _LAST):
            raise _refused()
        self._sequence += 1
        self._ended = self._complete = plain[:1] == _LAST
        return plain[1:], self._complete


class ReplayGuard:
    """Request ids that a head has taken: single use per epoch until they expire.

    Bounded: when it is full of live ids, new requests are refused rather than old ids forgotten.
    """

    def __init__(self, capacity: int = 65536, *, clock: Clock = wall_clock) -> None:
        self._capacity = capacity
        self._clock = clock
        self._forgotten = 0
        """Nothing that expires by then is taken: of these, ids were forgotten."""
        self._seen: OrderedDict[bytes, tuple[int, bytes, int]] = OrderedDict()

    def check_times(self, info: RequestInfo) -> None:
        """Require a request that lives, and for an hour at most. Raises EnvelopeError (ENVELOPE_EXPIRED)."""
        now = self._clock()
        if not max(now, self._forgotten) < info.expires <= now + MAX_LIFETIME_SECONDS + SKEW_SECONDS:
            raise EnvelopeError(
                "sealed request has expired, or expires too far ahead",
                reason="ENVELOPE_EXPIRED",
                hint="compare the clocks",
            )

    def claim(self, info: RequestInfo, digest: bytes, epoch: int) -> None:
        """Take a request's id: once, or again in a later epoch if the envelope is the very same.

        Raises EnvelopeError (ENVELOPE_REPLAYED), ResourceExhausted (REPLAY_GUARD_FULL).
        """
        seen = self._seen.get(info.request_id)
        if seen is not None:
            _, known, last_epoch = seen
            if known != digest or epoch <= last_epoch:
                raise EnvelopeError("sealed request was taken before", reason="ENVELOPE_REPLAYED")
        elif len(self._seen) >= self._capacity:
            self._forget_expired()
            if len(self._seen) >= self._capacity:
                raise ResourceExhausted(
                    "too many sealed requests are alive", reason="REPLAY_GUARD_FULL", hint="try again later"
                )
        self._seen[info.request_id] = (info.expires, digest, epoch)

    def _forget_expired(self) -> None:
        now = self._clock()
        for request_id in [name for name, (expires, _, _) in self._seen.items() if expires <= now]:
            self._forgotten = max(self._forgotten, self._seen.pop(request_id)[0])


def _recipient(sealing_key: bytes) -> tuple[Suite, _PublicKey]:
    try:
        if len(sealing_key) == _KEY_BYTES:
            return _CLASSIC, X25519PublicKey.from_public_bytes(sealing_key)
        if len(sealing_key) == _MLKEM_BYTES + _KEY_BYTES:
            mlkem = MLKEM768PublicKey.from_public_bytes(sealing_key[:_MLKEM_BYTES])
            x25519 = X25519PublicKey.from_public_bytes(sealing_key[_MLKEM_BYTES:])
            return _HYBRID, MLKEM768X25519PublicKey(mlkem, x25519)
    except ValueError:
        pass
    raise InvalidInput("sealing key is malformed", reason="BAD_SEALING_KEY")


def _reply_info(info: RequestInfo, request_digest: bytes) -> bytes:
    return pack_fields(_REPLY_PROTOCOL, info.encode(), request_digest)


def _nonce(sequence: int) -> bytes:
    return sequence.to_bytes(12, "big")


def _refused() -> EnvelopeError:
    return EnvelopeError("sealed message cannot be decrypted", reason="ENVELOPE_REFUSED")
