"""What is kept, for whom, and what goes when rows need the room."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from requestkit import request_of
from ringfacts import member_with, ring_of

from sealring.gateway.scheduler import Ledger, Row, StepPlanner, prefixes
from sealring.gateway.scheduler.board import Board
from sealring.gateway.scheduler.prefixes import PrefixCache
from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring import MAX_PREFIXES, OPENING, Ends, Names, Origin, PrefixNames, split
from sealring.mesh.ring.prefix_marks import MOST
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

LIMIT = 40
ANY, EXACT = control.PREFIX_SUPPORT_ANY, control.PREFIX_SUPPORT_EXACT


class Desk:
    """A prefix cache, and rows of one character per token, which are named as a head names them."""

    def __init__(
        self,
        support: control.PrefixSupport.ValueType = ANY,
        tokens: int = 10_000,
        marks: int = 0,
        *,
        stores: bool = False,
        prompts_alone: bool = False,
    ) -> None:
        self.ring = ring_of(
            member_with(tokens, mark=marks),
            rows=4096,
            chunk=1 << 16,
            prefixes=support,
            recalls=stores,
            epoch=2,
            prompts_alone=prompts_alone,
        )
        self.ledger = Ledger(self.ring)
        self.adopt(())
        self.count = 0
        self.ends = Ends()
        self.named: dict[int, PrefixNames] = {}

    def adopt(self, earlier: Sequence[tuple[Origin, Names]]) -> None:
        """Begins with what an earlier epoch has kept."""
        ring, self.board, self.told = self.ring, Board(self.ring), list[str]()
        self.cache = PrefixCache(
            self.ledger,
            self.board,
            ring.prefixes,
            earlier,
            ring.mark_every,
            stores=ring.recalls,
            prompts_alone=ring.prompts_alone,
        )

    def row(self, text: str, stored: int = 0, role: str = "") -> Row:
        """A row about to begin, which has no memory. The head has the first `stored` tokens on disk. `role`
        is that of the last message, if there are any."""
        self.count += 1
        envelope = inference.Envelope()
        if role:
            envelope.clear.chat.messages.add(role=role)
        row = Row(self.count, request_of(f"r{self.count}", 1, "k", envelope=envelope), limit=LIMIT)
        named = self.named[row.number] = PrefixNames(bytes(32), b"c")
        names, ends = self.ends.extend(named, text.encode("utf-32-le"))
        row.prompt_tokens, row.names = len(text), split(names, len(text), ends=ends)
        row.stored = stored
        self.cache.prepare(row)
        self.cache.forget(row)
        return row

    def prefill(self, text: str, role: str = "") -> tuple[Row, list[str]]:
        """A row's whole prompt, in chunks that end at its cuts, and the changes that this brings."""
        row = self.row(text, role=role)
        brought: list[str] = []
        for end in (*row.cuts, len(text)):
            self.chunk(row, end)
            brought += self.changes()
        return row, brought

    def chunk(self, row: Row, end: int) -> bool:
        """A step with a row's next chunk, and the changes that are planned. Returns whether the row takes its
        prefix."""
        first = not row.begun
        start = row.reused if first else self.board.held(row.number)
        row.begun = True
        takes = first and self.cache.begin(row)
        step = control.Step()
        chunk = step.prefill.chunks.add(
            row=row.number, start=start, end=end, prompt_tokens=row.prompt_tokens, takes=takes
        )
        chunk.prefix = row.prefix if first else 0
        self.announce(step)
        self.cache.cut(row)
        return takes

    def announce(self, step: control.Step) -> None:
        self.board.announce(step)
        self.told += [told for told in map(_told, step.changes) if told]

    def fill(self, tokens: int) -> None:
        """Other rows take as much."""
        self.ledger.tokens += tokens

    def start(self, text: str) -> Row:
        """As `row`, with memory of its own."""
        row = self.row(text)
        assert self.ledger.reserve_all((row,), row.reserved)
        self.cache.prepare(row)
        return row

    def begin(self, row: Row) -> tuple[bool, list[str]]:
        """Prefills a row in one chunk: whether it takes its prefix, and the changes before and behind."""
        self.cache.prepare(row)
        before = self.changes()
        takes = self.chunk(row, row.prompt_tokens)
        return takes, [*before, *self.changes()]

    def left(self, row: Row) -> None:
        self.cache.left(row)
        self.board.evict(row)

    def leave(self, row: Row) -> list[str]:
        self.ledger.release(row.number)
        self.left(row)
        return self.changes()

    def finish(self, row: Row, answer: str, ahead: int = 0) -> list[str]:
        """The row ends with an answer, whose last token a step `ahead` has computed, or none."""
        last = control.RowOutput()
        for part in (answer[:-1], answer[-1]):
            names, ends = self.ends.extend(self.named[row.number], part.encode("utf-32-le"))
            last.prefixes += names
            last.ends += ends
        self.board.admit(row, row.number)
        for _ in range(len(answer) - 1 + ahead):
            self.announce(control.Step(decode=control.Decode(lane=row.number)))
        self.cache.finished(row, self.board.counts(row.number), len(answer), last)
        return self.changes()

    def changes(self) -> list[str]:
        """What has changed since this was called, and what changes with the next step."""
        self.cache.make_room()
        self.announce(control.Step())
        told, self.told = self.told, []
        return told


def _told(change: control.Change) -> str:
    kind = change.WhichOneof("change")
    if kind == "keep":
        marks = "".join(f" and {mark}" for mark in change.keep.marks)
        return f"keep {change.keep.prefix}: {change.keep.tokens} of {change.keep.row}{marks}"
    if kind == "mark":
        return f"mark {change.mark.row}: {change.mark.tokens}"
    if kind == "unmark":
        holder = change.unmark.WhichOneof("holder")
        number = getattr(change.unmark, holder)
        return f"unmark {holder} {number}: {' and '.join(map(str, change.unmark.marks))}"
    if kind == "adopt":
        return f"adopt {change.adopt.prefix}: {change.adopt.tokens} of {change.adopt.row}"
    return f"drop {change.drop.prefix}" if kind == "drop" else ""


def test_a_prompt_is_kept_and_its_beginning_reused() -> None:
    desk = Desk()
    assert desk.prefill("a" * 200)[1] == ["keep 1: 200 of 1"]
    row = desk.row("a" * 150 + "b" * 50)
    assert (row.prefix, row.reused, row.cuts) == (1, 128, ())
    assert desk.row("b" * 200).prefix == 0


@pytest.mark.parametrize("support", [ANY, EXACT])
def test_a_beginning_that_a_row_computes_is_waited_for(support: control.PrefixSupport.ValueType) -> None:
    """And kept where prompts part, not where either ends."""
    desk = Desk(support)
    first = desk.row("s" * 150 + "a" * 500)
    desk.chunk(first, 64)
    second, third = desk.row("s" * 150 + "b" * 100), desk.row("s" * 64 + "c" * 100)
    assert (second.awaits, third.awaits) == (first, None), "the first has computed what the third shares"
    assert first.cuts[0] == 128
    desk.chunk(first, 128)
    desk.changes()
    desk.cache.prepare(second)
    assert (second.awaits, second.reused) == (None, 128)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_beginning_that_will_not_be_kept_is_waited_for_no_longer(leaves: bool) -> None:
    """Its row leaves, or others have the room."""
    desk = Desk(tokens=1000)
    first = desk.row("s" * 150 + "a" * 500)
    desk.chunk(first, 64)
    second = desk.row("s" * 150 + "b" * 100)
    assert second.awaits is first
    if leaves:
        desk.left(first)
    else:
        desk.fill(1000)
        desk.chunk(first, 128)
    desk.changes()
    desk.cache.prepare(second)
    assert (second.awaits, second.reused) == (None, 64 if leaves else 0)


def test_the_last_token_is_always_computed() -> None:
    desk = Desk()
    desk.prefill("a" * 128)
    assert desk.row("a" * 128).reused == 128 - OPENING
    assert desk.row("a" * 129).reused == 128
    assert desk.row("a" * 64).reused == 0


def test_an_answer_takes_the_place_of_its_prompt() -> None:
    """And the next turn of the conversation takes the place of both."""
    desk = Desk()
    row, _ = desk.prefill("a" * 100)
    assert desk.finish(row, "b" * 40 + ".") == ["drop 1", "keep 2: 140 of 1"]
    follow, changes = desk.prefill("a" * 100 + "b" * 40 + "." + "c" * 60)
    assert (follow.prefix, follow.reused) == (2, 140)
    assert changes == ["drop 2", "keep 3: 201 of 2"]


@pytest.mark.parametrize("length", [100, 30_000])
def test_of_a_turn_nothing_is_computed_again(length: int) -> None:
    """The prompt before and its answer are found at any length, also where a template renders the opening of
    an answer otherwise once it is history."""
    desk = Desk(tokens=1 << 20)
    row, _ = desk.prefill("a" * length + "<think>")
    desk.finish(row, "b" * 100 + ".")
    assert desk.row("a" * length + "<think>" + "b" * 100 + "c" * 500).reused == length + 107
    assert desk.row("a" * length + "<think>" + "c" * 500).reused == length + 7
    assert desk.row("a" * length + "c" * 500).reused == length + 7 - OPENING


@pytest.mark.parametrize("support", [ANY, EXACT])
def test_of_two_cuts_of_a_model_a_prompt_is_kept_without_its_answer(
    support: control.PrefixSupport.ValueType,
) -> None:
    desk = Desk(support, prompts_alone=True)
    row, _ = desk.prefill("a" * 300)
    assert desk.finish(row, "b" * 100 + ".") == []
    assert not desk.cache.has_pending
    assert 300 - OPENING <= desk.row("a" * 300 + "b" * 100 + "c" * 50).reused <= 300


def test_an_answer_of_one_token_changes_nothing() -> None:
    desk = Desk()
    row, _ = desk.prefill("a" * 100)
    assert desk.finish(row, ".") == []
    with pytest.raises(InvalidInput):
        desk.cache.finished(row, 100, 1, control.RowOutput(prefixes=bytes(16)))


def test_prompts_with_one_beginning_are_both_kept() -> None:
    desk = Desk()
    desk.prefill("s" * 128 + "a" * 64)
    desk.prefill("s" * 128 + "b" * 64)
    assert desk.row("s" * 128 + "a" * 65).reused == 192
    assert desk.row("s" * 128 + "b" * 65).reused == 192
    assert desk.row("s" * 128 + "c" * 65).reused == 128


def test_rows_come_first_and_the_least_recently_used_goes() -> None:
    desk = Desk(tokens=1024)
    for letter in "abc":
        desk.prefill(letter * 200)
    again, _ = desk.prefill("a" * 200)  # uses the first
    desk.left(again)
    lane = desk.ledger.choose_lane(512)
    assert lane is not None
    desk.ledger.reserve(99, lane, 512)
    assert desk.changes() == ["drop 2"]
    assert desk.row("b" * 200).prefix == 0
    assert desk.row("a" * 200).prefix == 1
    lane = desk.ledger.choose_lane(512)
    assert lane is not None, "what is kept takes nothing from rows"
    desk.ledger.reserve(98, lane, 512)
    assert sorted(desk.changes()) == ["drop 1", "drop 3"]
    assert desk.prefill("d" * 200)[1] == []
    desk.ledger.release(98)
    assert desk.prefill("e" * 200)[1] == ["keep 4: 200 of 8"]


def test_a_new_prefix_takes_the_room_of_an_old_one() -> None:
    desk = Desk(tokens=300)
    desk.prefill("a" * 200)
    assert desk.prefill("b" * 200)[1] == ["drop 1", "keep 2: 200 of 2"]
    assert desk.prefill("c" * 500)[1] == []
    assert desk.row("b" * 200).prefix == 2


def test_caches_that_cannot_be_cut_are_kept_where_prompts_part() -> None:
    """At the second sight of a common beginning, and before the end of every prompt."""
    desk = Desk(EXACT)
    end = 250 - OPENING
    first, changes = desk.prefill("s" * 150 + "a" * 100)
    assert (first.cuts, changes) == ((end,), [f"keep 1: {end} of 1"])
    second, changes = desk.prefill("s" * 150 + "b" * 100)
    assert (second.cuts, changes) == (
        (128, end),
        ["keep 2: 128 of 2", "drop 2", f"keep 3: {end} of 2 and 128"],
    )
    third, changes = desk.prefill("s" * 150 + "c" * 100)
    assert (third.prefix, third.reused, third.cuts) == (3, 128, (end,))
    again, changes = desk.prefill("s" * 150 + "a" * 100)
    assert (again.reused, again.cuts, changes) == (end, (), [])


def test_where_members_mark_a_conversation_is_kept_once_and_can_begin_anew_at_every_turn() -> None:
    desk = Desk(EXACT, marks=10)
    text, turns = "s" * 200, [200 - OPENING]
    assert desk.prefill(text)[1] == [f"keep 1: {turns[0]} of 1"]
    for turn in (2, 3):
        text += str(turn) * 100
        row, changes = desk.prefill(text)
        assert (row.prefix, row.reused) == (turn - 1, turns[-1])
        marks = "".join(f" and {mark}" for mark in turns)
        turns.append(len(text) - OPENING)
        assert changes == [f"drop {turn - 1}", f"keep {turn}: {turns[-1]} of {turn}{marks}"]
    row = desk.row("s" * 200 + "2" * 100 + "x" * 100)  # the third turn is asked again, otherwise
    assert (row.prefix, row.reused) == (3, turns[1])
    assert desk.row("s" * 200 + "y" * 100).reused == turns[0]
    assert desk.cache.kept_bytes() == [turns[-1] + 3 * 10]


@pytest.mark.parametrize(
    ("memory", "mark", "cuts", "marks"),
    [
        (100_000, 10, [4096, 8192, 12_288], [4096, 8192, 12_288]),
        (31_000, 9000, [9088], [9088]),  # marks take no more than keys and values
        (22_000, 4000, [4096, 8192, 12_288], [12_288]),
        (17_000, 4000, [4096, 8192, 12_288], []),
    ],
)
def test_a_long_prompt_is_marked_on_the_way_as_far_as_memory_allows(
    memory: int, mark: int, cuts: list[int], marks: list[int]
) -> None:
    desk, end = Desk(EXACT, memory, mark), 13_000 - OPENING
    row, changes = desk.prefill("a" * 13_000)
    assert row.cuts == (*cuts, end)
    told = "".join(f" and {length}" for length in marks)
    assert changes[-1] == f"keep 1: {end} of 1{told}"
    assert desk.cache.kept_bytes() == [end + mark * (1 + len(marks))]


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_end_of_an_answer_is_a_mark_like_that_of_a_prompt(ahead: int) -> None:
    """With the last token if a step that was under way has computed that."""
    desk = Desk(EXACT, marks=10)
    row, _ = desk.prefill("a" * 100)
    end = 139 + ahead
    assert desk.finish(row, "b" * 39 + ".", ahead) == ["drop 1", f"keep 2: {end} of 1 and 84"]
    follow = desk.row("a" * 100 + "b" * 39 + "." + "c" * 60)
    assert (follow.prefix, follow.reused) == (2, end)
    assert desk.row("a" * 100 + "d" * 60).reused == 84, "a template may render the answer otherwise"


@pytest.mark.parametrize("support", [ANY, EXACT])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_prompt_too_short_for_a_name_ends_with_an_answer_of_any_length(
    support: control.PrefixSupport.ValueType, ahead: int
) -> None:
    """The first name may be behind a last token that no step has computed."""
    for whole in range(62, 83):
        desk = Desk(support, marks=10)
        row, _ = desk.prefill("a" * 30)
        assert not row.names
        held = whole - 1 + ahead
        kept = [f"keep 1: {held} of 1"] if held >= 64 else []
        assert desk.finish(row, "b" * (whole - 31) + ".", ahead) == kept


def test_an_answer_that_is_not_where_its_names_are_is_not_kept() -> None:
    desk = Desk(EXACT)
    row, _ = desk.prefill("a" * 100)
    assert desk.finish(row, "b" * 41, ahead=2) == []


def test_a_prefix_is_in_use_from_the_first_chunk_of_a_row_that_begins_with_it() -> None:
    desk = Desk(tokens=1024)
    for letter in "abc":
        desk.prefill(letter * 200)
    row = desk.row("a" * 150 + "d" * 350)
    desk.chunk(row, 250)
    assert desk.changes() == []
    desk.chunk(row, 300)
    lane = desk.ledger.choose_lane(512)
    assert lane is not None
    desk.ledger.reserve(99, lane, 512)
    assert desk.changes() == ["drop 2"]


def test_a_prompt_that_two_rows_had_at_once_is_used_by_both() -> None:
    desk = Desk(tokens=1024)
    second = desk.row("a" * 200)
    desk.chunk(second, 64)
    desk.prefill("a" * 200)
    for letter in "bc":
        desk.prefill(letter * 200)
    desk.chunk(second, 200)
    assert desk.changes() == []
    lane = desk.ledger.choose_lane(512)
    assert lane is not None
    desk.ledger.reserve(99, lane, 512)
    assert desk.changes() == ["drop 2"]


def test_an_answer_that_adds_no_block_does_not_bring_back_what_was_dropped() -> None:
    desk = Desk(tokens=300)
    row, _ = desk.prefill("a" * 200)
    desk.prefill("b" * 200)
    assert desk.finish(row, ".") == []


def test_an_answer_is_not_kept_where_a_member_cannot() -> None:
    desk = Desk(control.PREFIX_SUPPORT_UNSPECIFIED)
    row, _ = desk.prefill("a" * 100)
    assert desk.finish(row, "b" * 41) == []


def test_what_an_earlier_epoch_kept_is_found_again_the_newest_while_there_is_room() -> None:
    desk = Desk(tokens=320)
    earlier = [(Origin(1, row, 128), desk.row(text * 128).names) for row, text in enumerate("abc", 1)]
    desk.adopt(earlier)
    assert [desk.row(text * 200).reused for text in "abc"] == [0, 128, 128]
    assert desk.changes() == ["adopt 1: 128 of 3", "adopt 2: 128 of 2"]
    assert desk.prefill("d" * 128)[1] == ["drop 2", "keep 3: 128 of 7"]  # the one that was kept first
    assert desk.row("c" * 200).reused == 128


def test_no_more_is_kept_than_members_take() -> None:
    desk, kept = Desk(tokens=1 << 20), 0
    for number in range(MAX_PREFIXES + 1):
        for change in desk.prefill(chr(1000 + number) * 70)[1]:
            kept += 1 if change.startswith("keep") else -1
            assert kept <= MAX_PREFIXES
    assert kept > 1


def test_the_names_seen_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MAX_SEEN", 6)
    desk = Desk(EXACT, tokens=64)  # room for nothing: prompts are seen and not kept
    for letter in "abac":
        desk.prefill(letter * 150)
    end = 200 - OPENING
    assert desk.row("a" * 150 + "x" * 50).cuts == (134, end)
    assert desk.row("b" * 150 + "x" * 50).cuts == (end,)
    assert desk.row("a" * 70 + "x" * 130).cuts == (64, end)


def test_a_prompt_whose_caches_cannot_be_cut_is_cut_where_its_beginning_can_be_stored() -> None:
    """At the last edge of blocks before its end, and before the end of what it has in common with another, if
    a sixteenth more is stored then and a thousand tokens at least."""
    system, end = "s" * 3000, 5000 - OPENING
    first = system + "a" * 2000
    for stores, stored, edges in ((True, 0, [4864]), (True, 3840, [4864]), (True, 4096, []), (False, 0, [])):
        row = Desk(EXACT, 20_000, stores=stores).row(first, stored)
        assert row.cuts == (4096, *edges, end)
    desk = Desk(EXACT, 20_000, stores=True)
    desk.prefill(first)
    assert desk.row(system + "b" * 2000).cuts == (2816, 2944, 4096, 4864, end)
    sealed = Row(9, request_of("sealed", 1, "k", envelope=inference.Envelope(sealed=b"sealed")))
    sealed.names, sealed.prompt_tokens = row.names, row.prompt_tokens
    Desk(EXACT, 20_000, stores=True).cache.prepare(sealed)
    assert sealed.cuts == (4096, end)


def test_a_row_takes_the_prefix_that_it_continues_where_there_is_no_room_for_both() -> None:
    """And what it has computed is kept in its own place, once it leaves."""
    desk = Desk(tokens=1024)
    row = desk.start("a" * 600)
    assert desk.begin(row) == (False, [])
    assert desk.finish(row, "b" * 20) == []
    assert desk.leave(row) == ["keep 1: 619 of 1"]
    follow = desk.start("a" * 600 + "b" * 20 + "c" * 100)
    assert follow.reused == 619
    assert desk.begin(follow) == (True, [])
    assert desk.finish(follow, "d" * 20) == []
    assert desk.leave(follow) == [f"keep 2: 739 of {follow.number}"]
    assert desk.cache.counted.tokens == 739


def test_a_row_waits_for_the_answer_that_it_continues() -> None:
    desk = Desk(tokens=1280)
    row = desk.start("a" * 600)
    desk.begin(row)
    assert not desk.cache.has_pending
    desk.finish(row, "b" * 20)
    follow = desk.row("a" * 600 + "b" * 20 + "c" * 100)
    assert desk.cache.has_pending
    assert desk.cache.waits_for(follow)
    assert not desk.cache.waits_for(desk.row("d" * 500))
    desk.leave(row)
    assert not desk.cache.has_pending
    assert not desk.cache.waits_for(follow)
    assert desk.start("a" * 600 + "b" * 20 + "c" * 100).reused == 619


def test_an_answer_that_is_kept_when_its_row_leaves_has_a_number_above_those_kept_meanwhile() -> None:
    """Members refuse a number that does not rise (mesh.ring.composition)."""
    desk = Desk(tokens=1280)
    row = desk.start("a" * 600)
    desk.begin(row)
    assert desk.finish(row, "b" * 20) == []
    assert desk.prefill("d" * 100)[1] == ["keep 1: 100 of 2"]
    assert desk.leave(row) == ["keep 2: 619 of 1"]


def test_a_row_that_finds_a_longer_prefix_leaves_no_memory_to_the_one_before() -> None:
    """The first answer to a prompt is in the memory of a row that waits, until another one is kept."""
    desk = Desk(tokens=1850)
    first, _ = desk.prefill("a" * 600)
    desk.finish(first, "b" * 300)
    row = desk.start("a" * 600 + "c" * 200 + "d" * 150)
    second = desk.start("a" * 600)
    desk.begin(second)
    desk.finish(second, "c" * 200)
    assert desk.leave(second) == ["keep 3: 799 of 3"]
    assert desk.begin(row) == (False, ["drop 2"])
    assert row.reused == 768, "the end that it shares was not known when it was named"
    assert desk.cache.has_room()


def test_a_row_that_does_not_begin_leaves_its_prefix_to_be_counted() -> None:
    desk = Desk(tokens=1024)
    desk.prefill("a" * 600)
    row = desk.start("a" * 600 + "b")
    assert desk.changes() == []
    desk.cache.forget(row)
    desk.ledger.release(row.number)
    assert desk.cache.counted.tokens == 600
    desk.start("c" * 500)
    assert desk.changes() == ["drop 1"]


def test_a_row_begins_with_a_part_of_anothers_prefix_though_there_is_no_room_for_both() -> None:
    desk = Desk(tokens=1280)
    desk.prefill("a" * 300 + "b" * 300)
    row = desk.start("a" * 300 + "c" * 400)
    assert desk.begin(row) == (True, [])
    assert row.reused == 256


def test_two_rows_continue_one_prefix_and_the_last_takes_it() -> None:
    desk = Desk(tokens=1536)
    desk.prefill("a" * 600)
    first, second = desk.start("a" * 600 + "b"), desk.start("a" * 600 + "c")
    assert desk.begin(first) == (False, [])
    assert desk.begin(second) == (True, [])


def test_others_conversations_are_not_dropped_for_a_rows_copy() -> None:
    """Neither while it runs, nor when it ends: it has memory for what is kept of it."""
    desk = Desk(tokens=1280)
    desk.prefill("a" * 600)
    row = desk.start("b" * 300)
    assert desk.begin(row) == (False, [])
    desk.finish(row, "c" * 30)
    assert desk.leave(row) == ["keep 2: 329 of 2"]
    assert desk.row("a" * 601).reused == 600


def test_first_prompts_go_before_conversations_while_these_are_the_smaller_part() -> None:
    desk = Desk(tokens=2048)
    talk, _ = desk.prefill("a" * 300)
    desk.finish(talk, "b" * 20)
    follow, _ = desk.prefill("a" * 300 + "b" * 20 + "c" * 100)
    desk.left(follow)
    for letter in "defghijklm":
        row, _ = desk.prefill(letter * 300)
        desk.left(row)
    assert desk.row("a" * 300 + "b" * 20 + "c" * 101).reused == 420
    assert desk.row("d" * 301).reused == 0
    for letter in "nop":
        desk.prefill(letter * 900)
        turn, _ = desk.prefill(letter * 900 + "q" * 50)
        desk.left(turn)
    assert desk.row("a" * 300 + "b" * 20 + "c" * 101).reused == 0, "unused, beside larger ones"


def test_what_was_computed_of_a_cancelled_prompt_is_kept() -> None:
    desk = Desk()
    row = desk.start("a" * 500)
    desk.chunk(row, 300)
    assert desk.leave(row) == ["keep 1: 256 of 1"]
    assert desk.row("a" * 500).reused == 256
    exact = Desk(EXACT)
    row = exact.start("a" * 500)
    exact.chunk(row, 300)
    assert exact.leave(row) == []
    exact = Desk(EXACT, tokens=800, marks=10)
    row = exact.start("a" * 500)
    exact.chunk(row, 484)
    assert exact.changes() == ["mark 1: 484"], "there is no room for a copy"
    exact.chunk(row, 500)
    assert exact.leave(row) == ["keep 1: 484 of 1"]


def test_marks_go_before_prefixes_and_those_of_the_longest_unused_first() -> None:
    """But for the ends of prefixes, at which their conversations go on."""
    desk = Desk(EXACT, tokens=900, marks=60)
    for letter in "ab":
        for length in (200, 300):
            desk.left(desk.prefill(letter * length)[0])
    assert desk.cache.kept_bytes() == [2 * 284 + 4 * 60]
    changes = desk.prefill("c" * 100)[1]
    assert changes == ["unmark prefix 2: 184", "keep 5: 84 of 5"]
    assert [desk.row(letter * 300).reused for letter in "abc"] == [284, 284, 84]
    assert desk.row("a" * 200 + "d" * 100).reused == 0
    assert desk.row("b" * 200 + "d" * 100).reused == 184


def test_a_row_has_marks_while_it_runs_and_they_go_last_of_all() -> None:
    desk = Desk(EXACT, tokens=1070, marks=10)
    desk.left(desk.prefill("a" * 400)[0])
    row = desk.start("a" * 400 + "b" * 400)
    assert desk.begin(row) == (True, [])
    assert list(desk.board.kept.marks.of_row(row.number)) == [384]
    assert desk.cache.kept_bytes() == [10]
    desk.fill(40)
    assert desk.changes() == [f"unmark row {row.number}: 384"]
    assert desk.leave(row) == []
    assert desk.cache.kept_bytes() == [0]


def test_a_cache_whose_board_has_refused_a_change_looks_for_no_room_for_ever() -> None:
    desk = Desk(EXACT, tokens=2000, marks=10)
    desk.left(desk.prefill("a" * 200)[0])
    desk.left(desk.prefill("a" * 200 + "b" * 200)[0])
    desk.board.plan(control.Change(drop=control.Drop(prefix=9)))  # which is not kept
    desk.fill(2000)
    desk.cache.make_room()
    assert not desk.cache.has_room()


def test_a_row_that_leaves_is_not_kept_at_a_mark_that_is_given_up_for_it() -> None:
    desk = Desk(EXACT, tokens=1200, marks=10)
    row = desk.start("a" * 500)
    desk.fill(400)
    desk.chunk(row, 484)
    assert desk.changes() == ["mark 1: 484"]
    desk.fill(310)
    assert desk.leave(row) == []


def test_what_an_earlier_epoch_marked_is_found_again_as_far_as_there_is_room() -> None:
    for tokens, found in ((1000, [184, 284]), (320, [0, 284])):
        desk = Desk(EXACT, tokens=tokens, marks=20)
        names = [*desk.row("a" * 200).names, *desk.row("a" * 300).names]
        names = tuple(sorted({pair for pair in names if pair[0] in (64, 184, 284)}))
        desk.adopt([(Origin(1, 1, 284), names)])
        (change,) = desk.changes()
        assert change == "adopt 1: 284 of 1"
        assert [desk.row("a" * 200 + "b" * 100).reused, desk.row("a" * 300).reused] == found


def test_where_the_user_has_asked_a_conversation_goes_on_after_many_turns_of_tools() -> None:
    """A template may leave out there what was thought since. That is still the same conversation."""
    desk = Desk(EXACT, tokens=1 << 20, marks=10)
    text = "a" * 100
    row, _ = desk.prefill(text, "user")
    for turn in range(40):
        answer = chr(200 + turn) * 20
        desk.finish(row, answer, ahead=1)
        desk.left(row)
        text += answer + chr(300 + turn) * 30
        row, changes = desk.prefill(text, "tool")
    assert len(changes[-1].split(" and ")) == MOST
    follow, changes = desk.prefill("a" * 100 + "b" * 100, "user")
    assert (follow.reused, follow.continues) == (100 - OPENING, True)


def test_of_marks_that_behind_what_the_user_has_asked_goes_last() -> None:
    desk = Desk(EXACT, tokens=1000, marks=60)
    row, text = desk.prefill("a" * 100, "user")[0], "a" * 100
    for letter in "bcd":
        desk.left(row)
        text += letter * 70
        row, _ = desk.prefill(text, "tool")
    desk.left(row)
    desk.fill(500)
    assert desk.changes() == ["unmark prefix 4: 154 and 224"]
    desk.fill(120)
    assert desk.changes() == ["unmark prefix 4: 84"]


def test_where_a_waiting_row_begins_stays_while_others_need_memory() -> None:
    desk = Desk(EXACT, tokens=4000, marks=500)
    turn = 200 - OPENING
    row, _ = desk.prefill("a" * 200)
    desk.finish(row, "b" * 40 + ".")
    waiting = desk.start("a" * 200 + "c" * 100)  # its template renders the answer otherwise
    assert waiting.reused == turn
    while desk.ledger.fits(256 + 500):
        desk.ledger.reserve(100 + desk.ledger.rows, 1, 256)
    desk.changes()
    desk.cache.prepare(waiting)
    assert waiting.reused == turn


def test_where_a_waiting_row_begins_goes_where_there_is_no_room_for_its_mark() -> None:
    desk = Desk(EXACT, tokens=4000, marks=500)
    desk.prefill("a" * 200)
    waiting = desk.start("a" * 200 + "c" * 100)
    while desk.ledger.fits(256):
        desk.ledger.reserve(100 + desk.ledger.rows, 1, 256)
    desk.changes()
    assert desk.cache.has_room()
    desk.cache.prepare(waiting)
    assert waiting.reused == 0


def test_what_a_row_begins_with_fits_where_the_prefix_that_it_expected_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins at the end of another prefix then. A row that waits begins before that end and has memory for
    the mark there, as long as nobody else begins at it."""
    desk = Desk(EXACT, tokens=6000, marks=500)
    planner = StepPlanner(desk.ring)
    desk.board, desk.cache, desk.ledger = planner.board, planner.prefixes, planner.ledger
    for length in (100, 300, 200):
        desk.left(desk.prefill("a" * length)[0])
    row, waiting = desk.row("a" * 400), desk.row("a" * 100 + "s" * 100)
    for each in (row, waiting):
        assert planner.ledger.reserve_all((each,), each.reserved)
        planner.start(each)
    assert (row.reused, waiting.reused) == (284, 84)
    while desk.ledger.fits(256 + 500):
        desk.ledger.reserve(100 + desk.ledger.rows, 1, 256)
    monkeypatch.setattr(desk.cache, "cut", lambda row: None)  # whose mark takes the place of others
    step = next(planner.steps(0, pressed=False))
    assert [chunk.row for chunk in step.prefill.chunks] == [row.number]
    assert desk.cache.has_room()


def test_a_row_waits_for_a_mark_of_a_row_that_has_ended() -> None:
    desk = Desk(EXACT, tokens=900, marks=500)
    row = desk.start("a" * 200)
    for end in (*row.cuts, 200):
        desk.chunk(row, end)
    assert desk.changes() == ["mark 1: 184"], "there is no room for a copy beside the row"
    follow = desk.row("a" * 200 + "c" * 100)
    assert not desk.cache.waits_for(follow), "the answer may take long"
    row.closed = True
    assert desk.cache.waits_for(follow)
    assert desk.leave(row) == ["keep 1: 184 of 1"]
    assert not desk.cache.waits_for(follow)
    desk.cache.prepare(follow)
    assert follow.reused == 184


def test_a_rows_newest_mark_takes_the_place_of_its_older_ones_and_no_other_conversations() -> None:
    desk = Desk(EXACT, tokens=2600, marks=500)
    other, _ = desk.prefill("o" * 100)
    assert desk.finish(other, "p" * 40 + ".") == ["drop 1", "keep 2: 140 of 1 and 84"]
    row = desk.start("a" * 300)
    changes: list[str] = []
    row.cuts = (100, 200, 284)
    row.names = tuple((length, bytes([length % 256]) * 16) for length in row.cuts)
    for end in row.cuts:
        desk.chunk(row, end)
        changes += desk.changes()
    assert "unmark prefix 2: 84" not in changes
    assert changes[-2:] == ["unmark row 2: 200", "mark 2: 284"]


@pytest.mark.parametrize(
    ("text", "pays"),
    [
        ("b" * 300, True),
        ("b" * 600, False),  # others would be dropped for it
        ("a" * 400 + "c" * 300, True),  # it takes the place of what it continues
        ("a" * 400 + "c" * 200, False),  # too few tokens
    ],
)
def test_an_idle_ring_prefills_what_takes_time_and_no_ones_memory(text: str, pays: bool) -> None:
    desk = Desk(tokens=1000)
    desk.left(desk.prefill("a" * 400)[0])
    assert desk.cache.pays(desk.row(text)) is pays
    assert desk.changes() == []
