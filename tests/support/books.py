"""What the scheduler's books say of a ring's rows, against the composition of the steps that it announced."""

# ruff: noqa: SLF001

from __future__ import annotations

from sealring.gateway.scheduler import Row, StepPlanner


def check_books(planner: StepPlanner) -> None:
    """Requires that both say the same. What the next step changes is in the books alone."""
    board, gone = planner.board, set(planner._dropped)
    _check_lanes(planner, gone)
    in_lanes = [row for lane in planner._lanes.values() for row in lane.rows.values()]
    told = {row.number: (row.prefilled, row.prompt_tokens) for row in _prefilled(planner)}
    assert told == {row: told for row, told in board.prefilling().items() if row not in gone}
    copies = {copy.number for row in planner._line._rows.values() if row.begun for copy in row.copies}
    assert gone or board.rows == len(in_lanes) + len(told) + len(copies), "rows that left"
    _check_prefixes(planner, gone)


def _prefilled(planner: StepPlanner) -> list[Row]:
    rows = [row for row in planner._line._rows.values() if row.begun]
    for lane in planner._lanes.values():
        rows += lane.ready
    for step in planner._under_way.values():
        rows += [row for row in step.first if not row.closed]
    return rows


def _check_lanes(planner: StepPlanner, gone: set[int]) -> None:
    lanes = {number: tuple(lane.rows) for number, lane in planner._lanes.items() if lane.rows}
    there = {
        lane: tuple(row for row in rows if row not in gone) for lane, rows in planner.board.lanes().items()
    }
    assert lanes == {lane: rows for lane, rows in there.items() if rows}


def _check_prefixes(planner: StepPlanner, gone: set[int]) -> None:
    board, prefixes = planner.board, planner.prefixes
    if prefixes._moves or prefixes._adopting:
        return
    assert board.prefixes() == {number: kept.tokens for number, kept in prefixes._kept.items()}
    if not prefixes._exact:
        return
    rows, kept = board.kept_marks()
    rows = {row: marks for row, marks in rows.items() if row not in gone}
    marks = prefixes._marks
    assert rows == {row: sorted(marks.of_row(row)) for row in marks.rows()}
    assert rows == {
        row.number: [length for length, _ in row.marks] for row in prefixes._marked.values() if row.marks
    }
    assert kept == {number: sorted(marks.of_prefix(number)) for number in prefixes._kept}
    assert gone or board.marks == marks.count
