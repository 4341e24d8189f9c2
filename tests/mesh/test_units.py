from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.mesh.units import parse_duration, parse_size, show_duration, show_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("2h", 7200), ("1.5h", 5400), ("1d", 86400), ("250ms", 0.25), (" 5 s ", 5)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [("5GB", 5_000_000_000), ("64GiB", 64 << 30), ("500MB", 500_000_000), ("1.5KiB", 1536), ("7B", 7)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "5", "m", "-5s", "5 minutes", "1e3s", "5M", "inf s", "5sx", "٣s", "9" * 99]
)
def test_what_is_neither(text: str) -> None:
    for parse in (parse_duration, parse_size):
        with pytest.raises(ValueError, match="with its unit, such as"):
            parse(text)


@settings(max_examples=25)
@given(st.integers(0, 10**12))
def test_what_is_shown_is_read_as_the_same(number: int) -> None:
    assert parse_size(show_size(number)) == number
    assert parse_duration(show_duration(number % 1_000_000)) == number % 1_000_000


def test_the_largest_whole_unit_is_shown() -> None:
    assert [show_duration(one) for one in (720, 86400, 7200, 90, 0.5, 0)] == [
        "12m",
        "1d",
        "2h",
        "90s",
        "0.5s",
        "0s",
    ]
    assert [show_size(one) for one in (5 * 10**9, 64 << 30, 1000, 999, 0)] == [
        "5GB",
        "64GiB",
        "1KB",
        "999B",
        "0B",
    ]
