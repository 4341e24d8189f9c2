"""What a member has in memory stays within what it offers, whatever a gateway announces and recalls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.mesh.errors import InvalidInput, ResourceExhausted
from sealring.mesh.ring import Composition
from sealring.node.engine import Account, Allowance
from sealring.v1 import control_pb2 as control

OFFER = Allowance(per_token=1, per_row=10, budget=800)
CHUNK = 300


class Member:
    """The memory of a member whose steps are computed when `compute` is called, in the order of commands."""

    def __init__(self, earlier: int) -> None:
        self.account = Account(OFFER, earlier)
        self.composition = Composition(epoch=2, max_rows=8, prefill_chunk=CHUNK)
        self.announced = self.computed = 0
        self.held = earlier
        self.there: dict[int, int] = {}  # recalled, and no prefix is made of it yet
        self.read: set[int] = set()  # of these
        self.tasks: deque[Callable[[], None]] = deque()
        self.most = 0

    def step(self, step: control.Step) -> None:
        self.announced += 1
        step.number = self.announced
        resolved = self.composition.apply(step)
        self.account.announced(resolved, self.composition, self.computed)
        held = self.composition.tokens + OFFER.per_row * self.composition.rows

        def compute() -> None:
            self.computed, self.held = resolved.number, held
            for change in step.changes:
                if change.HasField("restore"):
                    self._forget(change.restore.recall)

        self.tasks.append(compute)

    def recall(self, number: int, tokens: int) -> None:
        if number in self.there:
            return
        self.there[number] = tokens
        idle = self.computed == self.announced
        there = sum(self.there.values()), len(self.there)
        try:
            at_once = self.account.recall(number, tokens, there, idle=idle)
        except ResourceExhausted:  # nothing of it is read: an earlier one of this number still has its task
            self._forget(number)
            raise
        if at_once:
            self._read(number)
        else:
            self.tasks.append(lambda: self._read(number))

    def give_up(self, number: int) -> None:
        self.account.give_up(number)
        self._forget(number)

    def compute(self) -> None:
        if self.tasks:
            self.tasks.popleft()()
        self._look()

    def _read(self, number: int) -> None:
        if number in self.there:
            self.read.add(number)
        self._look()

    def _forget(self, number: int) -> None:
        self.there.pop(number, None)
        self.read.discard(number)

    def _look(self) -> None:
        read = sum(OFFER.per_row + self.there[number] for number in self.read)
        self.most = max(self.most, self.held + read)


def changing(**change: object) -> control.Step:
    return control.Step(changes=[control.Change(**change)])  # type: ignore[arg-type]


def restored(prefix: int, recall: int, tokens: int) -> control.Step:
    restore = control.Restore(prefix=prefix, recall=recall, tokens=tokens, name=bytes(16))
    return changing(restore=restore)


RECALLS, PREFIXES = st.integers(1, 3), st.integers(0, 1)
COMMANDS = st.one_of(
    st.tuples(st.just("recall"), RECALLS, st.integers(300, 800)),
    st.tuples(st.just("give up"), RECALLS, st.just(0)),
    st.tuples(st.just("restore"), RECALLS, st.integers(1, 500)),
    st.tuples(st.just("drop"), PREFIXES, st.just(0)),
    st.tuples(st.just("row"), st.integers(1, CHUNK), st.just(0)),
    st.tuples(st.just("evict"), PREFIXES, st.just(0)),
    st.tuples(st.just("compute"), st.just(0), st.just(0)),
)


@settings(max_examples=600, deadline=None)
@given(earlier=st.integers(0, 900), commands=st.lists(COMMANDS, max_size=40))
def test_no_order_of_steps_and_recalls_takes_more_memory_than_is_offered(
    earlier: int, commands: list[tuple[str, int, int]]
) -> None:
    member, prefixes, rows = Member(earlier), 0, 0
    try:
        for kind, number, tokens in commands:
            if kind == "recall":
                member.recall(number, tokens)
            elif kind == "give up":
                member.give_up(number)
            elif kind == "restore":
                prefixes += 1
                member.step(restored(prefixes, number, tokens))
            elif kind == "drop":
                member.step(changing(drop=control.Drop(prefix=max(0, prefixes - number))))
            elif kind == "row":
                rows += 1
                step = control.Step()
                step.prefill.chunks.add(row=rows, end=number, prompt_tokens=number + 1, params_bytes=256)
                member.step(step)
            elif kind == "evict":
                member.step(changing(evict=control.Evict(row=max(0, rows - number))))
            else:
                member.compute()
    except (InvalidInput, ResourceExhausted):
        pass  # the epoch ends
    while member.tasks:
        member.compute()
    assert member.most <= OFFER.limit


def test_a_recall_waits_for_the_memory_that_an_announced_step_drops() -> None:
    member = Member(0)
    member.recall(1, 800)
    member.step(restored(1, 1, 800))
    member.step(changing(drop=control.Drop(prefix=1)))
    member.recall(2, 800)
    assert 2 not in member.read
    member.compute()
    member.compute()
    assert 2 not in member.read
    member.compute()
    assert 2 in member.read
    assert member.most == 800 + OFFER.per_row


@pytest.mark.parametrize("earlier", [0, 500])
def test_a_recall_beyond_the_offer_is_refused(earlier: int) -> None:
    member = Member(earlier)
    member.recall(1, 380)
    with pytest.raises(ResourceExhausted, match="this member offers 800") as refused:
        member.recall(2, 501)
    assert refused.value.reason == "KV_BUDGET"


def test_rows_beside_what_is_recalled_are_refused_beyond_the_offer() -> None:
    member = Member(0)
    member.recall(1, 700)
    step = control.Step()
    step.prefill.chunks.add(row=1, end=CHUNK, prompt_tokens=CHUNK, params_bytes=256)
    with pytest.raises(ResourceExhausted):
        member.step(step)
