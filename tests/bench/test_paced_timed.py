"""Tables of a real stage's steps, and what the check says of two runs."""

from __future__ import annotations

import pytest

from bench import macs
from bench.paced.check import off
from bench.paced.timed import StepTable, StepTimes
from bench.verdict import MISSED


def test_a_table_has_the_means_of_what_was_measured_and_lines_between():
    times = StepTimes()
    for rows, tokens, seconds in [(1, 1, 1.0), (1, 1, 3.0), (4, 1, 8.0), (1, 10, 20.0)]:
        times.add(rows, tokens, seconds)
    table = StepTable.of(times.plain())
    assert [table.step(rows, 1, 0) for rows in (1, 2, 4, 8)] == [2.0, 4.0, 8.0, 16.0]
    assert [table.step(1, tokens, 50) for tokens in (4, 10, 20)] == [8.0, 20.0, 40.0]


def test_a_table_needs_a_decode_step():
    with pytest.raises(ValueError, match="decode"):
        StepTable.of([(1, 8, 1.0)])


def scenario(simulated: float) -> dict[str, object]:
    return {
        "scenario": "1 stages, 4 rows",
        "real": {"tokens_per_second": 10.0, "ttft_ms": 100.0},
        "simulated": {"tokens_per_second": simulated, "ttft_ms": 104.0},
    }


def test_a_scenario_is_off_by_its_worst_figure():
    assert off(scenario(10.1)) == pytest.approx(0.04)
    assert off(scenario(8.0)) == pytest.approx(0.2)


def test_the_check_misses_when_more_than_a_fifth_of_the_scenarios_are_off():
    result = {"options": {"check": "12x256"}, "check": [scenario(10.1)] * 3 + [scenario(8.0)]}
    (found,) = macs.checks(result)
    assert found.verdict == MISSED
    (table,) = macs.tables(result)
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert "SIMULATED" in table.title
