"""The next chunk: its row and its length."""

from __future__ import annotations

from requestkit import request_of

from sealring.gateway.scheduler import Row
from sealring.gateway.scheduler.prefill import PrefillLine


def row(number: int, prompt: int) -> Row:
    made = Row(number, request_of(f"r{number}", 0, "k"))
    made.prompt_tokens, made.params_bytes = prompt, 7
    return made


class Line(PrefillLine):
    """Rows with such prompts, numbered from 1; `prepared` tells which were looked at.

    A chunk takes `fixed` seconds and one for each token.
    """

    def __init__(self, *prompts: int, chunk: int = 10, fixed: float = 1.0) -> None:
        self.prepared: list[int] = []
        self.done: dict[int, int] = {}
        super().__init__(
            lambda row: self.prepared.append(row.number),
            chunk,
            lambda tokens: fixed + tokens,
            lambda row: self.done[row],
        )
        self.rows = {number: row(number, prompt) for number, prompt in enumerate(prompts, 1)}
        for each in self.rows.values():
            self.add(each)

    def taken(
        self, tokens: int = 10, *, pausing: bool = False, planned: bool = False
    ) -> tuple[int, int, int]:
        _, chunk = self.take(tokens, pausing=pausing, planned=planned)
        self.done[chunk.row] = chunk.end
        return chunk.row, chunk.start, chunk.end


def test_the_oldest_and_the_shortest_take_turns() -> None:
    line = Line(25, 5, 4)
    assert [line.taken() for _ in range(4)] == [(1, 0, 10), (2, 0, 5), (1, 10, 20), (3, 0, 4)]
    assert line.taken() == (1, 20, 25)
    assert len(line) == 0


def test_a_first_chunk_waits_for_those_of_lower_rows() -> None:
    line = Line(50, 30, 4)
    assert line.taken() == (1, 0, 10)
    assert [row.number for row in line.unstarted] == [2, 3]
    assert line.taken() == (2, 0, 10), "the third is shorter and has not begun, so the second goes first"
    assert line.taken() == (1, 10, 20)
    assert line.taken() == (3, 0, 4)
    assert line.unstarted == []
    assert line.prepared == [1, 2, 3] * 2, "as they come and as they begin"
    line.discard(line.rows[2])
    line.discard(line.rows[2])
    assert [line.taken() for _ in range(2)] == [(1, 20, 30), (1, 30, 40)]


def test_a_row_waits_for_its_beginning_and_nobody_behind_it_does() -> None:
    line = Line(30, 20, 10)
    line.rows[2].awaits = line.rows[1]
    assert [line.taken()[0] for _ in range(3)] == [1, 3, 1]
    assert line.left == [10]
    assert line.taken(10, pausing=True) == (1, 20, 30)


def test_a_key_of_which_all_rows_wait_lends_its_turns() -> None:
    line = Line(40)
    other = line.rows[2] = Row(2, request_of("r2", 0, "another"))
    other.prompt_tokens, other.awaits = 30, line.rows[1]
    line.add(other)
    assert [line.taken()[0] for _ in range(3)] == [1, 1, 1]
    other.awaits = None
    assert [line.taken()[0] for _ in range(2)] == [2, 1]


def test_in_a_pause_the_shortest_goes_first_unless_it_began_by_a_plan() -> None:
    line = Line(50, 30, 20)
    assert line.left == [20, 30, 50]
    assert line.taken(10, planned=True)[0] == 1
    assert line.left == [20, 30]
    assert line.taken(10, pausing=True)[0] == 3
    assert line.left == [10, 30]
    assert line.taken(10, pausing=True)[0] == 3
    assert line.taken(10, pausing=True)[0] == 2
    line.discard(line.rows[2])
    assert line.taken(10, pausing=True)[0] == 1, "no other is there"


def test_prompts_are_also_cut_where_they_are_kept() -> None:
    cut = Line(20)
    cut.rows[1].cuts = (3, 12)
    assert [cut.taken() for _ in range(3)] == [(1, 0, 3), (1, 3, 12), (1, 12, 20)]


def test_a_short_rest_goes_along_with_the_chunk_before_it() -> None:
    assert Line(14, chunk=100).taken() == (1, 0, 14)
    assert Line(15, chunk=100).taken() == (1, 0, 10), "it would take one and a half times as long"
    assert Line(30, chunk=100, fixed=1000).taken() == (1, 0, 30), "it takes hardly longer"
    longer = Line(25, chunk=100)
    assert [longer.taken() for _ in range(3)] == [(1, 0, 10), (1, 10, 20), (1, 20, 25)]
    longest = Line(13, chunk=12)
    assert [longest.taken() for _ in range(2)] == [(1, 0, 10), (1, 10, 13)]
    cut = Line(30, chunk=100)
    cut.rows[1].cuts = (13,)
    assert [cut.taken() for _ in range(3)] == [(1, 0, 13), (1, 13, 23), (1, 23, 30)]


def test_no_chunk_ends_inside_an_image() -> None:
    line = Line(70, chunk=30)
    line.rows[1].unbroken = ((12, 20), (20, 40), (40, 43), (46, 58), (61, 63))
    ends = [line.taken()[2] for _ in range(6)]
    assert ends[:2] == [10, 20]
    assert ends[2] == 40, "it has nothing but the image and is longer than others"
    assert ends[3:] == [46, 58, 70], "before an image that would make it much longer, and a short rest along"


def test_an_image_goes_along_with_what_is_before_it_where_that_takes_hardly_longer() -> None:
    short = Line(50, chunk=30)
    short.rows[1].unbroken = ((5, 13), (23, 40))
    assert [short.taken()[2] for _ in range(3)] == [13, 23, 40]
    alone = Line(50, chunk=30)
    alone.rows[1].unbroken = ((3, 20),)
    assert alone.taken() == (1, 0, 20), "the image takes as long alone"
    longest = Line(50, chunk=18)
    longest.rows[1].unbroken = ((3, 20),)
    assert [longest.taken()[2] for _ in range(2)] == [3, 20]


def test_a_chunk_has_one_image_at_most() -> None:
    """The head computes each with its chunk, and other rows wait."""
    line = Line(50, chunk=50)
    line.rows[1].unbroken = ((3, 6), (8, 9), (12, 15))
    assert [line.taken()[2] for _ in range(3)] == [8, 12, 22]
