"""The segments of a request's time to its first token."""

import pytest

from sealring.edge.inference.timings import Timings


def whole():
    timings = Timings(arrived=1.0, parsed=1.1, routed=1.3, opened=2.0, sent=2.1, answered=2.5)
    timings.room, timings.announced, timings.first = 4.0, 4.25, 6.0
    return timings


def test_segments_follow_each_other_without_a_gap():
    segments = whole().segments()
    assert sum(segments.values()) == pytest.approx(5.0)
    assert segments == pytest.approx(
        {
            "parse": 0.1,
            "route": 0.2,
            "queue_wait": 0.7 + 1.5,
            "dispatch": 0.1,
            "open": 0.4,
            "reserve": 0.25,
            "first_token": 1.75,
        }
    )


def test_what_has_not_come_is_not_told():
    assert Timings().header() == ""
    assert set(Timings(arrived=1.0, parsed=1.1).segments()) == {"parse"}


def test_room_is_never_before_the_heads_answer():
    timings = Timings(arrived=1.0, parsed=1.0, routed=1.0, opened=1.0, sent=1.0, answered=2.0)
    timings.announce(event=1.5)
    assert timings.room == 2.0
    assert timings.announced > timings.room


def test_the_header_is_server_timing_in_milliseconds():
    assert whole().header().startswith("parse;dur=100.000, route;dur=200.000, queue_wait;dur=2200.000, ")


def test_a_moment_that_was_never_noted_is_left_out():
    timings = Timings(arrived=1.0, parsed=1.1, answered=2.5)
    timings.room, timings.announced = 4.0, 4.25
    assert timings.segments()["queue_wait"] == pytest.approx(1.5)
