"""Limits and nonces for callers that have not authenticated yet."""

from __future__ import annotations

import hmac
import math
import secrets
import struct
from collections import OrderedDict
from typing import Any

from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.rpc.limits import Buckets, grpc_peer_name
from sealring.mesh.trust.attestation import NONCE_BYTES
from sealring.v1 import membership_pb2

_TIME = struct.Struct(">d")
_MAC_BYTES = 16
_PER_SECOND = 10
_AT_ONCE = 200


class Nonces:
    """Nonces that carry their issue time under a MAC.

    Open nonces take no memory, so a stranger cannot use up the room of others. The newest used ones are
    remembered and refused. With each that is forgotten, all nonces that are not younger are refused as well:
    a caller may have to ask for a fresh one.
    """

    _MAX_USED = 4096

    def __init__(self, *, lifetime: float, clock: Clock) -> None:
        self._lifetime = lifetime
        self._clock = clock
        self._key = secrets.token_bytes(_MAC_BYTES)
        self._used: OrderedDict[bytes, float] = OrderedDict()
        self._forgotten = -math.inf
        """Used nonces that were made by then may be forgotten."""

    def issue(self) -> bytes:
        """A fresh nonce."""
        content = _TIME.pack(self._clock()) + secrets.token_bytes(NONCE_BYTES - _TIME.size - _MAC_BYTES)
        return content + self._mac(content)

    def use(self, nonce: bytes) -> bool:
        """Uses a nonce. False if it was not issued here, is too old, or was or may have been used before."""
        content, mac = nonce[:-_MAC_BYTES], nonce[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(content)):  # also refuses nonces of another length
            return False
        (made,) = _TIME.unpack_from(content)
        if nonce in self._used or made <= self._forgotten or self._clock() >= made + self._lifetime:
            return False
        self._used[nonce] = made
        if len(self._used) > self._MAX_USED:
            self._forgotten = max(self._forgotten, self._used.popitem(last=False)[1])
        return True

    def _mac(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, "sha256")[:_MAC_BYTES]


class Attempts:
    """The attempts of strangers at one service: a limited rate for each network, and a nonce for each."""

    def __init__(self, *, lifetime: float, clock: Clock = monotonic_clock) -> None:
        """`lifetime` is that of a nonce, in seconds."""
        self._nonces = Nonces(lifetime=lifetime, clock=clock)
        self._limit = Buckets(_PER_SECOND, _AT_ONCE, clock=clock)

    def admit(self, context: Any) -> None:
        """Counts a call. Raises ResourceExhausted (RATE_LIMITED)."""
        self._limit.check(grpc_peer_name(context.peer()))

    def begin(self, context: Any) -> membership_pb2.GetNonceResponse:
        """A fresh nonce for one attempt. Raises ResourceExhausted (RATE_LIMITED)."""
        self.admit(context)
        return membership_pb2.GetNonceResponse(nonce=self._nonces.issue())

    def use(self, nonce: bytes) -> bool:
        """As `Nonces.use`."""
        return self._nonces.use(nonce)
