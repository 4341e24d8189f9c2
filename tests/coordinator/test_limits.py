"""Rate limits, nonces, and streams whose reader is too slow."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.limits import Nonces, RateLimit, caller_of
from coordinator.outbox import Outbox
from mesh.errors import PermissionDenied, ResourceExhausted, Unavailable


class Clock:
    """Turned by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_let_through_and_then_the_rate() -> None:
    clock = Clock()
    limit = RateLimit(per_second=2, burst=3, clock=clock)
    for _ in range(3):
        limit.check("a")
    with pytest.raises(ResourceExhausted):
        limit.check("a")
    limit.check("b")
    clock.now += 0.5
    limit.check("a")
    with pytest.raises(ResourceExhausted):
        limit.check("a")


@given(st.lists(st.floats(0, 5), max_size=100))
def test_nobody_gets_more_than_burst_and_rate(pauses: list[float]) -> None:
    clock = Clock()
    limit = RateLimit(per_second=1, burst=5, clock=clock)
    through = 0
    for pause in pauses:
        clock.now += pause
        try:
            limit.check("a")
        except ResourceExhausted:
            continue
        through += 1
    assert through <= 5 + clock.now + 1e-6


def test_callers_are_forgotten_so_that_memory_is_bounded() -> None:
    limit = RateLimit(per_second=1, burst=1, clock=Clock())
    for number in range(5000):
        limit.check(str(number))
    assert len(limit._buckets) == 4096


def test_a_nonce_is_good_once_and_for_a_while() -> None:
    clock = Clock()
    nonces = Nonces(lifetime=60, clock=clock)
    first, second = nonces.issue(), nonces.issue()
    assert first != second
    assert nonces.use(first)
    assert not nonces.use(first)
    clock.now = 60
    assert not nonces.use(second)
    assert not nonces.use(bytes(32))


def test_open_nonces_are_bounded_and_make_room_when_they_expire() -> None:
    clock = Clock()
    nonces = Nonces(lifetime=60, clock=clock)
    for _ in range(4096):
        nonces.issue()
    with pytest.raises(ResourceExhausted):
        nonces.issue()
    clock.now = 60
    nonces.issue()


@pytest.mark.parametrize(
    ("peer", "host"), [("ipv4:127.0.0.1:41234", "ipv4:127.0.0.1"), ("ipv6:%5B::1%5D:99", "ipv6:%5B::1%5D")]
)
def test_a_caller_is_its_host_whatever_its_port(peer: str, host: str) -> None:
    assert caller_of(peer) == host


async def collect(outbox: Outbox[int]) -> list[int]:
    return [message async for message in outbox.messages()]


async def test_everything_before_the_end_is_delivered_in_order() -> None:
    outbox: Outbox[int] = Outbox()
    reading = asyncio.create_task(collect(outbox))
    for number in range(5):
        outbox.put(number)
        await asyncio.sleep(0)
    outbox.close(last=5)
    outbox.close(Unavailable("too late"), last=7)
    outbox.put(6)
    assert await reading == [0, 1, 2, 3, 4, 5]
    assert outbox.closed


async def test_the_error_comes_after_what_waits() -> None:
    outbox: Outbox[int] = Outbox()
    outbox.put(1)
    outbox.close(PermissionDenied("evicted"), last=2)
    seen = []
    with pytest.raises(PermissionDenied):
        async for message in outbox.messages():
            seen.append(message)
    assert seen == [1, 2]


async def test_a_reader_that_does_not_read_is_cut_off() -> None:
    outbox: Outbox[int] = Outbox(limit=3)
    for number in range(10):
        outbox.put(number)
    with pytest.raises(Unavailable) as caught:
        await collect(outbox)
    assert caught.value.reason == "SLOW_PEER"
