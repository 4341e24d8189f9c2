from __future__ import annotations

from sealring.gateway.scheduler.pace import Pace


def test_half_of_those_who_wait_will_have_been_finished_as_fast_as_the_last() -> None:
    pace = Pace()
    assert pace.seconds_for(100, 7.0) == 1, "nothing is known yet"
    pace.finished(10.0)
    assert pace.seconds_for(4, 110.0) == 20, "a tenth of what the next one takes already"
    pace.finished(14.0)
    assert pace.seconds_for(10, 14.0) == 20
    pace.finished(24.0)
    assert pace.seconds_for(10, 24.0) == 23, "a mean that follows slowly"
    pace.finished(5.0)
    assert pace.seconds_for(10, 4.0) == 21, "a clock that goes back counts as standing"
    assert [pace.seconds_for(requests, 5.0) for requests in (0, 10_000)] == [1, 60]


def test_a_pause_counts_as_a_minute_at_most() -> None:
    pace = Pace()
    for now in (0.0, 1000.0):
        pace.finished(now)
    assert pace.seconds_for(1, 1000.0) == 30
