"""Nonces for callers who have not yet proved anything."""

from __future__ import annotations

import hmac
import secrets
import struct
from collections import OrderedDict

from mesh.attestation import NONCE_BYTES
from mesh.clock import Clock

_TIME = struct.Struct(">d")
_MAC_BYTES = 16


class Nonces:
    """Nonces that say themselves when they were handed out, under a MAC: nothing is kept of those that are
    open, so nobody can use up the room for others. The newest that were used are known and refused; where
    single use matters beyond that, it is the join token's.
    """

    _MAX_USED = 4096

    def __init__(self, *, lifetime: float, clock: Clock) -> None:
        self._lifetime = lifetime
        self._clock = clock
        self._key = secrets.token_bytes(_MAC_BYTES)
        self._used: OrderedDict[bytes, None] = OrderedDict()

    def issue(self) -> bytes:
        """A fresh nonce."""
        content = _TIME.pack(self._clock()) + secrets.token_bytes(NONCE_BYTES - _TIME.size - _MAC_BYTES)
        return content + self._mac(content)

    def use(self, nonce: bytes) -> bool:
        """Whether this nonce was handed out here, within its life, and not used yet; it is now."""
        content, mac = nonce[:-_MAC_BYTES], nonce[-_MAC_BYTES:]
        if len(nonce) != NONCE_BYTES or not hmac.compare_digest(mac, self._mac(content)):
            return False
        (made,) = _TIME.unpack_from(content)
        if nonce in self._used or self._clock() >= made + self._lifetime:
            return False
        self._used[nonce] = None
        if len(self._used) > self._MAX_USED:
            self._used.popitem(last=False)
        return True

    def _mac(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, "sha256")[:_MAC_BYTES]
