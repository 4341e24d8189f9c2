from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.system.pace import Pace, Reached, together

GIB = 1 << 30


def test_bytes_rate_and_time_are_told() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert pace.at("fetching", 7, 0) == Reached("fetching", 7)
    assert pace.at("fetching", 500, 2 * GIB).words == "fetching 500 B of 2.0 GiB"
    now[0] = 10.0
    assert pace.at("fetching", GIB + 500, 2 * GIB).words == (
        "fetching 1.0 of 2.0 GiB at 102.4 MiB/s, 10 s left"
    )
    now[0] = 40.0
    assert pace.at("fetching", GIB + (30 << 20), 2 * GIB).words.endswith("1.0 MiB/s, 17 min left")
    assert pace.at("loading", 0, GIB).words == "loading 0 of 1.0 GiB", "other work begins anew"
    now[0] = 4e9
    assert pace.at("loading", 1, GIB).words == "loading 1 B of 1.0 GiB", "nobody waits for a century"


def test_parts_that_are_worked_on_side_by_side_are_as_late_as_the_slowest() -> None:
    parts = [Reached("", 1, 4, 2, 30), Reached("", 1, 2, 1, 5)]
    assert together(parts) == Reached("", 2, 6, 3, 30)
    assert together([*parts, Reached("", 2, 2)]) == Reached("", 4, 8, 3, 30), "one is done"
    assert together([*parts, Reached("", 0, 9)]) == Reached("", 2, 15), "of one it is not known yet"
    assert together([*parts, Reached("", 5)]) == Reached("", 7)
    assert together([]) == Reached("")


def test_nothing_is_said_of_a_rate_that_is_not_known_yet() -> None:
    """A connection begins slowly; 500 bytes in the first seconds would make it hundreds of hours."""
    now = [0.0]
    pace = Pace(lambda: now[0])
    pace.at("fetching", 0, 40 * GIB)
    for second in range(1, 5):
        now[0] = second
        assert not pace.at("fetching", second * 100 << 20, 40 * GIB).rate
    pace.at("loading", 0, 40 * GIB)
    now[0] = 20.0
    assert not pace.at("loading", 500, 40 * GIB).rate
    assert not pace.at("loading", 30 << 20, 40 * GIB).rate, "less than a thousandth"
    for second in range(17):
        now[0] = 20.0 + second
        told = pace.at("loading", (30 + 4 * second) << 20, 40 * GIB)
        assert bool(told.rate) == (second > 12), "41 MiB since the first 41 MiB have come"
    assert told.words.endswith("at 4.0 MiB/s, 3 h left")


def test_a_pause_does_not_take_the_time_that_is_left_out_of_all_proportion() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    for second in range(241):
        now[0] = float(second)
        before = pace.at("fetching", second << 20, GIB)
    assert before.words == "fetching 240.0 MiB of 1.0 GiB at 1.0 MiB/s, 13 min left"
    now[0] = 270.0
    assert pace.at("fetching", 240 << 20, GIB).seconds_left < 2 * before.seconds_left
    now[0] = 600.0
    assert pace.at("fetching", 240 << 20, GIB).words == "fetching 240.0 MiB of 1.0 GiB", (
        "nothing comes any more"
    )


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, GIB)), max_size=30))
def test_what_is_there_never_becomes_less(seen: list[tuple[float, int]]) -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    told = []
    for waited, done in seen:
        now[0] += waited
        told.append(pace.at("fetching", done, GIB))
        assert told[-1].seconds_left <= 1000 * max(20.0, now[0] / 4, waited) + 1
    assert [one.done for one in told] == sorted(one.done for one in told)
    assert all((one.rate > 0) >= (one.seconds_left > 0) for one in told)
    assert all(0 <= one.share <= 1 for one in told)
