"""What ends after a while does not end because the machine slept for longer."""

from __future__ import annotations

import asyncio

import pytest

from sealring.edge.inference.timers import LOOKS, AwakeTimer


async def test_a_machine_that_slept_has_passed_one_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    clock, slept, called = loop.time, 0.0, 0

    def call() -> None:
        nonlocal called
        called += 1

    monkeypatch.setattr(loop, "time", lambda: clock() + slept)
    timer = AwakeTimer(3600.0, call)
    for passed in range(1, LOOKS + 1):
        assert (called, round(timer.left)) == (0, round(3600 * (1 - (passed - 1) / LOOKS)))
        slept += 100 * 3600.0
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert called == 0 or passed > 10, "a night of some naps ends nothing"
    assert (called, timer.left) == (1, 0.0)
    timer.cancel()


async def test_a_timer_that_is_cancelled_does_not_call() -> None:
    called: list[int] = []
    timer = AwakeTimer(0.0, lambda: called.append(1))
    timer.cancel()
    assert timer.cancelled()
    await asyncio.sleep(0.01)
    assert called == []
