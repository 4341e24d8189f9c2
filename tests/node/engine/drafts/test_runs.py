from __future__ import annotations

import pytest

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring import ResolvedStep, Settling
from sealring.node.engine.drafts import Proposed, Runs
from sealring.node.wire.timelog import now
from sealring.v1 import control_pb2 as control


def run(
    number: int,
    *,
    continues: bool = False,
    source: control.DraftSource.ValueType = control.DRAFT_SOURCE_LOOKUP,
) -> ResolvedStep:
    return ResolvedStep(number, b"", (), (), 0, (1,), (1, 1), drafts=1, continues=continues, source=source)


def test_what_was_guessed_and_right_is_counted_as_the_gateway_counts_it() -> None:
    """The first run's first token is the row's last, all others are guesses; none counts of a broken one."""
    runs, begun = Runs(), now()
    assert runs.begin(run(1), 1, 5, Proposed([6, 7, 8, 9, 10])) == [5, 6]
    assert [runs.go_on(run(number, continues=True)) for number in (2, 3)] == [[7, 8], [9, 10]]
    assert runs.came(run(1), [6, 7]) == [0, 1]
    first = now()
    assert runs.came(run(2, continues=True), [8, 0]) == [0, 1]
    assert (runs.drafted, runs.accepted) == (3, 3)
    assert runs.came(run(3, continues=True), [10, 11]) == []
    assert (runs.drafted, runs.accepted) == (5, 3)
    runs.settle(Settling(1, 0, 4, 0))
    last = now()
    runs.begin(run(4, source=control.DRAFT_SOURCE_MODEL), 1, 5, Proposed([6]))
    assert runs.came(run(4, source=control.DRAFT_SOURCE_MODEL), [7, 7]) == [0]
    assert runs.since(last) == (1, 0, 1)
    assert runs.since(begun) == (6, 3, 1)
    assert runs.since(first) == (5, 2, 1)
    assert runs.since(now() + 1) == (0, 0, 0)


def test_each_row_of_a_step_has_its_own_wrong_draft() -> None:
    runs, step = Runs(), ResolvedStep(1, b"", (), (), 0, (4, 9), (4, 4, 4, 9, 9, 9), drafts=2)
    assert runs.begin(step, 4, 1, Proposed([2, 3])) == [1, 2, 3]
    assert runs.begin(step, 9, 5, Proposed([6, 7])) == [5, 6, 7]
    assert runs.came(step, [2, 0, 4, 0, 7, 8]) == [0, 1, 3]
    assert (runs.drafted, runs.accepted) == (4, 1)
    runs.settle(Settling(9, 0, 1, 2))
    with pytest.raises(InvalidInput, match="not 1 tokens of row 4"):
        runs.settle(Settling(4, 0, 1, 2))


def test_runs_behind_a_refuted_guess_bring_nothing_though_all_drafts_before_were_right() -> None:
    runs = Runs()
    runs.begin(run(1), 1, 5, Proposed([6, 7, 8]))
    runs.go_on(run(2, continues=True))
    assert not runs.broken(1)
    assert runs.came(run(1), [6, 9]) == [0, 1]
    assert runs.broken(1)
    assert runs.came(run(2, continues=True), [8, 9]) == []


def test_runs_behind_a_guess_that_came_too_late_to_be_refuted_bring_nothing() -> None:
    """A draft model's guess is taken for the next run after the tokens came, and before it has heard them."""
    runs = Runs()
    runs.begin(run(1), 1, 5, Proposed([6], lambda at, count: [7, 8]))
    assert runs.came(run(1), [6, 9]) == [0, 1]
    assert not runs.broken(1)
    assert runs.go_on(run(2, continues=True)) == [7, 8]
    assert runs.came(run(2, continues=True), [8, 9]) == []
    assert runs.broken(1)
    runs.settle(Settling(1, 0, 2, 2))


def test_a_chain_takes_further_drafts_when_a_run_needs_them() -> None:
    asked = []

    def more(at: int, count: int) -> list[int]:
        asked.append((at, count))
        return [6, 7, 8, 9][at : at + count]

    runs = Runs()
    assert runs.begin(run(1), 1, 5, Proposed([], more)) == [5, 6]
    assert runs.go_on(run(2, continues=True)) == [7, 8]
    assert asked == [(0, 1), (1, 2)]
    assert runs.at(1) == 3
    assert runs.came(run(1), [6, 7]) == [0, 1]
    assert not runs.broken(1)
