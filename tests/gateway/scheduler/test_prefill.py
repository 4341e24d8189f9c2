"""Whose chunks share a step, and how long they are."""

from __future__ import annotations

import pytest

from sealring.gateway.scheduler import Request
from sealring.gateway.scheduler.prefill import PrefillLine
from sealring.gateway.scheduler.row import Row
from sealring.mesh.prompt.composition import MAX_CHUNKS
from sealring.v1 import inference_pb2 as inference


def row(number: int, prompt: int) -> Row:
    made = Row(number, Request(f"r{number}", "k", 0, inference.Envelope()))
    made.prompt_tokens, made.params_bytes = prompt, 7
    return made


class Line(PrefillLine):
    """Rows with such prompts, numbered from 1; `prepared` tells which were looked at."""

    def __init__(self, *prompts: int, chunk: int = 10) -> None:
        self.prepared: list[int] = []
        super().__init__(lambda row: self.prepared.append(row.number), chunk)
        self.rows = {number: row(number, prompt) for number, prompt in enumerate(prompts, 1)}
        for each in self.rows.values():
            self.add(each)

    def taken(self, tokens: int = 10) -> list[tuple[int, int, int]]:
        return [(chunk.row, chunk.start, chunk.end) for _, chunk in self.take(tokens, float)]


def test_the_oldest_and_the_shortest_take_turns_and_others_fill_up() -> None:
    line = Line(25, 5, 5)
    assert line.taken() == [(1, 0, 10)]
    assert line.taken() == [(2, 0, 5), (3, 0, 5)]
    assert line.taken() == [(1, 10, 20)]
    assert line.taken() == [(1, 20, 25)]
    assert len(line) == 0


def test_a_first_chunk_waits_for_those_of_lower_rows() -> None:
    line = Line(50, 30, 4)
    assert line.taken() == [(1, 0, 10)]
    assert line.unstarted == 2
    assert line.taken() == [(2, 0, 10)], "the third is shorter and has not begun, so the second goes first"
    assert line.taken() == [(1, 10, 20)]
    assert line.taken() == [(3, 0, 4)]
    assert line.unstarted == 0
    assert line.prepared[-1] == 3
    line.discard(line.rows[2])
    line.discard(line.rows[2])
    assert [line.taken() for _ in range(2)] == [[(1, 20, 30)], [(1, 30, 40)]]


def test_one_that_has_begun_and_does_not_fit_does_not_keep_others_back() -> None:
    line = Line(6, 18, 4)
    line.rows[1].begun = line.rows[2].begun = True
    assert line.taken() == [(1, 0, 6), (3, 0, 4)]


def test_prompts_are_also_cut_where_they_are_kept() -> None:
    cut = Line(20)
    cut.rows[1].cuts = (3, 12)
    assert [cut.taken() for _ in range(3)] == [[(1, 0, 3)], [(1, 3, 12)], [(1, 12, 20)]]


def test_a_short_rest_goes_along_with_the_chunk_before_it() -> None:
    assert Line(15, chunk=100).taken() == [(1, 0, 15)]
    longer = Line(26, chunk=100)
    assert [longer.taken() for _ in range(3)] == [[(1, 0, 10)], [(1, 10, 20)], [(1, 20, 26)]]
    longest = Line(13, chunk=12)
    assert [longest.taken() for _ in range(2)] == [[(1, 0, 10)], [(1, 10, 13)]]
    cut = Line(30, chunk=100)
    cut.rows[1].cuts = (13,)
    assert [cut.taken() for _ in range(3)] == [[(1, 0, 13)], [(1, 13, 23)], [(1, 23, 30)]]


def test_a_chunk_with_its_rest_leaves_no_room_for_others() -> None:
    line = Line(14, 1, chunk=100)
    assert line.taken() == [(1, 0, 14)]
    assert line.taken() == [(2, 0, 1)]


def test_chunks_share_a_step_that_take_no_longer_than_one_of_its_length() -> None:
    """A chunk costs as much as four tokens, whatever its length."""
    line = Line(3, 3, 3)
    picked = line.take(10, lambda tokens: 4.0 + tokens)
    assert [chunk.row for _, chunk in picked] == [1, 2]


def test_steps_have_so_many_chunks_at_most() -> None:
    line = Line(*[1] * (MAX_CHUNKS + 2), chunk=1000)
    assert [len(line.taken(1000)) for _ in range(2)] == [MAX_CHUNKS, 2]


def test_only_a_rows_first_chunk_says_what_it_is() -> None:
    line = Line(20)
    one = line.rows[1]
    one.prefilled, one.prefix, one.copies = 4, 9, (row(2, 20),)
    ((_, first),) = line.take(10, float)
    ((_, second),) = line.take(10, float)
    assert (first.start, first.end, first.prefix, first.params_bytes, first.choices) == (4, 14, 9, 7, 2)
    assert (second.start, second.end, second.prefix, second.params_bytes, second.choices) == (14, 20, 0, 0, 0)
    assert (one.reused, first.prompt_tokens) == (4, 20)
    alone = Line(5)
    assert alone.take(10, float)[0][1].choices == 0


def test_what_waits_is_told_by_rows_and_tokens() -> None:
    line = Line(25)
    assert line.todo(0) == (25, pytest.approx(0.4))
    line.taken()
    assert line.todo(0)[0] == 25, "of all of the prompt"
    line.add(row(2, 10))
    assert line.todo(0) == (17, pytest.approx(1.4))
    assert line.todo(3) == (17, pytest.approx(1.4 * 2.5))
    line.discard(line.rows[1])
    assert line.todo(0) == (10, 1.0)
