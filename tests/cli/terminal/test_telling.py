"""What is said of a wait: never a share that falls, never a long silence."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from sealring.cli.terminal.telling import SILENT_SECONDS, Telling


def test_a_share_that_falls_is_left_out_until_it_is_as_large_again() -> None:
    telling = Telling(0.0)
    seen = []
    for share in (10, 60, 4, 59, 60, 300):
        telling.update(f"demo: {share} %, loading", 0.0)
        seen.append((telling.words, telling.share))
    assert seen == [
        ("demo: 10 %, loading", 10),
        ("demo: 60 %, loading", 60),
        *[("demo: loading", None)] * 2,
        ("demo: 60 %, loading", 60),
        ("demo: 300 %, loading", 100),
    ]


def test_without_a_terminal_figures_come_now_and_then_and_anything_else_at_once() -> None:
    telling = Telling(0.0)
    said = [
        telling.update("a: 1 %, fetching 1.0 of 2.0 GiB", 0.0),
        telling.update("a: 2 %, fetching 1.2 of 2.0 GiB", 1.0),
        telling.update("1 of 2 nodes are online", 1.0),
        telling.update("2 of 2 nodes are online", 1.1),
        telling.update("2 of 2 nodes are online", 5.0),
        telling.due(6.0),
        telling.due(6.1),
        telling.due(9.0),
        telling.due(11.1),
    ]
    assert said == [
        "a: 1 %, fetching 1.0 of 2.0 GiB",
        "",
        "1 of 2 nodes are online",
        "2 of 2 nodes are online",
        *["", "", "2 of 2 nodes are online (6 s)", "", "2 of 2 nodes are online (11 s)"],
    ]


WORDS = st.one_of(
    st.builds("m: {} %, loading {} of 9.0 GiB at {} MiB/s, {} s left".format, *[st.integers(0, 100)] * 4),
    st.sampled_from(["m: forming the ring", "m: waiting, studio is offline", "1 of 2 nodes are online"]),
)


@given(st.lists(st.tuples(st.floats(0, 12), st.none() | WORDS), max_size=40))
def test_no_share_falls_and_no_silence_is_long(events: list[tuple[float, str | None]]) -> None:
    """Time goes on in steps of half a second, in each of which a line may be due."""
    telling, now, said, shares = Telling(0.0), 0.0, 0.0, [0]
    telling.update("waiting", now)
    for waited, words in events:
        until = now + waited
        while now < until:
            now = min(until, now + 0.5)
            if telling.due(now):
                said = now
            assert now - said < SILENT_SECONDS + 0.5
        if words is None:
            continue
        if telling.update(words, now):
            said = now
        shares += [int(one) for one in re.findall(r"([0-9]+) %", telling.words)]
        assert telling.share in (None, shares[-1])
    assert shares == sorted(shares)
