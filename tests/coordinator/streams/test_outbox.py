"""Streams whose reader is too slow."""

from __future__ import annotations

import asyncio

import pytest

from sealring.coordinator.streams.outbox import Outbox
from sealring.mesh.errors import PermissionDenied, Unavailable


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


async def test_so_much_waits_and_no_more_and_what_is_known_now_is_not_counted() -> None:
    outbox: Outbox[int] = Outbox()
    for number in range(512):
        outbox.put(number)
    outbox.put_latest("subject", 1000)
    outbox.put_latest("subject", 1001)
    outbox.put_latest("first", -1, first=True)
    assert not outbox.closed
    outbox.put(512)
    assert outbox.closed
    outbox.put_latest("subject", 1002)
    with pytest.raises(Unavailable):
        await collect(outbox)


async def test_what_is_known_now_comes_in_the_order_of_the_last_words() -> None:
    outbox: Outbox[int] = Outbox()
    outbox.put_latest("a", 1)
    outbox.put_latest("b", 2)
    outbox.put_latest("a", 3)
    outbox.put_latest("c", 4, first=True)
    outbox.close()
    outbox.put_latest("d", 5)
    assert await collect(outbox) == [4, 2, 3]
