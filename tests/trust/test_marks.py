"""A gateway that is not ours makes a member keep windows and states: they count like rows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.mesh.errors import InvalidInput, ResourceExhausted
from sealring.mesh.ring import Composition, Dropping, Eviction, Keeping, Marking, ResolvedStep, Unmarking
from sealring.node.engine import Account, Allowance
from sealring.v1 import control_pb2 as control

OFFER = Allowance(per_token=1, per_row=20, budget=1000, per_mark=50)
CHUNK, ROWS = 40, 20


class Member:
    """What a member has in memory, by the changes that it carries out, and what it refuses."""

    def __init__(self) -> None:
        self.composition = Composition(epoch=1, max_rows=ROWS, prefill_chunk=CHUNK)
        self.account = Account(OFFER, 0)
        self.number = 0
        self.rows: dict[int, int] = {}
        self.prefixes: dict[int, int] = {}
        self.marks: dict[tuple[str, int], dict[int, object]] = {}

    def step(self, *changes: control.Change, chunk: control.Chunk | None = None) -> None:
        self.number += 1
        step = control.Step(number=self.number, changes=changes)
        if chunk is not None:
            step.prefill.chunks.append(chunk)
        resolved = self.composition.apply(step)
        self.account.announced(resolved, self.composition, self.number - 1)
        self._execute(resolved)

    def _execute(self, step: ResolvedStep) -> None:
        for change in step.changes:
            if isinstance(change, Marking):
                self.marks.setdefault(("row", change.row), {})[change.tokens] = object()
            elif isinstance(change, Keeping):
                has = self.marks.get(("row", change.row), {})
                marks = {length: has[length] for length in change.marks}
                marks[change.tokens] = has.get(change.tokens) or object()
                self.prefixes[change.prefix] = change.tokens
                self.marks["prefix", change.prefix] = marks
                if change.tokens == change.held:
                    self.marks["row", change.row] = dict(marks)
            elif isinstance(change, Unmarking):
                kind, number = ("prefix", change.prefix) if change.prefix else ("row", change.row)
                for length in change.marks:
                    del self.marks[kind, number][length]
            elif isinstance(change, Dropping):
                del self.prefixes[change.prefix], self.marks["prefix", change.prefix]
            elif isinstance(change, Eviction):
                del self.rows[change.row]
                self.marks.pop(("row", change.row), None)
        for chunk in step.chunks:
            self.rows[chunk.row] = chunk.end
            if chunk.prefix:
                marks = self.marks["prefix", chunk.prefix].items()
                self.marks["row", chunk.row] = {
                    length: mark for length, mark in marks if length <= chunk.start
                }

    @property
    def held(self) -> int:
        """Bytes of caches, windows and states, each array once."""
        tokens = sum(self.rows.values()) + sum(self.prefixes.values())
        marks = {mark for has in self.marks.values() for mark in has.values()}
        return tokens * OFFER.per_token + len(self.rows) * OFFER.per_row + len(marks) * OFFER.per_mark


def begun(row: int, tokens: int, prefix: int = 0, start: int = 0) -> control.Chunk:
    end = start + tokens
    return control.Chunk(row=row, start=start, end=end, prompt_tokens=10_000, params_bytes=256, prefix=prefix)


def marked(row: int, tokens: int) -> control.Change:
    return control.Change(mark=control.Mark(row=row, tokens=tokens))


@pytest.mark.parametrize("keeps", [False, True])
def test_states_beside_rows_that_fill_the_budget_are_refused(keeps: bool) -> None:
    """They were counted apart, so that a member held twice what it offers."""
    member = Member()
    for row in range(1, 16):
        member.step(chunk=begun(row, CHUNK))
    assert member.held == 900
    with pytest.raises(ResourceExhausted) as refused:
        for row in range(1, 16):
            keep = control.Change(keep=control.Keep(prefix=row, row=row, tokens=CHUNK))
            member.step(keep if keeps else marked(row, CHUNK))
    assert refused.value.reason == "KV_BUDGET"
    assert member.held <= OFFER.limit


def test_marks_that_are_given_up_count_no_more() -> None:
    member = Member()
    for row in range(1, 200):
        member.step(chunk=begun(row, CHUNK))
        member.step(marked(row, CHUNK))
        gone = control.Unmark(row=row, marks=[CHUNK])
        member.step(control.Change(unmark=gone), control.Change(evict=control.Evict(row=row)))
    assert member.held == 0


COMMANDS = st.tuples(
    st.sampled_from(["begin", "chunk", "mark", "keep", "keep short", "unmark", "drop", "evict", "reuse"]),
    st.integers(0, 3),
    st.integers(1, CHUNK),
)


@settings(max_examples=300, deadline=None)
@given(commands=st.lists(COMMANDS, max_size=60))
def test_no_order_of_marks_keeps_and_rows_makes_a_member_hold_more_than_it_offers(
    commands: list[tuple[str, int, int]],
) -> None:
    member, row, prefix = Member(), 0, 0
    for kind, back, tokens in commands:
        older, kept = max(1, row - back), max(1, prefix - back)
        length = member.rows.get(older, 0)
        has = sorted(member.marks.get(("row", older), {}))
        try:
            if kind == "begin":
                row += 1
                member.step(chunk=begun(row, tokens))
            elif kind == "chunk" and length:
                chunk = control.Chunk(row=older, start=length, end=length + tokens, prompt_tokens=10_000)
                member.step(chunk=chunk)
            elif kind == "mark":
                member.step(marked(older, length))
            elif kind == "keep" and length:
                prefix += 1
                keep = control.Keep(prefix=prefix, row=older, tokens=length)
                keep.marks.extend(mark for mark in has[:15] if mark < length)
                member.step(control.Change(keep=keep))
            elif kind == "keep short" and has:
                prefix += 1
                keep = control.Keep(prefix=prefix, row=older, tokens=has[0])
                member.step(control.Change(keep=keep))
            elif kind == "unmark" and has:
                member.step(control.Change(unmark=control.Unmark(row=older, marks=has[:1])))
            elif kind == "drop":
                member.step(control.Change(drop=control.Drop(prefix=kept)))
            elif kind == "evict":
                member.step(control.Change(evict=control.Evict(row=older)))
            elif kind == "reuse" and kept in member.prefixes:
                row += 1
                start = max(member.marks["prefix", kept])
                member.step(chunk=begun(row, tokens, kept, start))
        except (InvalidInput, ResourceExhausted):
            break  # the epoch ends
        assert member.held <= OFFER.limit
        assert member.composition.marks == len({m for has in member.marks.values() for m in has.values()})
