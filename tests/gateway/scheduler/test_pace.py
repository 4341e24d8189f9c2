from __future__ import annotations

import pytest

from sealring.gateway.scheduler.pace import WINDOW, Pace, retry_after


def test_those_who_wait_will_be_begun_as_fast_as_the_last() -> None:
    pace = Pace()
    for now in (0.0, 2.0, 8.0, 12.0):
        assert pace.wait(100, now) == 0, "too little is known"
        pace.begun(now)
    pace.begun(16.0)
    assert pace.wait(10, 16.0) == 40
    assert pace.wait(10, 20.0) == 40
    assert pace.wait(10, 36.0) == pytest.approx(72), "the next one has taken longer already"
    pace.begun(15.0)
    assert pace.wait(10, 15.0) == pytest.approx(32), "a clock that goes back counts as standing"
    assert pace.wait(0, 1e9) == 0


def test_a_time_in_which_nothing_waits_is_not_counted() -> None:
    pace = Pace()
    for burst in range(5):
        for request in range(3):
            pace.begun(1000.0 * burst + request)
        pace.rest()
        assert pace.wait(1, 1000.0 * burst + 500) == (1 if burst else 0)


def test_only_the_last_requests_are_looked_at() -> None:
    pace, now = Pace(), 0.0
    for seconds in [60.0] * 50 + [0.5] * (WINDOW + 1):
        pace.begun(now)
        now += seconds
    assert pace.wait(2, now) == 1


def test_refused_clients_are_told_to_come_back_within_a_minute() -> None:
    assert [retry_after(seconds) for seconds in (0, 0.2, 2.6, 59.9, 1e9)] == [1, 1, 3, 60, 60]
