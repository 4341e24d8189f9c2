"""Token buckets and counters of what is under way, in tables that cannot grow without bound."""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from mesh.clock import Clock, monotonic_clock
from mesh.errors import ResourceExhausted

TABLE_SIZE = 16_384


class Buckets:
    """One token bucket per name: `burst` at once, `rate` per second in the long run.

    Kept as one time per name, as by the generic cell rate algorithm (ITU-T I.371). A name that has to make
    room for others begins with a full bucket when it comes again.
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

    def take(self, name: str) -> float:
        """Takes a token and returns 0, or takes none and returns the seconds until there is one."""
        now = self._clock()
        due = max(self._empty_until.get(name, now), now)
        wait = due - self._slack - now
        if wait > 0:
            return wait
        self._empty_until[name] = due + self._interval
        self._empty_until.move_to_end(name)
        if len(self._empty_until) > self._size:
            self._empty_until.popitem(last=False)
        return 0.0

    def give_back(self, name: str) -> None:
        """Undoes one `take`."""
        if name in self._empty_until:
            self._empty_until[name] -= self._interval


class UnderWay:
    """How much each name has under way, never more than `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: Counter[str] = Counter()

    @contextmanager
    def one_more(self, name: str) -> Iterator[None]:
        """Counts the block. Raises ResourceExhausted (TOO_MANY_AT_ONCE)."""
        if self._counts[name] >= self._limit:
            raise ResourceExhausted(
                f"{self._limit} requests are under way already",
                hint="wait until some have ended",
                reason="TOO_MANY_AT_ONCE",
                retry_after=1,
            )
        self._counts[name] += 1
        try:
            yield
        finally:
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]


def too_fast(wait: float) -> ResourceExhausted:
    """The error for an empty bucket."""
    return ResourceExhausted(
        "there are too many requests",
        hint="try again later",
        reason="RATE_LIMITED",
        retry_after=max(1, round(wait + 0.5)),
    )


def peer_name(address: str) -> str:
    """By what a caller's network is told from others: an IPv4 address, or an IPv6 network of 64 bits."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False).network_address)
