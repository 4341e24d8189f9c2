from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from sealring.cli.terminal.pace import Pace

GIB = 1 << 30


def test_share_rate_and_time_are_told() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert pace.words(0, 0) == ""
    assert pace.words(0, 2 * GIB) == "0 % of 2.0 GiB"
    now[0] = 10.0
    assert pace.words(GIB, 2 * GIB) == "50 % of 2.0 GiB, 102.4 MiB/s, 10 s left"
    now[0] = 40.0
    assert pace.words(GIB + (30 << 20), 2 * GIB).endswith("1.0 MiB/s, 17 min left")


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, GIB)), max_size=30))
def test_a_share_never_falls(seen: list[tuple[float, int]]) -> None:
    now, shares = [0.0], [0]
    pace = Pace(lambda: now[0])
    for waited, done in seen:
        now[0] += waited
        told = re.match(
            r"(\d+) % of 1.0 GiB(, [\d.]+ [KMG]?i?B/s, \d+ (s|min|h) left)?\Z", pace.words(done, GIB)
        )
        assert told
        shares.append(int(told[1]))
    assert shares == sorted(shares)
