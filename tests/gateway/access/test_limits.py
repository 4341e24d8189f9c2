"""Token buckets as a property, and tables that stay bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.limits import Buckets, UnderWay, peer_name, too_fast
from mesh.errors import ResourceExhausted


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


def test_buckets_are_apart_and_can_be_refilled() -> None:
    buckets = Buckets(1, 2, clock=lambda: 7.0)
    assert [buckets.take("a") for _ in range(3)] == [0, 0, 1]
    assert buckets.take("b") == 0
    buckets.give_back("a")
    buckets.give_back("nobody")
    assert buckets.take("a") == 0
    assert buckets.take("a") == 1


@given(st.lists(st.integers(0, 100), max_size=200))
def test_the_table_is_bounded_and_forgets_the_quiet(names: list[int]) -> None:
    buckets = Buckets(1, 1, size=8, clock=lambda: 0.0)
    for name in names:
        buckets.take(str(name))
        assert len(buckets) <= 8
        assert buckets.take(str(name)) > 0


def test_under_way() -> None:
    under_way = UnderWay(2)
    with under_way.one_more("a"), under_way.one_more("b"):
        with under_way.one_more("a"), pytest.raises(ResourceExhausted) as caught, under_way.one_more("a"):
            pass
        assert caught.value.reason == "TOO_MANY_AT_ONCE"
        assert caught.value.metadata["retry_after"] == "1"
        with pytest.raises(ZeroDivisionError), under_way.one_more("a"):
            raise ZeroDivisionError
        with under_way.one_more("a"):
            pass
    assert not under_way._counts


def test_peers_by_address() -> None:
    assert peer_name("192.0.2.7") == "192.0.2.7"
    assert peer_name("2001:db8::1") == peer_name("2001:db8::ffff:2") == "2001:db8::"
    assert peer_name("2001:db8:0:1::1") != peer_name("2001:db8::1")
    assert peer_name("::ffff:192.0.2.7") == "192.0.2.7"
    assert peer_name("fe80::1%eth0") == "fe80::"
    assert peer_name("") == peer_name("/tmp/socket") == "unknown"


def test_when_to_come_again() -> None:
    assert too_fast(0.01).metadata["retry_after"] == "1"
    assert too_fast(2.2).metadata["retry_after"] == "3"
