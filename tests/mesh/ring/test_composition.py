"""Composition: what follows is taken, nothing else is, and members that differ have other digests."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring import (
    MAX_CHANGES,
    MAX_LANES,
    MAX_PREFIXES,
    Admission,
    Adopting,
    Composition,
    Dropping,
    Eviction,
    Keeping,
    Origin,
    ResolvedStep,
    Restoring,
    Settling,
)
from sealring.mesh.ring.composition import MAX_GAPS
from sealring.mesh.ring.prefix_marks import MOST
from sealring.v1 import control_pb2 as control

CHUNK = 8
MAX_ROWS = 6


def make(epoch: int = 1) -> Composition:
    return Composition(epoch=epoch, max_rows=MAX_ROWS, prefill_chunk=CHUNK)


@st.composite
def valid_runs(draw: st.DrawFn) -> list[control.Step]:
    """Steps that follow from one another, of a model that shares no code with the composition."""
    prompts: dict[int, int] = {}
    progress: dict[int, int] = {}
    lanes: dict[int, list[int]] = {}
    highest = 0
    steps = []
    for number in range(1, draw(st.integers(1, 25)) + 1):
        step = control.Step(number=number)
        lanes = {lane: rows for lane, rows in lanes.items() if rows}
        for row in [row for row, done in progress.items() if done == prompts[row]]:
            if draw(st.booleans()):
                lane = draw(st.integers(0, 2))
                step.changes.add().admit.CopyFrom(control.Admit(row=row, lane=lane))
                lanes.setdefault(lane, []).append(row)
                del progress[row]
        for row in [*progress, *(row for rows in lanes.values() for row in rows)]:
            if draw(st.integers(0, 5)) == 0:
                step.changes.add().evict.row = row
                progress.pop(row, None)
                lanes = {lane: [each for each in rows if each != row] for lane, rows in lanes.items()}
                lanes = {lane: rows for lane, rows in lanes.items() if rows}
        kind = draw(st.sampled_from(["prefill", "prefill", "decode", "none"]))
        if kind == "decode" and lanes:
            step.decode.lane = draw(st.sampled_from(sorted(lanes)))
        elif kind == "prefill":
            for row in sorted(row for row, done in progress.items() if done < prompts[row]):
                if draw(st.booleans()):
                    end = draw(st.integers(progress[row] + 1, min(prompts[row], progress[row] + CHUNK)))
                    step.prefill.chunks.add(row=row, start=progress[row], end=end, prompt_tokens=prompts[row])
                    progress[row] = end
            if draw(st.booleans()) and len(progress) + sum(map(len, lanes.values())) < MAX_ROWS:
                highest += draw(st.integers(1, 3))
                prompts[highest] = draw(st.integers(1, 30))
                end = draw(st.integers(1, min(prompts[highest], CHUNK)))
                step.prefill.chunks.add(
                    row=highest, start=0, end=end, prompt_tokens=prompts[highest], params_bytes=64
                )
                progress[highest] = end
            if not step.prefill.chunks:
                step.ClearField("work")
        steps.append(step)
    return steps


def lengths(steps: list[ResolvedStep]) -> dict[int, int]:
    held: dict[int, int] = {}
    for step in steps:
        for change in step.changes:
            if isinstance(change, Eviction):
                del held[change.row]
        for chunk in step.chunks:
            assert held.get(chunk.row, 0) == chunk.start
            held[chunk.row] = chunk.end
        for row in step.rows:
            held[row] += 1
    return held


@given(valid_runs())
def test_what_follows_is_taken(steps: list[control.Step]) -> None:
    one, two = make(), make()
    resolved = [one.apply(step) for step in steps]
    assert resolved == [two.apply(control.Step.FromString(step.SerializeToString())) for step in steps]
    assert len({step.digest for step in resolved}) == len(resolved)
    held = lengths(resolved)
    assert one.rows == len(held) <= MAX_ROWS
    assert set(held) == set(one.prefilling()) | {row for rows in one.lanes.all().values() for row in rows}
    for step in resolved:
        assert set(step.sampled) == set(step.rows) | {chunk.row for chunk in step.chunks if chunk.last}


@given(valid_runs())
def test_changes_tell_where_rows_were(steps: list[control.Step]) -> None:
    """A member that applies the reported changes to lists of its own has the same lanes."""
    composition = make()
    mine: dict[int, list[int]] = {}
    for step in steps:
        for change in composition.apply(step).changes:
            if isinstance(change, Admission):
                mine.setdefault(change.lane, []).append(change.row)
            elif isinstance(change, Eviction) and change.lane is not None:
                assert mine[change.lane].pop(change.index) == change.row
        assert {lane: tuple(rows) for lane, rows in mine.items() if rows} == composition.lanes.all()
        for lane, rows in mine.items():
            assert composition.lanes.of(lane) == tuple(rows)


@given(valid_runs(), st.data())
def test_members_that_differ_have_other_digests(steps: list[control.Step], data: st.DataObject) -> None:
    """From the first step on that one of two members saw otherwise, unless it changed nothing."""
    at = data.draw(st.integers(0, len(steps) - 1))
    other = copy.deepcopy(steps[at])
    change = data.draw(st.sampled_from(["drop", "swap", "epoch", "work"]))
    if change == "drop" and other.changes:
        del other.changes[-1]
    elif change == "swap" and other.HasField("decode"):
        other.decode.lane += 1
    elif change == "work" and other.WhichOneof("work"):
        other.ClearField("work")
    one, two = make(), make(2 if change == "epoch" else 1)
    for step in steps[:at]:
        one.apply(step)
        two.apply(step)
    digest = one.apply(steps[at]).digest
    try:
        told = two.apply(other).digest
    except InvalidInput:
        assert other != steps[at], "what one member computes another one refuses"
    else:
        assert (told == digest) == (other == steps[at] and change != "epoch")


steps_of_any_kind = st.builds(
    lambda number, changes, work: _any_step(number, changes, work),
    st.integers(1, 5),
    st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 70)), max_size=4),
    st.none()
    | st.integers(0, 70)
    | st.lists(
        st.tuples(*[st.integers(0, n) for n in (4, 12, 20, 20)], st.sampled_from([0, 64, 1 << 21])),
        max_size=4,
    ),
)


def _any_step(
    number: int,
    changes: list[tuple[bool, int, int]],
    work: int | list[tuple[int, int, int, int, int]] | None,
) -> control.Step:
    step = control.Step(number=number)
    for admit, row, lane in changes:
        if admit:
            step.changes.add().admit.CopyFrom(control.Admit(row=row, lane=lane))
        else:
            step.changes.add().evict.row = row
    if isinstance(work, int):
        step.decode.lane = work
    elif work is not None:
        step.prefill.SetInParent()
        for row, start, end, total, params in work:
            step.prefill.chunks.add(row=row, start=start, end=end, prompt_tokens=total, params_bytes=params)
    return step


@given(valid_runs(), st.lists(steps_of_any_kind, max_size=5))
def test_anything_else_is_refused_in_one_way(steps: list[control.Step], more: list[control.Step]) -> None:
    composition = make()
    for step in steps:
        composition.apply(step)
    for step in more:
        step.number += composition.last_step
        try:
            resolved = composition.apply(step)
        except InvalidInput as error:
            reason = error.reason
        else:
            reason = "BAD_STEP"
            assert composition.rows <= MAX_ROWS
            assert all(lane < MAX_LANES for lane in composition.lanes.all())
            assert all(chunk.tokens <= CHUNK for chunk in resolved.chunks)
            assert all(done <= total for done, total in composition.prefilling().values())
        assert reason == "BAD_STEP"
        if step.number != composition.last_step:
            break


def prefill(number: int, row: int, start: int, end: int, total: int) -> control.Step:
    step = control.Step(number=number)
    step.prefill.chunks.add(row=row, start=start, end=end, prompt_tokens=total)
    return step


def test_step_numbers_have_no_gaps() -> None:
    composition = make()
    with pytest.raises(InvalidInput, match="step 2 follows step 0"):
        composition.apply(control.Step(number=2))


def changed(number: int, *changes: control.Change) -> control.Step:
    return control.Step(number=number, changes=changes)


def admit(row: int, lane: int) -> control.Change:
    return control.Change(admit=control.Admit(row=row, lane=lane))


def evict(row: int) -> control.Change:
    return control.Change(evict=control.Evict(row=row))


def decode(number: int, lane: int, **field: Any) -> control.Step:
    drafted = field.get("drafts") or field.get("guesses")
    source = control.DRAFT_SOURCE_LOOKUP if drafted else control.DRAFT_SOURCE_UNSPECIFIED
    return control.Step(number=number, decode=control.Decode(lane=lane, source=source, **field))


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (decode(5, 1), "lane 1 has no rows"),
        (changed(5, control.Change()), "a change is empty"),
        (changed(5, admit(1, 1)), "row 1 is not ready"),
        (changed(5, admit(9, 1)), "row 9 is not ready"),
        (changed(5, admit(2, 512)), "lane 512 is above 511"),
        (changed(5, admit(2, 511)), ""),
        (changed(5, admit(2, 0)), "row 3 has drafts that are not settled"),
    ],
)
def test_what_cannot_be_done_with_a_row_or_a_lane_says_why(step: control.Step, why: str) -> None:
    composition = make()
    for number, (row, total) in enumerate([(1, 8), (2, 4), (3, 4)], 1):
        composition.apply(prefill(number, row, 0, 4, total))
    drafted = decode(4, 0, drafts=2)
    drafted.changes.append(admit(3, 0))
    composition.apply(drafted)
    if not why:
        assert composition.apply(step).changes == (Admission(2, 511),)
        return
    with pytest.raises(InvalidInput, match=why):
        composition.apply(step)


def test_a_guess_is_asked_for_of_the_rows_of_a_lane() -> None:
    composition = make()
    for row in (1, 2):
        composition.apply(prefill(row, row, 0, 4, 4))
    composition.apply(changed(3, admit(1, 0)))
    assert not composition.apply(decode(4, 0)).asks
    assert composition.apply(decode(5, 0, asks=True)).asks
    composition.apply(changed(6, admit(2, 0)))
    assert composition.apply(decode(7, 0, asks=True)).asks


@pytest.mark.parametrize("field", [{"drafts": 1}, {"guesses": 1}])
def test_drafts_are_of_some_source(field: dict[str, int]) -> None:
    composition = make()
    for step in (prefill(1, 1, 0, 8, 8), changed(2, admit(1, 0))):
        composition.apply(step)
    with pytest.raises(InvalidInput, match="of no source"):
        composition.apply(control.Step(number=3, decode=control.Decode(lane=0, **field)))


def test_digests_are_of_rows_and_prefixes_as_other_releases_compute_them() -> None:
    composition, digests = make(), hashlib.sha256()
    for step in (
        prefill(1, 1, 0, 4, 8),
        prefill(2, 1, 4, 8, 8),
        kept(3, (1, 1, 5)),
        changed(4, admit(1, 0)),
        decode(5, 0),
        decode(6, 0, drafts=3),
        changed(7, control.Change(settle=control.Settle(row=1, tokens=11))),
        kept(8, drop=1),
        with_choices(9, 2, 0, 8, 9, 2),
        changed(10, evict(1)),
    ):
        digests.update(composition.apply(step).digest)
    assert digests.hexdigest() == "31736fdb2286ca7af6c619f2d511d08a0728a8be43667a54d7fc3ebbee158e21"


def test_marks_are_counted_once_and_in_the_digest() -> None:
    composition = make()
    composition.apply(prefill(1, 1, 0, 4, 12))
    composition.apply(changed(2, control.Change(mark=control.Mark(row=1, tokens=4))))
    composition.apply(prefill(3, 1, 4, 8, 12))
    twin = copy.deepcopy(composition)
    keep = control.Keep(prefix=1, row=1, tokens=8, marks=[4])
    (change,) = composition.apply(changed(4, control.Change(keep=keep))).changes
    assert change == Keeping(1, Origin(1, 1, 8), 8, None, 0, (4,))
    assert composition.marks == 2, "the row has both, too"
    digest = composition.apply(prefill(5, 1, 8, 12, 12)).digest
    twin.apply(changed(4, control.Change(keep=control.Keep(prefix=1, row=1, tokens=8))))
    assert twin.apply(prefill(5, 1, 8, 12, 12)).digest != digest
    composition.apply(changed(6, evict(1)))
    assert composition.marks == 2
    unmark = control.Unmark(prefix=1, marks=[4])
    composition.apply(changed(7, control.Change(unmark=unmark)))
    assert composition.marks == 1
    composition.apply(kept(8, drop=1))
    assert composition.marks == 0


@pytest.mark.parametrize(
    "change",
    [
        control.Change(mark=control.Mark(row=1, tokens=3)),
        control.Change(mark=control.Mark(row=2, tokens=4)),
        control.Change(keep=control.Keep(prefix=2, row=1, tokens=8, marks=[3])),
        control.Change(keep=control.Keep(prefix=2, row=1, tokens=4, marks=[4])),
        control.Change(keep=control.Keep(prefix=2, row=1, tokens=8, marks=[4, 4])),
        control.Change(unmark=control.Unmark(row=1, marks=[3])),
        control.Change(unmark=control.Unmark(row=1)),
        control.Change(unmark=control.Unmark(prefix=1, marks=[8])),  # its end
        control.Change(unmark=control.Unmark(prefix=7, marks=[4])),
    ],
)
def test_marks_that_are_not_there_end_the_epoch(change: control.Change) -> None:
    composition = make()
    composition.apply(prefill(1, 1, 0, 4, 12))
    composition.apply(changed(2, control.Change(mark=control.Mark(row=1, tokens=4))))
    composition.apply(prefill(3, 1, 4, 8, 12))
    keep = control.Keep(prefix=1, row=1, tokens=8, marks=[4])
    composition.apply(changed(4, control.Change(keep=keep)))
    with pytest.raises(InvalidInput):
        composition.apply(changed(5, change))


def test_a_row_has_no_more_marks_than_a_prefix() -> None:
    composition = make()
    for number in range(MOST + 1):
        composition.apply(prefill(1 + 2 * number, 1, number, number + 1, 100))
        mark = changed(2 + 2 * number, control.Change(mark=control.Mark(row=1, tokens=number + 1)))
        if number < MOST:
            composition.apply(mark)
    with pytest.raises(InvalidInput):
        composition.apply(mark)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3)), max_size=30))
def test_rows_begin_in_any_order_of_their_numbers_and_never_twice(rows: list[tuple[int, int]]) -> None:
    """A row whose prompt is read for long begins after others with higher numbers."""
    composition, used, number = make(), {0}, 0
    for row, choices in rows:
        numbers = set(range(row, row + choices))
        step = with_choices(number + 1, row, 0, 1, 2, choices)
        before = copy.deepcopy(composition)
        if numbers & used:
            with pytest.raises(InvalidInput, match=f"row {row} is not a new row"):
                composition.apply(step)
            composition = before
            continue
        composition.apply(step)
        used |= numbers
        composition.apply(changed(number + 2, evict(row)))
        number += 2


def test_rows_that_never_begin_take_bounded_memory() -> None:
    """Gaps at every second number: the lowest are given up beyond a bound, and later rows may still begin."""
    composition = Composition(epoch=1, max_rows=64, prefill_chunk=CHUNK)

    def begun(*rows: int) -> None:
        step = control.Step(number=composition.last_step + 1)
        for row in rows:
            step.prefill.chunks.add(row=row, start=0, end=1, prompt_tokens=2)
        composition.apply(step)
        composition.apply(changed(composition.last_step + 1, *map(evict, rows)))

    for first in range(2, 2 * MAX_GAPS + 2, 128):
        begun(*range(first, first + 128, 2))
    begun(2 * MAX_GAPS + 2)
    begun(2 * MAX_GAPS + 1)
    begun(3)
    with pytest.raises(InvalidInput, match="row 1 is not a new row"):
        begun(1)


def test_rows_are_limited_after_the_changes_of_the_step() -> None:
    composition = make()
    for row in range(1, MAX_ROWS + 1):
        composition.apply(prefill(row, row, 0, 1, 2))
    step = prefill(MAX_ROWS + 1, MAX_ROWS + 1, 0, 1, 2)
    step.changes.add().evict.row = 1
    composition.apply(step)
    with pytest.raises(InvalidInput, match="one more than"):
        composition.apply(prefill(MAX_ROWS + 2, MAX_ROWS + 2, 0, 1, 2))


def kept(number: int, *prefixes: tuple[int, int, int], drop: int = 0) -> control.Step:
    step = control.Step(number=number)
    for prefix, row, tokens in prefixes:
        step.changes.add().keep.CopyFrom(control.Keep(prefix=prefix, row=row, tokens=tokens))
    if drop:
        step.changes.add().drop.prefix = drop
    return step


def with_prefix(
    number: int, row: int, start: int, end: int, total: int, prefix: int, *, takes: bool = False
) -> control.Step:
    step = prefill(number, row, start, end, total)
    step.prefill.chunks[0].prefix = prefix
    step.prefill.chunks[0].takes = takes
    step.prefill.chunks[0].params_bytes = 64
    return step


def test_a_row_begins_with_a_kept_prefix() -> None:
    composition = make()
    composition.apply(prefill(1, 1, 0, 8, 20))
    (change,) = composition.apply(kept(2, (1, 1, 6))).changes
    assert change == Keeping(1, Origin(1, 1, 6), 8, None, 0)
    (chunk,) = composition.apply(with_prefix(3, 2, 5, 9, 9, 1)).chunks
    assert chunk.first
    assert chunk.last
    assert chunk.tokens == 4
    assert composition.prefilling() == {1: (8, 20), 2: (9, 9)}
    composition.apply(with_prefix(4, 3, 1, 9, 9, 1))
    assert composition.kept.all() == {1: 6}
    assert composition.apply(kept(5, drop=1)).changes == (Dropping(1),)
    assert composition.kept.all() == {}


def test_a_row_takes_a_prefix_that_nothing_can_begin_with_any_more() -> None:
    composition = make()
    composition.apply(prefill(1, 1, 0, 8, 20))
    composition.apply(kept(2, (1, 1, 6)))
    assert composition.tokens == 14
    assert composition.apply(with_prefix(3, 2, 5, 9, 20, 1, takes=True)).chunks[0].takes
    assert (composition.kept.all(), composition.tokens) == ({}, 17)
    composition.apply(kept(4, (2, 2, 9)))
    with pytest.raises(InvalidInput, match="does not hold"):
        composition.apply(with_prefix(5, 3, 5, 9, 9, 1))


def test_a_row_in_a_lane_holds_the_tokens_that_were_computed() -> None:
    """Tokens of prompt and answer but the last, which no step has computed; rows join at any time."""
    composition = make()
    composition.apply(prefill(1, 1, 0, 4, 4))
    composition.apply(prefill(2, 2, 0, 6, 6))
    number = 3
    for row, steps in ((1, 3), (2, 2)):
        first = control.Step(number=number)
        first.changes.add().admit.CopyFrom(control.Admit(row=row, lane=1))
        for offset in range(steps):
            step = first if offset == 0 else control.Step(number=number)
            step.decode.lane = 1
            composition.apply(step)
            number += 1
    changes = composition.apply(kept(number, (1, 1, 9), (2, 2, 8))).changes
    assert changes == (Keeping(1, Origin(1, 1, 9), 9, 1, 0), Keeping(2, Origin(1, 2, 8), 8, 1, 1))
    with pytest.raises(InvalidInput, match="does not hold"):
        composition.apply(kept(number + 1, (3, 1, 10)))


@pytest.mark.parametrize(
    "step",
    [
        kept(3, (1, 1, 4)),  # a number that was used
        kept(3, (2, 1, 9)),  # more than the row has
        kept(3, (2, 1, 0)),
        kept(3, (2, 7, 1)),  # of a row that is not there
        kept(3, drop=2),
        with_prefix(3, 2, 6, 9, 9, 1),  # more than was kept
        with_prefix(3, 2, 0, 9, 9, 1),  # nothing of it
        with_prefix(3, 2, 5, 9, 9, 2),  # of a prefix that is not there
        with_prefix(3, 2, 1, 9, 9, 2),
        with_prefix(3, 1, 8, 9, 9, 1),  # by a row that is there already
        with_prefix(3, 2, 0, 9, 9, 0, takes=True),  # takes none
        with_prefix(3, 1, 8, 9, 9, 0, takes=True),  # not with the first chunk
        prefill(3, 2, 5, 8, 9),
    ],
)
def test_prefixes_that_do_not_follow_are_refused(step: control.Step) -> None:
    composition = make()
    composition.apply(prefill(1, 1, 0, 8, 9))
    composition.apply(kept(2, (1, 1, 5)))
    with refused("BAD_STEP", InvalidInput):
        composition.apply(step)


def test_keeps_and_drops_come_before_other_changes() -> None:
    composition = make()
    composition.apply(prefill(1, 1, 0, 8, 8))
    step = control.Step(number=2)
    step.changes.add().admit.CopyFrom(control.Admit(row=1, lane=0))
    step.changes.add().keep.CopyFrom(control.Keep(prefix=1, row=1, tokens=4))
    with pytest.raises(InvalidInput, match="after other changes"):
        composition.apply(step)


def test_no_more_is_kept_than_the_limit() -> None:
    composition = make()
    composition.apply(prefill(1, 1, 0, 8, 8))
    composition.apply(kept(2, *((number, 1, 1) for number in range(1, MAX_PREFIXES + 1))))
    with pytest.raises(InvalidInput, match="one more than"):
        composition.apply(kept(3, (MAX_PREFIXES + 1, 1, 1)))


def adopted(number: int, prefix: int, *origin: int) -> control.Step:
    adopt = control.Adopt(prefix=prefix, epoch=origin[0], row=origin[1], tokens=origin[2])
    return control.Step(number=number, changes=[control.Change(adopt=adopt)])


def test_a_prefix_of_an_earlier_epoch_is_adopted_in_the_first_step() -> None:
    composition = make(epoch=3)
    assert composition.apply(adopted(1, 1, 2, 7, 6)).changes == (Adopting(1, Origin(2, 7, 6)),)
    assert (composition.kept.all(), composition.tokens) == ({1: 6}, 6)
    assert composition.apply(with_prefix(2, 1, 5, 9, 9, 1)).chunks[0].prefix == 1
    for step in (adopted(3, 2, 2, 8, 6), adopted(1, 1, 3, 7, 6), adopted(1, 1, 2, 7, 0)):
        with pytest.raises(InvalidInput):
            (composition if step.number == 3 else make(epoch=3)).apply(step)
    origins = [(1, 7, 6), (2, 8, 6), (2, 7, 5)]
    digests = {make(epoch=3).apply(adopted(1, 1, *origin)).digest for origin in origins}
    assert len(digests) == len(origins)


def restored(
    number: int, prefix: int, recall: int, tokens: int = 256, name: bytes = b"n" * 16
) -> control.Step:
    restore = control.Restore(prefix=prefix, recall=recall, tokens=tokens, name=name)
    return control.Step(number=number, changes=[control.Change(restore=restore)])


def test_what_all_members_recalled_is_kept_in_any_step() -> None:
    composition = make(epoch=3)
    composition.apply(prefill(1, 1, 0, 4, 4))
    (change,) = composition.apply(restored(2, 1, 5)).changes
    assert isinstance(change, Restoring)
    assert (change.prefix, change.recall, change.tokens, change.origin.epoch) == (1, 5, 256, 3)
    assert (composition.kept.all(), composition.tokens) == ({1: 256}, 260)
    assert composition.apply(with_prefix(3, 2, 256, 260, 300, 1)).chunks[0].prefix == 1
    for step in (restored(1, 1, 5, tokens=0), restored(1, 1, 5, name=b""), restored(1, 1, 1 << 63)):
        with pytest.raises(InvalidInput):
            make().apply(step)
    others = [restored(1, 1, 5), restored(1, 1, 6), restored(1, 1, 5, 512), restored(1, 1, 5, name=b"m" * 16)]
    after = [[made.apply(other), made.apply(prefill(2, 1, 0, 4, 4))] for other in others for made in [make()]]
    assert len({steps[1].digest for steps in after}) == len(others), "members that differ part for good"


def with_choices(number: int, row: int, start: int, end: int, total: int, choices: int) -> control.Step:
    step = prefill(number, row, start, end, total)
    step.prefill.chunks[0].choices = choices
    return step


def test_the_last_chunk_of_a_prompt_makes_its_copies() -> None:
    composition = make()
    assert composition.apply(with_choices(1, 2, 0, 8, 12, 3)).sampled == ()
    assert composition.rows == 3
    assert composition.prefilling() == {2: (8, 12)}
    assert composition.apply(prefill(2, 5, 0, 4, 4)).sampled == (5,)
    assert composition.apply(prefill(3, 2, 8, 12, 12)).sampled == (2, 3, 4)
    assert composition.prefilling() == {5: (4, 4), 2: (12, 12), 3: (12, 12), 4: (12, 12)}
    composition.apply(changed(4, evict(2), admit(4, 1)))
    assert composition.rows == 3
    assert composition.lanes.of(1) == (4,)


def test_copies_that_are_not_made_yet_go_with_their_row() -> None:
    composition = make()
    composition.apply(with_choices(1, 1, 0, 8, 12, 4))
    composition.apply(changed(2, evict(1)))
    assert composition.rows == 0
    with pytest.raises(InvalidInput):
        composition.apply(prefill(3, 4, 0, 1, 2))


@pytest.mark.parametrize(
    "step",
    [
        with_choices(2, 3, 0, 8, 9, 1),  # a number that a copy will have
        with_choices(2, 9, 0, 8, 9, 9),  # too many
        with_choices(2, 9, 0, 8, 9, MAX_ROWS - 2),  # more rows than there may be
        with_choices(2, 1, 8, 9, 9, 3),  # not with the first chunk
    ],
)
def test_choices_that_do_not_follow_are_refused(step: control.Step) -> None:
    composition = make()
    composition.apply(with_choices(1, 1, 0, 8, 9, 3))
    with refused("BAD_STEP", InvalidInput):
        composition.apply(step)


def counted(composition: Composition) -> int:
    """The tokens of all caches, from what else the composition tells: each row's as if it were kept."""
    lanes = 0
    for rows in composition.lanes.all().values():
        held = []
        for row in rows:
            trial = copy.deepcopy(composition)
            keep = control.Change(keep=control.Keep(prefix=1 << 40, row=row, tokens=1))
            held.append(trial.apply(control.Step(number=trial.last_step + 1, changes=[keep])).changes[0].held)  # type: ignore[union-attr]
        lanes += len(rows) * max(held)
    alone = sum(done for done, _ in composition.prefilling().values())
    return lanes + alone + sum(composition.kept.all().values())


@given(valid_runs())
def test_the_tokens_of_all_caches(steps: list[control.Step]) -> None:
    composition = make()
    for step in steps:
        composition.apply(step)
        assert composition.tokens == counted(composition)


def test_a_step_of_very_many_changes_is_not_taken() -> None:
    composition = make()
    for number, why in ((MAX_CHANGES + 1, "changes"), (MAX_CHANGES, "row 1")):
        with pytest.raises(InvalidInput, match=why):
            composition.apply(changed(1, *[evict(1)] * number))


def test_a_prefill_names_each_row_once() -> None:
    composition = make()
    chunks = [control.Chunk(row=5, start=start, end=start + 2, prompt_tokens=4) for start in (0, 2)]
    with pytest.raises(InvalidInput) as caught:
        composition.apply(control.Step(number=1, prefill=control.Prefill(chunks=chunks)))
    assert "twice" in caught.value.message


def drafting(*drafts: int) -> tuple[Composition, list[ResolvedStep]]:
    """A row of four tokens, alone in lane 0, after steps with these numbers of drafts."""
    composition = make()
    composition.apply(prefill(1, 1, 0, 4, 4))
    composition.apply(changed(2, admit(1, 0)))
    return composition, [composition.apply(decode(n, 0, drafts=each)) for n, each in enumerate(drafts, 3)]


def settling(composition: Composition, tokens: int, row: int = 1) -> ResolvedStep:
    """The next step, which settles a row and then decodes it."""
    step = decode(composition.last_step + 1, 0)
    step.changes.add().settle.CopyFrom(control.Settle(row=row, tokens=tokens))
    return composition.apply(step)


def test_a_row_computes_its_drafts_and_goes_on_with_them_until_they_are_settled() -> None:
    first, second = drafting(3, 2)[1]
    assert (first.sampled, first.drafts, first.continues) == ((1,) * 4, 3, False)
    assert (second.sampled, second.drafts, second.continues) == ((1,) * 3, 2, True)


@pytest.mark.parametrize(("tokens", "accepted"), [(11, 7), (10, 6), (6, 2), (5, 1)])
def test_what_is_settled_stays(tokens: int, accepted: int) -> None:
    """At least one of the two steps' seven tokens counts, beside the four that the row held before."""
    composition, _ = drafting(3, 2)
    assert composition.tokens == 11
    step = settling(composition, tokens)
    assert step.changes == (Settling(1, 0, accepted, 11 - tokens),)
    assert (composition.tokens, step.sampled, step.continues) == (tokens + 1, (1,), False)
    with pytest.raises(InvalidInput, match="no drafts"):
        settling(composition, tokens + 1)
    composition, _ = drafting(3)
    composition.apply(changed(composition.last_step + 1, evict(1)))
    assert composition.rows == 0, "a row with open drafts can be evicted"


@pytest.mark.parametrize(
    ("drafts", "tokens", "row", "why"),
    [
        ((3, 2), 12, 1, "cannot hold"),
        ((3, 2), 4, 1, "cannot hold"),
        ((3, 2), 11, 2, "no drafts"),
        ((0,), 5, 1, "no drafts"),
    ],
)
def test_what_cannot_be_settled_is_refused(drafts: tuple[int, ...], tokens: int, row: int, why: str) -> None:
    composition, _ = drafting(*drafts)
    with pytest.raises(InvalidInput, match=why):
        settling(composition, tokens, row)


@pytest.mark.parametrize(
    ("drafts", "why"),
    [
        ((3, 0), "not settled"),
        ((16,), "too many"),
        ((15,) * 9, "144 tokens that are not settled"),
        ((15,) * 7 + (14, 0), "drafts that are not settled"),
        ((15,) * 7 + (14, 1), "129 tokens that are not settled"),
    ],
)
def test_drafts_that_do_not_follow_are_refused(drafts: tuple[int, ...], why: str) -> None:
    drafting(*drafts[:-1])
    with pytest.raises(InvalidInput, match=why):
        drafting(*drafts)


def two_in_a_lane() -> Composition:
    composition = make()
    composition.apply(two_rows(1))
    composition.apply(changed(2, admit(1, 0), admit(2, 0)))
    return composition


def test_rows_of_a_lane_have_drafts_together_and_are_settled_each_by_itself() -> None:
    composition = two_in_a_lane()
    before = composition.tokens
    step = composition.apply(decode(3, 0, drafts=2))
    assert (step.sampled, step.drafts) == ((1, 1, 1, 2, 2, 2), 2)
    held = before // 2 + 3
    both = decode(4, 0)
    both.changes.add().settle.CopyFrom(control.Settle(row=1, tokens=held - 2))
    both.changes.add().settle.CopyFrom(control.Settle(row=2, tokens=held))
    settled = composition.apply(both)
    assert settled.changes == (Settling(1, 0, 1, 2), Settling(2, 0, 3, 0))
    assert composition.tokens == 2 * (held + 1), "a lane is as long as its longest row"


@pytest.mark.parametrize(
    ("drafts", "again", "why"), [(8, 0, "for 2 rows"), (1, 1, "not settled"), (1, 0, "not settled")]
)
def test_rows_together_have_one_run_and_few_tokens(drafts: int, again: int, why: str) -> None:
    composition = two_in_a_lane()
    with pytest.raises(InvalidInput, match=why):
        composition.apply(decode(3, 0, drafts=drafts))
        composition.apply(decode(4, 0, drafts=again))


@pytest.mark.parametrize(
    ("rows", "guesses", "good"), [(1, 15, True), (1, 16, False), (2, 7, True), (2, 8, False)]
)
def test_as_many_tokens_are_guessed_ahead_as_the_next_step_may_compute(
    rows: int, guesses: int, good: bool
) -> None:
    composition = make()
    composition.apply(two_rows(1))
    composition.apply(changed(2, *(admit(row, 0) for row in range(1, 1 + rows))))
    if good:
        assert composition.apply(decode(3, 0, guesses=guesses)).guesses == guesses
    else:
        with pytest.raises(InvalidInput, match=f"{guesses} guesses for {rows} rows are too many"):
            composition.apply(decode(3, 0, guesses=guesses))


def test_members_that_disagree_about_drafts_have_other_digests() -> None:
    drafted = [drafting(*drafts)[1][-1].digest for drafts in ((0,), (1,), (2,))]
    settled = [settling(drafting(3)[0], tokens).digest for tokens in (5, 6, 7)]
    assert len({*drafted, *settled}) == 6


@pytest.mark.parametrize(("chunks", "good"), [(0, False), (1, True), (64, True), (65, False)])
def test_a_prefill_has_1_to_64_chunks(chunks: int, good: bool) -> None:
    composition = Composition(epoch=1, max_rows=100, prefill_chunk=CHUNK)
    step = control.Step(number=1)
    step.prefill.SetInParent()
    for row in range(1, chunks + 1):
        step.prefill.chunks.add(row=row, start=0, end=1, prompt_tokens=1)
    if good:
        assert len(composition.apply(step).chunks) == chunks
    else:
        with pytest.raises(InvalidInput, match=f"a prefill has {chunks} chunks"):
            composition.apply(step)


@pytest.mark.parametrize(
    ("chunk", "why"),
    [
        ({"end": CHUNK, "prompt_tokens": CHUNK, "params_bytes": 1 << 20}, ""),
        ({"end": CHUNK, "prompt_tokens": CHUNK, "params_bytes": (1 << 20) + 1}, "parameters of row 1"),
        ({"end": CHUNK + 1, "prompt_tokens": 20}, "not allowed"),
        ({"end": 5, "prompt_tokens": 4}, "not allowed"),
        ({"end": 0, "prompt_tokens": 4}, "not allowed"),
        ({"end": 1, "prompt_tokens": 4, "choices": 9}, "more than 8 choices"),
        ({"start": 1, "end": 2, "prompt_tokens": 4}, "does not continue"),
        ({"start": 1, "end": 2, "prompt_tokens": 4, "params_bytes": 1}, "first chunk only"),
        ({"start": 1, "end": 2, "prompt_tokens": 4, "choices": 1}, "first chunk only"),
    ],
    ids=str,
)
def test_a_chunk_that_cannot_be_says_why(chunk: dict[str, int], why: str) -> None:
    step = control.Step(number=1)
    step.prefill.chunks.add(row=1, **chunk)
    composition = Composition(epoch=1, max_rows=100, prefill_chunk=CHUNK)
    if not why:
        assert composition.apply(step).chunks[0].params_bytes == 1 << 20
        return
    with pytest.raises(InvalidInput, match=why):
        composition.apply(step)


def two_rows(number: int) -> control.Step:
    step = prefill(number, 1, 0, 4, 4)
    step.prefill.chunks.add(row=2, start=0, end=4, prompt_tokens=4)
    return step


PREFIXES = [
    kept(2, (1, 1, 5)),
    kept(2, (1, 1, 4)),
    kept(2, (2, 1, 5)),
    kept(2, (1, 1, 5), (2, 1, 5)),
    control.Step(number=2),
]
PLACES: list[list[tuple[int, int]]] = [
    [],
    [(1, 0)],
    [(1, 0), (2, 0)],
    [(2, 0), (1, 0)],
    [(1, 0), (2, 1)],
    [(1, 1), (2, 0)],
    [(1, 2), (2, 3)],
]


@pytest.mark.parametrize(
    "members",
    [
        [[prefill(1, 1, 0, 8, 8), each] for each in PREFIXES],
        [[prefill(1, 1, 0, 8, 8), each, prefill(3, 2, 0, 8, 8)] for each in PREFIXES],
        [
            [*(prefill(n, n, 0, 8, 8) for n in (1, 2)), kept(3, (1, row, 5)), prefill(4, 3, 0, 8, 8)]
            for row in (1, 2)
        ],
        [
            [prefill(1, 1, 0, 8, 8), kept(2, (1, 1, 5), (2, 1, 5)), with_prefix(3, 2, 5, 8, 8, prefix)]
            for prefix in (1, 2)
        ],
        [
            [prefill(1, 1, 0, 8, 8), kept(2, (1, 1, 5)), with_prefix(3, 2, 5, 8, 8, 1, takes=takes)]
            for takes in (False, True)
        ],
        [[with_choices(1, 1, 0, 8, 9, choices)] for choices in (0, 2, 3)],
        [[with_choices(1, 1, 0, 8, 9, choices), prefill(2, 5, 0, 4, 8)] for choices in (0, 2, 3)],
        [[two_rows(1), changed(2, *(admit(*place) for place in places))] for places in PLACES],
    ],
    ids=[
        "prefix",
        "a prefix earlier",
        "prefix of another row",
        "row of another prefix",
        "a prefix that is taken",
        "choices",
        "choices earlier",
        "lanes",
    ],
)
def test_members_that_disagree_have_other_digests(members: list[list[control.Step]]) -> None:
    """At once, and still at a later step that has nothing to do with it. Else a gateway could begin a row
    with its own prompt at the head and somebody's caches elsewhere."""
    digests = set()
    for steps in members:
        composition = make()
        digests.add([composition.apply(step).digest for step in steps][-1])
    assert len(digests) == len(members)
