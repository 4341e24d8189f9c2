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
        times.add(rows, tokens, 0, seconds, 0.0)
    table = StepTable.of(times.plain())
    assert [table.step(rows, 1, 0) for rows in (1, 2, 4, 8)] == [2.0, 4.0, 8.0, 16.0]
    assert [table.step(1, tokens, 50) for tokens in (4, 10, 20)] == [8.0, 20.0, 40.0]


def test_what_a_step_looks_back_at_is_told_from_what_it_costs_alone():
    times = StepTimes()
    for context in (0, 100, 200):
        times.add(1, 1, context, 1.0 + 0.01 * context, 0.5)
        times.add(2, 1, context, 1.5 + 0.02 * context, 0.5)
    table = StepTable.of(times.plain())
    assert table.step(1, 1, 400) == pytest.approx(5.0)
    assert table.step(2, 1, 50) == pytest.approx(2.5)


def test_at_load_steps_take_what_they_took_at_load_and_later_what_they_took_later():
    times = StepTimes()
    for seconds in (0.5, 0.4):
        times.load(1, 1, 3, seconds)
    times.load(64, 1, 0, 9.0)
    times.add(1, 1, 0, 1.0, 0.0)
    table = StepTable.of(times.plain())
    assert table.step(1, 1, 3) == 0.4
    table.serves = True
    assert table.step(1, 1, 3) == 1.0
    assert table.step(64, 1, 0) == pytest.approx(9.0)


def test_a_launch_holds_its_thread_for_the_part_that_it_was_seen_to():
    times = StepTimes()
    times.add(1, 1, 0, 1.0, 0.8)
    times.add(1, 8, 0, 3.0, 2.0)
    assert StepTable.of(times.plain()).held == pytest.approx(0.7)


def test_a_table_needs_a_decode_step():
    times = StepTimes()
    times.add(1, 8, 0, 1.0, 0.0)
    with pytest.raises(ValueError, match="decode"):
        StepTable.of(times.plain())


def scenario(*simulated: float) -> dict[str, object]:
    real = [{"tokens_per_second": 10.0, "ttft_ms": 100.0} for _ in simulated]
    found = [{"tokens_per_second": rate, "ttft_ms": 104.0} for rate in simulated]
    return {
        "scenario": "1 stage, 4 rows",
        **{"real": real[0], "simulated": found[0], "real_rounds": real, "simulated_rounds": found},
    }


def test_a_scenario_is_off_by_its_worst_figure():
    assert off(scenario(10.1)) == pytest.approx(0.04)
    assert off(scenario(8.0)) == pytest.approx(0.2)


def test_rounds_are_compared_pair_by_pair():
    rounds = scenario(10.0, 5.0, 40.0)
    rounds["real_rounds"][1]["tokens_per_second"] = 5.0
    assert off(rounds) == pytest.approx(0.04)


def test_the_check_misses_when_more_than_a_fifth_of_the_scenarios_are_off():
    result = {"options": {"check": "12x256"}, "check": [scenario(10.1)] * 3 + [scenario(8.0)]}
    (found,) = macs.checks(result)
    assert found.verdict == MISSED
    (table,) = macs.tables(result)
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert "SIMULATED" in table.title
