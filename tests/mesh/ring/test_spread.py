"""Lanes for a number of rows, against all ways to spread them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.ring import round_seconds, rounds_with_another, spreads
from sealring.mesh.ring.spread import ALIKE

STAIRS = (1.0, 1.0, 1.14, 1.28, 1.66, 2.04, 2.27, 2.5, 3.14, *[3.95] * 23, *[7.8] * 32)
"""Steps of 1 to 64 rows of a 4-bit model on an M3 Max."""


def partitions(rows: int, largest: int) -> Iterator[tuple[int, ...]]:
    if not rows:
        yield ()
    for first in range(min(rows, largest), 0, -1):
        for others in partitions(rows - first, first):
            yield first, *others


rising = st.lists(st.floats(0, 3), min_size=12, max_size=12).map(
    lambda more: list(accumulate(more, initial=1.0))
)
steps = rising | st.lists(st.floats(1, 9), min_size=13, max_size=13)


@given(steps, st.integers(1, 4), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 12))
def test_no_other_lanes_have_shorter_rounds(table: list[float], stages: int, hop: float, rows: int) -> None:
    def seconds(size: int) -> float:
        return table[size - 1]

    found = spreads(12, seconds, stages, hop)[rows]
    assert sum(found) == rows
    assert list(found) == sorted(found, reverse=True)
    assert all(size > 0 for size in found)
    best = min(round_seconds(sizes, seconds, stages, hop) for sizes in partitions(rows, rows))
    assert round_seconds(found, seconds, stages, hop) <= best * (1 + ALIKE) ** 2


@given(steps, st.integers(1, 4), st.lists(st.integers(0, 11), min_size=1, max_size=5))
def test_rounds_with_another_row_are_those_of_lanes_that_have_it(
    table: list[float], stages: int, sizes: list[int]
) -> None:
    def seconds(size: int) -> float:
        return table[size - 1]

    for place, found in enumerate(rounds_with_another(sizes, seconds, stages, 0.1)):
        then = [size + (each == place) for each, size in enumerate(sizes)]
        assert found == pytest.approx(
            round_seconds([size for size in then if size], seconds, stages, 0.1), abs=1e-6
        )


@pytest.mark.parametrize(
    ("stages", "rows", "lanes"),
    [
        (1, 20, (20,)),
        (1, 36, (32, 4)),
        (2, 1, (1,)),
        (2, 8, (4, 4)),
        (2, 12, (4, 4, 4)),
        (2, 16, (8, 8)),
        (2, 20, (8, 8, 4)),
        (2, 64, (32, 32)),
        (3, 12, (4, 4, 4)),
        (3, 20, (4, 4, 4, 4, 4)),
    ],
)
def test_lanes_stay_on_a_stair(stages: int, rows: int, lanes: tuple[int, ...]) -> None:
    assert spreads(64, lambda size: STAIRS[size - 1], stages, 0.03)[rows] == lanes


def test_a_lane_is_larger_where_its_step_is_shorter() -> None:
    """An M5 computes 13 to 32 rows in tiles, in the time of one row, and 8 rows in 2.5 times that."""
    tiles = (*STAIRS[:12], *[1.1] * 20, *[2.0] * 32)
    found = spreads(64, lambda size: tiles[size - 1], 2, 0.03)
    assert found[8] == (4, 4)
    assert found[16][0] >= 13
    assert round_seconds(found[16], lambda size: tiles[size - 1], 2, 0.03) < 2.3
    assert found[32] == (16, 16)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_there_are_as_many_lanes_as_stages_where_rows_cost_little(stages: int) -> None:
    found = spreads(48, lambda size: 10 + 0.1 * size, stages, 1.0)
    assert all(len(lanes) <= stages and lanes[0] - lanes[-1] <= 1 for lanes in found[1:])
    assert all(found[each * stages] == (each,) * stages for each in range(1, 12))


def test_another_lane_keeps_stages_busy_where_rows_are_computed_in_turn() -> None:
    """4 rows on 3 stages in lanes of 2, 1 and 1 make rounds of three steps of two."""
    found = spreads(8, lambda size: 7 + 12.5 * size, 3, 0.5)
    assert (found[4], found[6], found[8]) == ((1, 1, 1, 1), (2, 2, 2), (2, 2, 2, 2))
