"""The newest figures of the links between nodes: bounded, and forgotten with their nodes."""

from __future__ import annotations

import pytest

from sealring.coordinator.nodes.links import Links
from sealring.coordinator.planning.links import ASSUMED, NO_WAY, Link


@pytest.fixture
def links() -> Links:
    return Links(clock=lambda: 7.5)


def test_the_newest_figure_of_a_pair_counts_whoever_measured(links: Links) -> None:
    links.note("a", "b", "10.0.0.2:9", 400, 10**8)
    assert links.network().between("b", "a") == Link(2e-4, 1e8)
    links.note("b", "a", "10.0.0.1:9", 600, 10**7)
    assert links.network().between("a", "b") == Link(3e-4, 1e7)
    (shown,) = links.described({"a", "b"})
    assert (shown.caller, shown.called, shown.host, shown.measured) == ("b", "a", "10.0.0.1", 7)
    links.failed("a", "b")
    assert links.network().between("a", "b") == NO_WAY
    assert links.network().between("a", "c") == ASSUMED
    assert [one.host for one in links.described({"a", "b"})] == [""]
    assert list(links.described({"a"})) == []
    assert links.network().between("a", "b") == ASSUMED, "forgotten with b"


@pytest.mark.parametrize(
    ("called", "address", "round_trip", "rate"),
    [
        ("a", "10.0.0.2:9", 1, 1),
        ("b", "nowhere", 1, 1),
        ("b", "\x1b[2J:9", 1, 1),
        ("b", "10.0.0.2:9", 60_000_001, 1),
        ("b", "10.0.0.2:9", 1, 0),
        ("b", "10.0.0.2:9", 1, (1 << 40) + 1),
    ],
)
def test_what_cannot_be_is_dropped(
    links: Links, called: str, address: str, round_trip: int, rate: int
) -> None:
    links.note("a", called, address, round_trip, rate)
    assert list(links.described({"a", "b"})) == []
