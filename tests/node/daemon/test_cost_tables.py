"""Tables of several starts: each step's least time, whatever else the machine did during one of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

from sealring.node.daemon import cost_tables
from sealring.node.daemon.cost_tables import CostTables, least
from sealring.node.daemon.engine_process import StageKey
from sealring.v1 import control_pb2, engine_pb2

STAGE = StageKey("/models/demo", "ab" * 32, 0, 4, 2048, max_rows=16)
Times = dict[tuple[int, int, int], int]
"""Microseconds by rows, tokens and context."""

QUIET: Times = {(1, 1, 0): 10, (2, 1, 0): 12, (16, 1, 0): 30, (1, 64, 0): 50, (1, 1, 64): 11}
BUSY_AT_FIRST: Times = QUIET | {(1, 1, 0): 40, (2, 1, 0): 70}
BUSY_AT_LAST: Times = {size: took for size, took in QUIET.items() if size[0] < 16} | {(1, 64, 0): 400}


def started(
    tables: CostTables, found: Times, stage: StageKey = STAGE, memory_limit: int = 0, on: str = "CPU"
) -> Times:
    """The table of a stage that has timed these."""
    loaded = engine_pb2.StageLoaded(times=[_time(*size, took) for size, took in found.items()])
    tables.take(stage, (on, memory_limit), loaded)
    return {(one.rows, one.tokens, one.context): one.microseconds for one in loaded.times}


def _time(rows: int, tokens: int, context: int, took: int) -> control_pb2.StepTime:
    return control_pb2.StepTime(rows=rows, tokens=tokens, microseconds=took, context=context)


def test_starts_have_one_table_whenever_the_machine_was_busy(tmp_path: Path) -> None:
    for number, order in enumerate(permutations((QUIET, BUSY_AT_FIRST, BUSY_AT_LAST))):
        tables = [started(CostTables(tmp_path / str(number)), each) for each in order]
        assert tables[0] == order[0]
        assert tables[-1] == QUIET


def test_a_table_is_of_one_stage_one_device_and_one_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = CostTables(tmp_path)
    started(tables, QUIET)
    slower = {size: 2 * took for size, took in QUIET.items()}
    assert started(tables, slower) == QUIET
    assert started(tables, slower, memory_limit=1 << 34) == slower
    assert started(tables, slower, on="Metal") == slower, "of a Mac whose node computed on the CPU before"
    assert started(tables, QUIET, on="Metal") == QUIET
    assert started(tables, slower, StageKey("/models/demo", "ab" * 32, 0, 4, 2048, max_rows=8)) == slower
    monkeypatch.setattr(cost_tables.platform, "version", lambda: "the system's next version")
    assert started(tables, slower) == slower
    assert started(tables, QUIET) == QUIET
    monkeypatch.setattr(cost_tables, "sysctl", lambda name: b"the chip of a Mac to which all was moved")
    assert started(tables, slower) == slower
    assert started(tables, QUIET) == QUIET
    monkeypatch.setattr(cost_tables, "versions", lambda: {"mlx-vlm": "the next"})
    assert started(tables, slower) == slower


def test_guesses_have_the_least_times_too(tmp_path: Path) -> None:
    def told(takes: int, together: int) -> control_pb2.DraftFacts:
        return control_pb2.DraftFacts(
            source=control_pb2.DRAFT_SOURCE_MODEL, microseconds=takes, rows=4, rows_microseconds=together
        )

    found = []
    for one in (told(0, 0), told(900, 1000), told(700, 1200), told(800, 900)):
        loaded = engine_pb2.StageLoaded(sources=[one])
        CostTables(tmp_path).take(STAGE, ("CPU", 0), loaded)
        found += loaded.sources
    assert found == [told(0, 0), told(900, 1000), told(700, 1000), told(700, 900)]


def test_steps_behind_a_context_are_those_behind_the_longest() -> None:
    found = least([_time(1, 1, 0, 10), _time(1, 1, 64, 12), _time(1, 1, 256, 20), _time(8, 1, 64, 30)])
    assert [(one.rows, one.context) for one in found] == [(1, 0), (1, 256)]


def _more(*times: control_pb2.StepTime) -> Callable[[bytes], bytes]:
    return lambda table: table + engine_pb2.StageLoaded(times=times).SerializeToString()


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"\x00" * (2 << 20),
        lambda table: table + b"\x52\x7f",
        _more(_time(1, 1, 0, 0)),
        _more(*(_time(size, 1, 0, 1) for size in range(1000))),
    ],
)
def test_a_file_that_is_no_table_is_replaced(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    tables = CostTables(tmp_path)
    started(tables, QUIET)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert started(tables, BUSY_AT_FIRST) == BUSY_AT_FIRST
    assert started(tables, QUIET) == QUIET


def test_a_disk_that_takes_no_table_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tables = CostTables(tmp_path / "file")
    assert started(tables, BUSY_AT_FIRST) == BUSY_AT_FIRST
    assert started(tables, QUIET) == QUIET


def test_so_many_stages_have_tables_and_the_newest_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_tables, "_MOST", 2)
    tables = CostTables(tmp_path)
    for age, limit in enumerate((3, 2, 1)):
        started(tables, QUIET, memory_limit=limit)
        for file in tmp_path.iterdir():  # the clock of files may be coarse
            os.utime(file, ns=(0, file.stat().st_mtime_ns - 10**9 * (3 - age)))
    slower = {size: 2 * took for size, took in QUIET.items()}
    assert started(tables, slower, memory_limit=1) == QUIET
    assert started(tables, slower, memory_limit=3) == slower
