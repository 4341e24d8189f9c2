"""Keys apart from the algorithms: kinds, lengths, the uses of a signature, and one owner for each secret.

A program that only names a trust level or a label imports this and loads no cryptography.
"""

from __future__ import annotations

import enum
import hashlib
from typing import NoReturn

from sealring.mesh.errors import RecordError

KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
"""Lengths of every suite (`mesh/crypto/suites.py`)."""
_PAD = b"\x20" * 64


class KeyType(enum.StrEnum):
    """The place of a member's identity key: a file, or the Secure Enclave."""

    SOFTWARE = "software"
    SECURE_ENCLAVE = "secure_enclave"


class Label(enum.Enum):
    """Domain separation: what a signature by an identity key is for. Envelopes have types instead
    (`mesh/crypto/dsse.py`).

    The value is what is signed; it never changes once released.
    """

    JOIN = b"sealring/v1 join"
    ATTESTATION = b"sealring/v1 attestation"
    CHALLENGE = b"sealring/v1 challenge"
    HANDSHAKE = b"sealring/v1 handshake"
    CSR = b"sealring/v1 csr"
    CSR_BY_IDENTITY = b"sealring/v1 identity csr"
    CONNECTION = b"sealring/v1 connection"
    RENEWAL = b"sealring/v1 renewal"
    RECEIPT = b"sealring/v1 receipt"


def signing_input(label: Label, content: bytes) -> bytes:
    """The bytes that a key signs for `content` under `label`.

    `64 x 0x20 || label || 0x00 || SHA-256(content)` (the shape of TLS 1.3, RFC 8446 section 4.4.3), so that
    no signature made for one use can be shown for another.
    """
    return _PAD + label.value + b"\x00" + hashlib.sha256(content).digest()


class Uncopyable:
    """Objects with one owner: copying or pickling one would give a key two users.

    `copy`, `deepcopy` and `pickle` raise RecordError (KEY_COPIED).
    """

    __slots__ = ()

    def __copy__(self) -> NoReturn:
        raise _refusal(self)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise _refusal(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise _refusal(self)


def _refusal(thing: object) -> RecordError:
    return RecordError(f"{type(thing).__name__} cannot be copied", reason="KEY_COPIED")
