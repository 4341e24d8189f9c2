"""Bounds for callers who have not yet proved anything: how often they may call, and nonces used once."""

from __future__ import annotations

import secrets
from collections import OrderedDict

from mesh.attestation import NONCE_BYTES
from mesh.clock import Clock
from mesh.errors import ResourceExhausted


class RateLimit:
    """A token bucket per caller: `burst` calls at once, `per_second` on average. Remembers 4096 callers."""

    _MAX_CALLERS = 4096

    def __init__(self, *, per_second: float, burst: int, clock: Clock) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def check(self, caller: str) -> None:
        """Count one call. Raises ResourceExhausted (RATE_LIMIT)."""
        now = self._clock()
        left, at = self._buckets.pop(caller, (float(self._burst), now))
        left = min(float(self._burst), left + (now - at) * self._per_second)
        self._buckets[caller] = (max(0.0, left - 1), now)
        if len(self._buckets) > self._MAX_CALLERS:
            self._buckets.popitem(last=False)
        if left < 1:
            raise ResourceExhausted("too many attempts", hint="wait a few seconds", reason="RATE_LIMIT")


class Nonces:
    """Nonces that were handed out and may be used once within their life."""

    _MAX_OPEN = 4096

    def __init__(self, *, lifetime: float, clock: Clock) -> None:
        self._lifetime = lifetime
        self._clock = clock
        self._open: OrderedDict[bytes, float] = OrderedDict()

    def issue(self) -> bytes:
        """A fresh nonce. Raises ResourceExhausted (RATE_LIMIT) when too many are open."""
        now = self._clock()
        while self._open and next(iter(self._open.values())) <= now:
            self._open.popitem(last=False)
        if len(self._open) >= self._MAX_OPEN:
            raise ResourceExhausted("too many joins at once", hint="wait a minute", reason="RATE_LIMIT")
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._open[nonce] = now + self._lifetime
        return nonce

    def use(self, nonce: bytes) -> bool:
        """Whether this nonce was open; it is not afterwards."""
        expires = self._open.pop(nonce, None)
        return expires is not None and self._clock() < expires


def caller_of(peer: str) -> str:
    """The host part of a gRPC peer string such as `ipv4:127.0.0.1:41234`."""
    return peer.rpartition(":")[0][:128]
