"""The links between nodes, as they measured them: the newest figure of each pair, in memory.

A figure is a hint. A node that lies about it gets a place in a ring that it does not deserve, or none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sealring.coordinator.planning.links import NO_WAY, Link, Network
from sealring.mesh.clock import Clock
from sealring.mesh.errors import InvalidInput
from sealring.mesh.system.addresses import parse_address
from sealring.v1 import admin_pb2

_MAX_ROUND_TRIP_US = 60_000_000
_MAX_RATE = 1 << 40


@dataclass(frozen=True)
class Figure:
    """What `caller` measured of its fastest way to `called`, `at` that wall clock; no host without a way."""

    caller: str
    called: str
    host: str
    round_trip_us: int
    bytes_per_second: int
    at: float

    @property
    def link(self) -> Link:
        if not self.host:
            return NO_WAY
        return Link(self.round_trip_us / 2e6, float(self.bytes_per_second))


class Links:
    """The newest figure of each pair of members."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._found: dict[frozenset[str], Figure] = {}

    def note(self, caller: str, called: str, address: str, round_trip_us: int, bytes_per_second: int) -> None:
        """Takes a figure, of an epoch that formed or an answer; one that cannot be is dropped."""
        try:
            host, _ = parse_address(address)
        except InvalidInput:
            return
        possible = 0 < bytes_per_second <= _MAX_RATE and round_trip_us <= _MAX_ROUND_TRIP_US
        if caller != called and possible:
            self._keep(Figure(caller, called, host, round_trip_us, bytes_per_second, self._clock()))

    def failed(self, caller: str, called: str) -> None:
        """Notes that a member found no way to another."""
        self._keep(Figure(caller, called, "", 0, 0, self._clock()))

    def network(self) -> Network:
        """The links as plans use them."""
        return Network(links={pair: one.link for pair, one in self._found.items()})

    def described(self, enrolled: Collection[str]) -> Iterator[admin_pb2.NodeLink]:
        """The figures for operators; those of nodes that are not `enrolled` any more are forgotten."""
        self._found = {pair: one for pair, one in self._found.items() if pair.issubset(enrolled)}
        for one in self._found.values():
            yield admin_pb2.NodeLink(
                caller=one.caller,
                called=one.called,
                host=one.host,
                round_trip_us=one.round_trip_us,
                bytes_per_second=one.bytes_per_second,
                measured=int(one.at),
            )

    def _keep(self, figure: Figure) -> None:
        self._found[frozenset((figure.caller, figure.called))] = figure
