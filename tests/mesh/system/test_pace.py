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
    assert together([*parts, Reached("", 5)]) == Reached("", 7)
    assert together([]) == Reached("")


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, GIB)), max_size=30))
def test_what_is_there_never_becomes_less(seen: list[tuple[float, int]]) -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    told = []
    for waited, done in seen:
        now[0] += waited
        told.append(pace.at("fetching", done, GIB))
    assert [one.done for one in told] == sorted(one.done for one in told)
    assert all((one.rate > 0) >= (one.seconds_left > 0) for one in told)
    assert all(0 <= one.share <= 1 for one in told)
