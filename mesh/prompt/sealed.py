"""Prompts sealed to the head of a ring, and its replies sealed to the client (HPKE, RFC 9180, base mode).

A request carries the client's one-time public key inside; the head answers with a stream key sealed to that,
and then chunks under a counter. The gateway in between sees lengths and the `RequestInfo`; both bind it.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import struct
from collections import Counter
from collections.abc import Callable
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
from sealring.mesh.crypto.keys import Uncopyable
from sealring.mesh.errors import EnvelopeError, InvalidInput, ResourceExhausted
from sealring.mesh.names import MAX_DEPLOYMENT_NAME
from sealring.mesh.prompt.validate import MAX_ENVELOPE_BYTES

REQUEST_ID_BYTES = 16
MAX_CHUNK_BYTES = 1 << 20
MAX_LIFETIME_SECONDS = 300
"""An envelope has to be opened by then. Longer than a gateway lets a request wait knowingly (240 s); a head
remembers each id for as long, so that less of them can be alive with every second more."""

_PROTOCOL = b"sealring/v1 envelope"
_REPLY_PROTOCOL = b"sealring/v1 reply"
_KEY_BYTES = 32
_HASH_BYTES = 32
_MLKEM_BYTES = 1184
_TAG_BYTES = 16
_MORE, _LAST = b"\x00", b"\x01"
_U64 = struct.Struct(">Q")
_FORGOTTEN_AT_ONCE = 1000
_SPANS = 32
"""Most spans of time of which a guard knows that it has forgotten ids."""

CLASSIC = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
HYBRID = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
"""The HPKE suites of sealing keys; replies are under the first."""

_PrivateKey: TypeAlias = X25519PrivateKey | MLKEM768X25519PrivateKey
_PublicKey: TypeAlias = X25519PublicKey | MLKEM768X25519PublicKey


@dataclass(frozen=True)
class RequestInfo:
    """The associated data of a sealed request, sent beside it in clear.

    `request_id` is 16 random bytes, `expires` seconds since 1970 (at most MAX_LIFETIME_SECONDS ahead),
    `roster_hash` that of the roster by which the client chose the head.
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
        self, sealed: bytes, info: RequestInfo, guard: ReplayGuard, *, epoch: int = 0, client: str = ""
    ) -> OpenedRequest:
        """Open a request at the head.

        `guard` is one per node; `epoch` counts the ring's lives, so that the same envelope may come again
        after a fault, and only then. `client` is whose ids it counts among. Raises EnvelopeError
        (ENVELOPE_EXPIRED, ENVELOPE_REPLAYED, ENVELOPE_REFUSED, ENVELOPE_TOO_LARGE), ResourceExhausted
        (REPLAY_GUARD_FULL).
        """
        if len(sealed) > MAX_ENVELOPE_BYTES:
            raise EnvelopeError("sealed request is too large", reason="ENVELOPE_TOO_LARGE")
        guard.check_times(info)
        try:
            plain = (HYBRID if self._hybrid else CLASSIC).decrypt(sealed, self._key, info.encode())
            reply_key, body = unpack_fields(plain, count=2, max_bytes=MAX_ENVELOPE_BYTES)
            if len(reply_key) != _KEY_BYTES:
                raise FormatError("no reply key")
        except (InvalidTag, ValueError):
            raise _refused() from None
        digest = hashlib.sha256(sealed).digest()
        reply = ReplySealer(reply_key, info, digest)
        return OpenedRequest(body, reply, guard.claim(info, digest, epoch, client))

    def __repr__(self) -> str:
        return f"SealingKey(hybrid={self._hybrid})"


@dataclass(frozen=True, repr=False)
class OpenedRequest:
    """An opened request: the body, and the means to answer.

    `unclaim` releases the request's id, for a request that is refused before its first answer.
    """

    body: bytes
    reply: ReplySealer
    unclaim: Callable[[], None]


def seal_request(sealing_key: bytes, info: RequestInfo, body: bytes) -> tuple[bytes, ReplyOpener]:
    """Seal `body` to a head's sealing key from a verified roster; the opener is for this request's reply.

    Raises InvalidInput (BAD_SEALING_KEY, REQUEST_TOO_LARGE).
    """
    if len(body) > MAX_ENVELOPE_BYTES - 4096:
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
            self._opening: bytes | None = CLASSIC.encrypt(stream_key, recipient, self._bound)
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
        self._ended = False

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
                stream_key = CLASSIC.decrypt(sealed[:opening], self._reply_key, self._bound)
                self._aead, sealed = ChaCha20Poly1305(stream_key), sealed[opening:]
            plain = self._aead.decrypt(_nonce(self._sequence), sealed, self._bound)
        except (InvalidTag, ValueError):
            raise _refused() from None
        if plain[:1] not in (_MORE, _LAST):
            raise _refused()
        self._sequence += 1
        self._ended = plain[:1] == _LAST
        return plain[1:], self._ended


@dataclass(frozen=True, slots=True)
class _Claim:
    """A used request id: the envelope's expiry and hash, the last epoch and the client."""

    expires: int
    digest: bytes
    epoch: int
    client: str


class ReplayGuard:
    """Request ids that a head has accepted: single use per epoch until they expire.

    Bounded: while there is no room, new requests are refused rather than old ids forgotten. A client may have
    as many as are free, so one takes half of the room at most, and any other still finds some.
    """

    def __init__(self, capacity: int = 65536, *, clock: Clock = wall_clock) -> None:
        """`capacity` is of all clients together: half of it is a key that makes 100 requests a second, as
        many as gateways allow unless they are set otherwise, for MAX_LIFETIME_SECONDS. An id takes 350 bytes.
        """
        self._capacity = capacity
        self._clock = clock
        self._forgotten: list[tuple[int, int]] = []
        """First and last second of spans in which ids were forgotten: nothing is taken that expires there. A
        clock that was ahead leaves a span of its own, and the time before that one is free."""
        self._seen: dict[bytes, _Claim] = {}
        self._ending: dict[int, set[bytes]] = {}
        """The ids by the second in which they expire: as many seconds as an envelope may live, at most."""
        self._held: Counter[str] = Counter()

    def check_times(self, info: RequestInfo) -> None:
        """Require a request that lives, and not for too long. Raises EnvelopeError (ENVELOPE_EXPIRED)."""
        now, forgotten = self._clock(), any(first <= info.expires <= last for first, last in self._forgotten)
        if forgotten or not now < info.expires <= now + MAX_LIFETIME_SECONDS + SKEW_SECONDS:
            raise EnvelopeError(
                "sealed request has expired, or expires too far ahead",
                reason="ENVELOPE_EXPIRED",
                hint="compare the clocks",
            )

    def claim(self, info: RequestInfo, digest: bytes, epoch: int, client: str = "") -> Callable[[], None]:
        """Take a request's id: once, or again in a later epoch if the envelope is the very same.

        The result undoes it. Raises EnvelopeError (ENVELOPE_REPLAYED), ResourceExhausted (REPLAY_GUARD_FULL).
        """
        self._forget_expired()
        before = self._seen.get(info.request_id)
        if before is not None:
            if before.digest != digest or epoch <= before.epoch:
                raise EnvelopeError("sealed request was taken before", reason="ENVELOPE_REPLAYED")
            self._remove(info.request_id)
        elif self._held[client] >= self._capacity - len(self._seen):
            raise ResourceExhausted(
                "too many sealed requests are alive", reason="REPLAY_GUARD_FULL", hint="try again later"
            )
        made = _Claim(info.expires, digest, epoch, client if before is None else before.client)
        self._add(info.request_id, made)

        def undo() -> None:
            if self._seen.get(info.request_id) is made:
                self._remove(info.request_id)
                if before is not None:
                    self._add(info.request_id, before)

        return undo

    def _add(self, request_id: bytes, claim: _Claim) -> None:
        self._seen[request_id] = claim
        self._ending.setdefault(claim.expires, set()).add(request_id)
        self._held[claim.client] += 1

    def _remove(self, request_id: bytes) -> None:
        claim = self._seen.pop(request_id)
        ending = self._ending[claim.expires]
        ending.discard(request_id)
        if not ending:
            del self._ending[claim.expires]
        self._held[claim.client] -= 1
        if not self._held[claim.client]:
            del self._held[claim.client]

    def _forget_expired(self) -> None:
        """Forgets ids that have expired, a thousand at most: others wait for this on the same event loop."""
        now, left = self._clock(), _FORGOTTEN_AT_ONCE
        while left > 0 and self._ending and (first := min(self._ending)) <= now:
            self._forget(first)
            for request_id in list(itertools.islice(self._ending[first], left)):
                self._remove(request_id)
                left -= 1

    def _forget(self, second: int) -> None:
        """Nothing that expires in this second is taken any more. Spans become one that are near each other,
        and else the earliest, where they are too many."""
        spans = sorted({*self._forgotten, (second, second)})
        gaps = (after[0] - before[1] for before, after in itertools.pairwise(spans))
        near = next((at for at, gap in enumerate(gaps) if gap <= MAX_LIFETIME_SECONDS), None)
        if near is not None or len(spans) > _SPANS:
            at = near or 0
            spans[at : at + 2] = [(spans[at][0], max(spans[at][1], spans[at + 1][1]))]
        self._forgotten = spans


def _recipient(sealing_key: bytes) -> tuple[Suite, _PublicKey]:
    try:
        if len(sealing_key) == _KEY_BYTES:
            return CLASSIC, X25519PublicKey.from_public_bytes(sealing_key)
        if len(sealing_key) == _MLKEM_BYTES + _KEY_BYTES:
            mlkem = MLKEM768PublicKey.from_public_bytes(sealing_key[:_MLKEM_BYTES])
            x25519 = X25519PublicKey.from_public_bytes(sealing_key[_MLKEM_BYTES:])
            return HYBRID, MLKEM768X25519PublicKey(mlkem, x25519)
    except ValueError:
        pass
    raise InvalidInput("sealing key is malformed", reason="BAD_SEALING_KEY")


def _reply_info(info: RequestInfo, request_digest: bytes) -> bytes:
    return pack_fields(_REPLY_PROTOCOL, info.encode(), request_digest)


def _nonce(sequence: int) -> bytes:
    return sequence.to_bytes(12, "big")


def _refused() -> EnvelopeError:
    return EnvelopeError("sealed message cannot be decrypted", reason="ENVELOPE_REFUSED")
