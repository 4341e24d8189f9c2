"""SPAKE2: a strong key for two that share a short code (RFC 9382, SPAKE2-edwards25519-SHA512-HKDF-HMAC).

A listener learns nothing about the code. An attacker that takes part without it can test one code for each
exchange. A share outside of the prime-order subgroup is refused, so that the cofactor of 8 gives nobody a
second one. Points and scalars are libsodium's, in constant time.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from nacl import bindings as sodium
from nacl.exceptions import CryptoError

from sealring.mesh.crypto.keys import Uncopyable
from sealring.mesh.errors import HandshakeError

SHARE_BYTES = 32
M = bytes.fromhex("d048032c6ea0b6d697ddc2e86bda85a33adac920f1bf18e1b0c6d166a5cecdaf")
N = bytes.fromhex("d3bfb518f44f3430f29d0c92af503865a1ed3281dc69b35dd868ba85f886c4ab")
"""The points of RFC 9382, section 6, whose discrete logarithms nobody knows."""

_COFACTOR = (8).to_bytes(32, "little")
_CONFIRMATION = b"ConfirmationKeys"


class Party(enum.Enum):
    """A role: A sends the first share and the first confirmation."""

    A = "A"
    B = "B"


@dataclass(frozen=True)
class Agreed:
    """The outcome of an exchange. Nothing counts until the peer's confirmation has been compared."""

    key: bytes = field(repr=False)
    own_confirmation: bytes = field(repr=False)
    peer_confirmation: bytes = field(repr=False)

    def confirmed_by(self, confirmation: bytes) -> bool:
        """Whether the peer has the same code, identities and shares. Compares in constant time."""
        return hmac.compare_digest(self.peer_confirmation, confirmation)


class Exchange(Uncopyable):
    """One side of one exchange. `share` goes to the peer, whose own `finish` takes, once."""

    def __init__(self, side: Party, code: bytes, identities: tuple[bytes, bytes], context: bytes) -> None:
        """`identities` are those of A and B; both sides give the same, and the same `context`."""
        self._side = side
        self._identities = identities
        self._context = context
        # 512 bits reduced by the group's order of 252: the bias is below 2^-256 (RFC 9382, section 3.2).
        self._password = sodium.crypto_core_ed25519_scalar_reduce(hashlib.sha512(code).digest())
        self._private: bytes | None = sodium.crypto_core_ed25519_scalar_reduce(secrets.token_bytes(64))
        public = sodium.crypto_scalarmult_ed25519_base_noclamp(self._private)
        self.share = sodium.crypto_core_ed25519_add(public, self._blind(M if side is Party.A else N))

    def finish(self, share: bytes) -> Agreed:
        """The key under the peer's share. Raises HandshakeError (BAD_SHARE, SHARE_USED)."""
        private, self._private = self._private, None
        if private is None:
            raise HandshakeError("an exchange takes one share", reason="SHARE_USED")
        if len(share) != SHARE_BYTES or not sodium.crypto_core_ed25519_is_valid_point(share):
            raise _bad_share()
        try:
            theirs = sodium.crypto_core_ed25519_sub(share, self._blind(N if self._side is Party.A else M))
            scalar = sodium.crypto_core_ed25519_scalar_mul(private, _COFACTOR)
            secret = sodium.crypto_scalarmult_ed25519_noclamp(scalar, theirs)  # refuses the neutral element
        except CryptoError:
            raise _bad_share() from None
        shares = (self.share, share) if self._side is Party.A else (share, self.share)
        fields = (*self._identities, *shares, secret, self._password[::-1])
        key, *confirmations = derive(fields, self._context)
        if self._side is Party.B:
            confirmations.reverse()
        return Agreed(key, *confirmations)

    def _blind(self, point: bytes) -> bytes:
        return sodium.crypto_scalarmult_ed25519_noclamp(self._password, point)


def derive(
    fields: Sequence[bytes], context: bytes, algorithm: hashes.HashAlgorithm = hashes.SHA512()
) -> tuple[bytes, bytes, bytes]:
    """The key, and the confirmations of A and of B, each half as long as the hash or as long (RFC 9382,
    section 4).

    `fields` are the transcript's: A, B, A's share, B's share, the secret, and the password as a big-endian
    number. The RFC has test vectors of P-256 and SHA-256 only, for which the hash is an argument.
    """
    transcript = b"".join(len(one).to_bytes(8, "little") + one for one in fields)
    digest = hashlib.new(algorithm.name, transcript).digest()
    half = len(digest) // 2
    key, base = digest[:half], digest[half:]
    confirming = HKDF(algorithm, len(digest), None, _CONFIRMATION + context).derive(base)
    return (
        key,
        hmac.digest(confirming[:half], transcript, algorithm.name),
        hmac.digest(confirming[half:], transcript, algorithm.name),
    )


def _bad_share() -> HandshakeError:
    return HandshakeError("the share is no point that can be used", reason="BAD_SHARE")
