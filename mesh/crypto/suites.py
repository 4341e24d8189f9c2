"""Link suites: the key agreement and AEAD that a handshake settles on, by name and by one-byte code.

Agreement is X25519 (RFC 7748), alone or with ML-KEM-768 (FIPS 203) beside it, both secrets concatenated with
ML-KEM first as in X25519MLKEM768. AEADs are ChaCha20-Poly1305 (RFC 8439) and AES-256-GCM (SP 800-38D).
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Iterable
from typing import TypeAlias

from cryptography.hazmat.backends.openssl.backend import backend
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from sealring.mesh.crypto.keys import KEY_BYTES
from sealring.mesh.errors import HandshakeError, InvalidInput

Aead: TypeAlias = ChaCha20Poly1305 | AESGCM

_X25519_BYTES = 32
_MLKEM_PUBLIC_BYTES = 1184
_MLKEM_CIPHERTEXT_BYTES = 1088
_P25519 = (1 << 255) - 19


class Group(enum.IntEnum):
    """A key agreement. The value is its code on the wire."""

    X25519 = 1
    X25519_MLKEM768 = 2

    @property
    def initiator_share_bytes(self) -> int:
        """The length of what the initiator sends."""
        return _X25519_BYTES + (_MLKEM_PUBLIC_BYTES if self is Group.X25519_MLKEM768 else 0)

    @property
    def responder_share_bytes(self) -> int:
        """The length of what the responder sends."""
        return _X25519_BYTES + (_MLKEM_CIPHERTEXT_BYTES if self is Group.X25519_MLKEM768 else 0)


class Suite(enum.StrEnum):
    """A link suite. The value is its name in rosters and reports."""

    X25519_CHACHA20POLY1305 = "x25519-chacha20poly1305"
    X25519_AES256GCM = "x25519-aes256gcm"
    HYBRID_CHACHA20POLY1305 = "x25519mlkem768-chacha20poly1305"
    HYBRID_AES256GCM = "x25519mlkem768-aes256gcm"

    @property
    def code(self) -> int:
        """The suite's byte on the wire."""
        return _CODES[self]

    @property
    def group(self) -> Group:
        """The suite's key agreement."""
        return Group.X25519_MLKEM768 if self.value.startswith("x25519mlkem768") else Group.X25519

    @property
    def supported(self) -> bool:
        """Whether this build of the cryptographic library has it (ML-KEM needs a recent one)."""
        return self.group is Group.X25519 or backend.mlkem_supported()

    def aead(self, key: bytes) -> Aead:
        """The suite's AEAD under a 32-byte key."""
        if len(key) != KEY_BYTES:
            raise InvalidInput("aead key is not 32 bytes", reason="BAD_KEY_LENGTH")
        return ChaCha20Poly1305(key) if self.value.endswith("chacha20poly1305") else AESGCM(key)

    @classmethod
    def from_code(cls, code: int) -> Suite:
        """The suite with this byte. Raises HandshakeError (UNKNOWN_SUITE)."""
        for suite, value in _CODES.items():
            if value == code:
                return suite
        raise HandshakeError("link suite is unknown", reason="UNKNOWN_SUITE")


_CODES = {
    Suite.X25519_CHACHA20POLY1305: 1,
    Suite.X25519_AES256GCM: 2,
    Suite.HYBRID_CHACHA20POLY1305: 3,
    Suite.HYBRID_AES256GCM: 4,
}

DEFAULT_SUITES: tuple[Suite, ...] = (
    Suite.HYBRID_AES256GCM,
    Suite.HYBRID_CHACHA20POLY1305,
    Suite.X25519_AES256GCM,
    Suite.X25519_CHACHA20POLY1305,
)
"""What a new cluster's roster lists. Links take the first."""


def parse_suites(names: Iterable[str]) -> tuple[Suite, ...]:
    """Suites by name, in order, at least one, none twice. Raises InvalidInput (UNKNOWN_SUITE, NO_SUITE)."""
    try:
        suites = tuple(Suite(name) for name in names)
    except ValueError:
        raise InvalidInput("link suite is unknown", reason="UNKNOWN_SUITE") from None
    if not suites or len(set(suites)) != len(suites):
        raise InvalidInput("link suites are none or repeated", reason="NO_SUITE")
    return suites


class InitiatorShare:
    """The initiator's ephemeral for one group: used for one agreement, then gone."""

    def __init__(self, x25519: X25519PrivateKey, mlkem: MLKEM768PrivateKey | None = None) -> None:
        self.group = Group.X25519 if mlkem is None else Group.X25519_MLKEM768
        self._x25519: X25519PrivateKey | None = x25519
        self._mlkem = mlkem
        self.public = x25519.public_key().public_bytes_raw()
        if self._mlkem is not None:
            self.public += self._mlkem.public_key().public_bytes_raw()

    @classmethod
    def generate(cls, group: Group) -> InitiatorShare:
        """Fresh keys for the group."""
        hybrid = group is Group.X25519_MLKEM768
        return cls(X25519PrivateKey.generate(), MLKEM768PrivateKey.generate() if hybrid else None)

    def agree(self, share: bytes) -> bytes:
        """The shared secret for the responder's share. Raises HandshakeError (BAD_SHARE, OWN_EPHEMERAL)."""
        private, self._x25519 = self._x25519, None
        if private is None or len(share) != self.group.responder_share_bytes:
            raise HandshakeError("ephemeral share has a wrong length or is used up", reason="BAD_SHARE")
        secret = agree_x25519(private, share[:_X25519_BYTES])
        if self._mlkem is None:
            return secret
        try:
            return self._mlkem.decapsulate(share[_X25519_BYTES:]) + secret
        except ValueError:
            raise HandshakeError("ephemeral share is malformed", reason="BAD_SHARE") from None


def respond_to_share(group: Group, share: bytes) -> tuple[bytes, bytes]:
    """The responder's share and the shared secret for an initiator's share.

    Raises HandshakeError (BAD_SHARE, OWN_EPHEMERAL).
    """
    if len(share) != group.initiator_share_bytes:
        raise HandshakeError("ephemeral share has a wrong length", reason="BAD_SHARE")
    private = X25519PrivateKey.generate()
    public = private.public_key().public_bytes_raw()
    secret = agree_x25519(private, share[:_X25519_BYTES])
    if group is Group.X25519:
        return public, secret
    try:
        mlkem_secret, ciphertext = MLKEM768PublicKey.from_public_bytes(share[_X25519_BYTES:]).encapsulate()
    except ValueError:
        raise HandshakeError("ephemeral share is malformed", reason="BAD_SHARE") from None
    return public + ciphertext, mlkem_secret + secret


def agree_x25519(private: X25519PrivateKey, peer: bytes) -> bytes:
    """The shared secret, 32 bytes. Stricter than RFC 7748, which takes shares that are not canonical.

    Raises HandshakeError (BAD_SHARE, OWN_EPHEMERAL).
    """
    if int.from_bytes(peer, "little") >= _P25519:
        raise HandshakeError("ephemeral share is not canonical", reason="BAD_SHARE")
    if hmac.compare_digest(private.public_key().public_bytes_raw(), peer):
        raise HandshakeError("peer sent my own ephemeral back", reason="OWN_EPHEMERAL")
    try:
        secret = private.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError:
        raise HandshakeError("ephemeral share has low order", reason="BAD_SHARE") from None
    if not any(secret):
        raise HandshakeError("ephemeral share has low order", reason="BAD_SHARE")
    return secret
