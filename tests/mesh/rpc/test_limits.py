"""Token buckets as a property, and tables that stay bounded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sealring.mesh.errors import ResourceExhausted
from sealring.mesh.rpc import Buckets, grpc_peer_name, peer_name
from sealring.mesh.rpc.limits import too_fast


@settings(max_examples=25)
@given(
    rate=st.integers(1, 50),
    burst=st.integers(1, 20),
    pauses=st.lists(st.integers(0, 2000), min_size=1, max_size=80),
)
def test_a_bucket_holds_its_rate(rate: int, burst: int, pauses: list[int]) -> None:
    now = [0.0]
    buckets = Buckets(rate, burst, clock=lambda: now[0])
    taken: list[float] = []
    for pause in pauses:
        now[0] += pause / 1000
        wait = buckets.take("a")
        if not wait:
            taken.append(now[0])
        else:
            assert 0 < wait <= 1 / rate + 1e-6
            now[0] += wait + 1e-6
            assert buckets.take("a") == 0
            taken.append(now[0])
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            allowed = burst + (taken[last] - taken[first]) * rate
            assert last - first + 1 <= allowed + 1e-3


def test_steady_over_use_gets_the_rate_and_no_less() -> None:
    """A bucket that counted what it refused gave nothing at all."""
    now = [0.0]
    buckets = Buckets(10, 20, clock=lambda: now[0])
    through = 0
    for _ in range(30 * 50):
        now[0] += 1 / 50
        through += not buckets.take("a")
    assert abs(through - (20 + 30 * 10)) <= 1
    while not buckets.take("a"):
        pass
    with refused("RATE_LIMITED", ResourceExhausted):
        buckets.check("a")


def test_the_whole_burst_is_let_through_at_once() -> None:
    for burst in range(1, 300):
        buckets = Buckets(10, burst, clock=lambda: 0.0)
        assert [bool(buckets.take("a")) for _ in range(burst + 1)] == [False] * burst + [True]


def test_buckets_are_apart_and_can_be_refilled() -> None:
    buckets = Buckets(1, 2, clock=lambda: 7.0)
    assert [buckets.take("a") for _ in range(3)] == [0, 0, 1]
    assert buckets.take("b") == 0
    buckets.give_back("a")
    buckets.give_back("nobody")
    assert buckets.take("a") == 0
    assert buckets.take("a") == 1


@settings(max_examples=25)
@given(st.lists(st.integers(0, 100), max_size=200))
def test_the_table_is_bounded_and_forgets_the_quiet(names: list[int]) -> None:
    buckets = Buckets(1, 1, size=8, clock=lambda: 0.0)
    for name in names:
        buckets.take(str(name))
        assert len(buckets) <= 8
        assert buckets.take(str(name)) > 0
    assert len(buckets) == min(8, len(set(names)))


def test_peers_by_address() -> None:
    assert peer_name("192.0.2.7") == "192.0.2.7"
    assert peer_name("2001:db8::1") == peer_name("2001:db8::ffff:2") == "2001:db8::"
    assert peer_name("2001:db8:0:1::1") != peer_name("2001:db8::1")
    assert peer_name("2001:db8:0:0:8000::1") == "2001:db8::"
    assert peer_name("::ffff:192.0.2.7") == "192.0.2.7"
    assert peer_name("fe80::1%eth0") == "fe80::"
    assert peer_name("") == peer_name("/tmp/socket") == "unknown"


def test_when_to_come_again() -> None:
    assert too_fast(0.01).metadata["retry_after"] == "1"
    assert too_fast(2.2).metadata["retry_after"] == "3"


@pytest.mark.parametrize(
    ("peer", "counts_as"),
    [
        ("ipv4:127.0.0.1:41234", "127.0.0.1"),
        ("ipv6:%5B::1%5D:99", "::"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:99", "2001:db8:1:2::"),
        ("ipv6:[2001:db8:1:2::7]:99", "2001:db8:1:2::"),
        ("ipv6:%5Bfe80::1%25en0%5D:99", "fe80::"),
        ("ipv6:%5B::ffff:192.0.2.7%5D:99", "192.0.2.7"),
        ("unix:", "unknown"),
    ],
)
def test_a_grpc_peer_is_its_host_or_its_network(peer: str, counts_as: str) -> None:
    assert grpc_peer_name(peer) == counts_as
