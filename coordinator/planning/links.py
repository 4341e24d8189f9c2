"""How fast the links between members are, and the order of a ring that makes the most of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeVar

RECORD_BYTES = 1 << 18
"""Links are compared by the time of a record of this length, as a carrier compares the ways of one: between a
step's (a few KiB a row) and a prompt's chunk (MiB)."""

HOP, HOP_ON_METAL = 0.7e-3, 1.3e-3
"""Seconds from the end of a stage to the input of the next with no network between: 0.62 to 0.82 on 2 x H200
(`docs/performance/data/ring.json`). On Macs by estimate: one wait for the GPU, and four threads that take 50
to 150 us to wake. exo's pipeline was seen to take 0.6 ms over RDMA and 1.7 ms over TCP."""

WORTH = 1.1
"""The factor from which a ring or a shape counts as faster than another: estimates are no more exact."""


@dataclass(frozen=True)
class Link:
    """A link between two machines: seconds one way for a small message, and bytes a second."""

    latency: float
    bytes_per_second: float


ASSUMED = Link(1e-4, 1.25e9)
"""10 Gbit/s Ethernet between processes, where nobody measured it."""

NO_WAY = Link(1.0, 1e6)
"""Between machines that found no way to each other: slower than any, so that no ring is ordered that way."""


class Member(Protocol):
    """A member of a ring, or a machine that may become one."""

    @property
    def id(self) -> str: ...


M = TypeVar("M", bound=Member)


@dataclass(frozen=True)
class Network:
    """`links` by pairs of machines' ids; all other pairs have `other`."""

    other: Link = ASSUMED
    links: Mapping[frozenset[str], Link] = field(default_factory=dict)

    def between(self, first: str, second: str) -> Link:
        return self.links.get(frozenset((first, second)), self.other)

    def slowest(self, pairs: Iterable[tuple[Member, Member]]) -> Link:
        """The worst latency and the worst bandwidth of these pairs; of no pairs, nothing takes time."""
        links = [self.between(first.id, second.id) for first, second in pairs if first.id != second.id]
        return Link(
            max((one.latency for one in links), default=0.0),
            min((one.bytes_per_second for one in links), default=float("inf")),
        )

    def round_seconds(self, ring: Sequence[Member]) -> float:
        """The time of a record's hops along a ring in this order, and of tokens back to its head."""
        if len(ring) < 2:
            return 0.0
        links = [self.between(one.id, other.id) for one, other in pairwise(ring)]
        records = sum(HOP + one.latency + RECORD_BYTES / one.bytes_per_second for one in links)
        return records + HOP + self.between(ring[-1].id, ring[0].id).latency

    def fastest_first(self, orders: Sequence[list[M]]) -> list[list[M]]:
        """The orders by their time; those that are no slower than the fastest by WORTH stay as they came."""
        if not self.links:
            return list(orders)
        times = [self.round_seconds(order) for order in orders]
        enough = WORTH * min(times, default=0.0)
        ranked = sorted(range(len(orders)), key=lambda one: max(times[one], enough))
        return [orders[one] for one in ranked]

    def chain(self, members: Sequence[M]) -> list[M]:
        """The members from the first of them on, each followed by the one to which a record is fastest."""
        left = list(members)
        found = [left.pop(0)] if left else []
        while left:
            last = found[-1]
            following = min(left, key=lambda one: self.round_seconds([last, one]))
            left.remove(following)
            found.append(following)
        return found
