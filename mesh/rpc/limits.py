"""Token buckets in a table of bounded size, and the names under which callers are counted."""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections import OrderedDict

from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.errors import ResourceExhausted

TABLE_SIZE = 16_384
_ROUNDING = 1e-9


class Buckets:
    """One token bucket per name: `burst` at once, `rate` per second in the long run.

    Each bucket is one time, as in the generic cell rate algorithm (ITU-T I.371). A name that was dropped to
    make room begins with a full bucket at its next request.
    """

    def __init__(
        self, rate: float, burst: int, *, size: int = TABLE_SIZE, clock: Clock = monotonic_clock
    ) -> None:
        self._interval = 1.0 / rate
        self._slack = self._interval * (burst - 1)
        self._size = size
        self._clock = clock
        self._empty_until: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._empty_until)

    def take(self, name: str, count: int = 1) -> float:
        """Takes `count` tokens and returns 0 if the bucket holds at least one; else returns the seconds until
        it does. The bucket may go into debt, and gives nothing until the debt is paid."""
        now = self._clock()
        due = max(self._empty_until.get(name, now), now)
        wait = due - self._slack - now
        if wait > _ROUNDING:
            return wait
        self._empty_until[name] = due + count * self._interval
        self._empty_until.move_to_end(name)
        if len(self._empty_until) > self._size:
            self._empty_until.popitem(last=False)
        return 0.0

    def check(self, name: str, count: int = 1) -> None:
        """Takes as `take` does. Raises ResourceExhausted (RATE_LIMITED) for an empty bucket."""
        wait = self.take(name, count)
        if wait:
            raise too_fast(wait)

    def give_back(self, name: str) -> None:
        """Undoes one `take`."""
        if name in self._empty_until:
            self._empty_until[name] -= self._interval


def too_fast(wait: float) -> ResourceExhausted:
    """The error for an empty bucket."""
    return ResourceExhausted(
        "there are too many requests",
        hint="try again later",
        reason="RATE_LIMITED",
        retry_after=max(1, round(wait + 0.5)),
    )


def peer_name(address: str) -> str:
    """The name under which a caller's network is counted: its IPv4 address, or its IPv6 network of 64
    bits."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False).network_address)


def grpc_peer_name(peer: str) -> str:
    """`peer_name` of a gRPC peer string such as "ipv4:192.0.2.7:41234" or "ipv6:%5B::1%5D:41234"."""
    return peer_name(grpc_peer_host(peer))


def grpc_peer_host(peer: str) -> str:
    """The host in a gRPC peer string; empty where there is none."""
    kind, _, address = urllib.parse.unquote(peer).partition(":")
    host = address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""
    return host.removeprefix("::ffff:") if "." in host else host
