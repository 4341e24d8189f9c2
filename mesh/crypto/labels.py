"""Domain separation: one label per use of an identity key; envelopes have their types
(`mesh/crypto/dsse.py`).

Every such signature is over `64 x 0x20 || label || 0x00 || SHA-256(content)` (the shape of TLS 1.3, RFC 8446
section 4.4.3), so that no signature made for one use can be shown for another.
"""

from __future__ import annotations

import enum
import hashlib

_PAD = b"\x20" * 64


class Label(enum.Enum):
    """What a signature is for. The value is what is signed; it never changes once released."""

    JOIN = b"sealring/v1 join"
    ATTESTATION = b"sealring/v1 attestation"
    CHALLENGE = b"sealring/v1 challenge"
    HANDSHAKE = b"sealring/v1 handshake"
    CSR = b"sealring/v1 csr"
    CSR_BY_IDENTITY = b"sealring/v1 identity csr"
    CONNECTION = b"sealring/v1 connection"
    RENEWAL = b"sealring/v1 renewal"


def signing_input(label: Label, content: bytes) -> bytes:
    """The bytes that a key signs for `content` under `label`."""
    return _PAD + label.value + b"\x00" + hashlib.sha256(content).digest()
