"""One rule for what is met, missed and open."""

from __future__ import annotations

import pytest

from bench.verdict import MET, MISSED, OPEN, Check, joined, ratios


@pytest.mark.parametrize(
    ("rounds", "at_least", "worst", "verdict"),
    [
        ([1.0, 0.9, 0.8], False, 1.0, MET),
        ([1.0, 1.2, 1.1], True, 1.0, MET),
        ([1.1, 0.5, 0.5, 0.5], False, 1.1, MISSED),
        ([9.0, 9.0, 0.9], True, 0.9, MISSED),
        ([0.9], True, 0.9, MISSED),
        ([0.5, 0.5], False, 0.5, OPEN),
        ([0.5, 0.5, 0.5, None], False, 0.5, OPEN),
        ([None, 2.0], False, 2.0, MISSED),
        ([], False, None, OPEN),
        ([None] * 3, True, None, OPEN),
    ],
)
def test_the_worst_of_at_least_three_rounds_decides(
    rounds: list[float | None], at_least: bool, worst: float | None, verdict: str
) -> None:
    check = Check("a target", rounds, 1.0, at_least)
    assert (check.worst, check.verdict) == (worst, verdict)


def test_a_ratio_is_of_one_round() -> None:
    assert ratios([2.0, 3.0, 1.0, 0.0], [1.0, 2.0, 0.0, 1.0]) == [2.0, 1.5, None, 0.0]


def test_runs_are_rounds_of_the_same_check() -> None:
    first = [Check("a", [1.0], 2.0), Check("b", [1.0], 2.0, True)]
    found = joined([first, [Check("a", [3.0], 2.0)]])
    assert found == [Check("a", [1.0, 3.0], 2.0), Check("b", [1.0], 2.0, True)]
