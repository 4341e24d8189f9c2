"""Prompts that members have on disk: what is asked for, what is waited for, and where rows then begin.

Members count the memory that they are asked for, and none of these orders of commands exceeds their offer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from requestkit import request_of
from ringfacts import member_with, ring_of
from rowoutput import row_output

from sealring.gateway.scheduler import (
    Action,
    AnnounceStep,
    DiscardRow,
    OpenRow,
    RecallBlocks,
    Scheduler,
)
from sealring.gateway.scheduler.recalls import LEAST_SECONDS, RETRY_SECONDS
from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring import (
    STORED_BLOCK,
    Chain,
    Composition,
    PrefixNames,
    ResolvedStep,
    Restoring,
    chain_of,
)
from sealring.node.engine import Account, Allowance
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

MEMBERS, CHUNK = 2, 1024


class Desk:
    """A ring of two whose head has read prompts of zeros; its steps are composed as members do."""

    def __init__(self, budget: int = 1 << 30, *, recalls: bool = True, exact: bool = False) -> None:
        facts = ring_of(
            *[member_with(budget)] * MEMBERS,
            chunk=CHUNK,
            prefixes=control.PREFIX_SUPPORT_EXACT if exact else control.PREFIX_SUPPORT_ANY,
            recalls=recalls,
        )
        self.scheduler = Scheduler(queue_limit=10)
        self.composition = Composition(epoch=1, max_rows=8, prefill_chunk=CHUNK)
        self.account = Account(Allowance(1, 0, budget * 8 // 9), 0)
        self.begun: dict[int, int] = {}
        self.restored: list[tuple[int, int]] = []
        self.recalls: list[RecallBlocks] = []
        self.discarded: list[int] = []
        self.steps: list[control.Step] = []
        self.under_way: list[ResolvedStep] = []
        self.rows: dict[str, int] = {}
        self.take(self.scheduler.attach(facts))

    def take(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, RecallBlocks):
                self.recalls.append(action)
                if action.chain.names:
                    self.account.recall(action.number, action.chain.tokens, (0, 0), idle=not self.under_way)
                else:
                    self.account.give_up(action.number)
            elif isinstance(action, OpenRow):
                self.rows[action.request.id] = action.row
            elif isinstance(action, DiscardRow):
                self.discarded.append(action.row)
            elif isinstance(action, AnnounceStep):
                self.steps.append(action.step)
                step = self.composition.apply(action.step)
                self.account.announced(step, self.composition, step.number - 1)
                self.under_way.append(step)
                self.restored += [
                    (each.recall, each.tokens) for each in step.changes if isinstance(each, Restoring)
                ]
                self.begun.update({chunk.row: chunk.start for chunk in step.chunks if chunk.first})

    def ask(
        self,
        name: str,
        prompt: int,
        stored: int,
        token: bytes = bytes(4),
        *,
        now: float = 0.0,
        key: str = "k",
        images: Sequence[tuple[int, int]] = (),
    ) -> int:
        """A request whose prompt, one token over and over, the head has on disk up to `stored` tokens."""
        self.take(self.scheduler.submit(request_of(name, 4, key), now))
        names = PrefixNames(bytes(32), b"ckey").extend(token * prompt)
        opened = control.RowOpened(
            row=self.rows[name],
            prompt_tokens=prompt,
            params_bytes=256,
            max_tokens=4,
            prefixes=names,
            stored=chain_of(bytes(32), b"ckey", token * stored).packed(),
            unbroken=[control.TokenSpan(begin=begin, end=end) for begin, end in images],
        )
        self.take(self.scheduler.row_opened(opened))
        return self.rows[name]

    def answer(self, number: int, *tokens: int) -> None:
        """Members answer in the order of ranks."""
        for rank, each in enumerate(tokens):
            self.take(self.scheduler.recalled(control.Recalled(number=number, tokens=each, rank=rank)))

    def finish(self) -> None:
        """All steps come round; every answer has one token."""
        while self.under_way:
            step = self.under_way.pop(0)
            end = inference.FINISH_REASON_STOP
            outputs = [row_output(row, tokens=1, finish=end) for row in step.sampled]
            self.take(self.scheduler.step_done(control.StepDone(step=step.number, outputs=outputs), 0.0))

    @property
    def cancelled(self) -> list[int]:
        return [recall.number for recall in self.recalls if not recall.chain.names]


def test_a_row_begins_behind_what_all_members_have_read() -> None:
    desk = Desk()
    row = desk.ask("one", 2000, 1024)
    (recall,) = desk.recalls
    assert (recall.chain.tokens, recall.row) == (1024, row)
    desk.answer(recall.number, 1024)
    assert not desk.begun, "one of the members reads"
    desk.answer(recall.number, 1024, 768)
    assert desk.restored == [(recall.number, 768)]
    assert desk.begun == {row: 768}
    assert desk.recalls == [recall]


def test_what_members_read_gets_the_memory_of_prefixes_that_are_dropped_before() -> None:
    desk = Desk(budget=6000)
    for name in ("one", "two"):
        desk.ask(name, 2500, 0, token=name.encode().ljust(4))
        desk.finish()
    assert desk.scheduler.kept()[0] > 4000
    row = desk.ask("three", 2800, 2560)
    assert desk.composition.tokens < 3000
    (recall,) = desk.recalls
    desk.answer(recall.number, 2560, 2560)
    assert desk.begun[row] == 2560


@pytest.mark.parametrize("exact", [False, True])
def test_members_read_into_the_memory_of_the_row_as_soon_as_it_has_that(exact: bool) -> None:
    """So a full ring reads as well as others, and what is read needs no memory beside its row's."""
    desk = Desk(budget=6800, exact=exact)
    for name in ("one", "two"):
        desk.ask(name, 3000, 0, token=name.encode().ljust(4))
    row = desk.ask("three", 3000, 2048)
    assert desk.recalls == [], "it waits for memory"
    desk.finish()
    (recall,) = desk.recalls
    desk.answer(recall.number, 2048, 2048)
    assert desk.begun[row] == 2048


def test_nobody_waits_where_nothing_can_be_there() -> None:
    for desk, stored in ((Desk(), 0), (Desk(), 255), (Desk(recalls=False), 1024)):
        row = desk.ask("one", 2000, stored)
        assert not desk.recalls
        assert desk.begun == {row: 0}


def test_what_members_read_takes_the_place_of_its_row() -> None:
    desk = Desk(budget=2100)
    row = desk.ask("one", 2000, 1792)
    desk.answer(1, 1792, 1792)
    assert desk.begun == {row: 1792}
    assert desk.steps[-1].prefill.chunks[0].takes
    desk.finish()
    assert desk.scheduler.kept()[0] == 1984, "and the row's own is taken by what is kept"


@pytest.mark.parametrize("tokens", [(0, 1024), (1024, 0), (255, 1024)])
def test_a_member_that_has_nothing_makes_it_a_miss(tokens: tuple[int, int]) -> None:
    desk = Desk()
    row = desk.ask("one", 2000, 1024)
    desk.answer(1, *tokens)
    assert desk.begun == {row: 0}
    assert desk.cancelled == [1]
    assert desk.scheduler.kept() == (0, 0)


def test_the_last_token_is_computed_and_memory_comes_first() -> None:
    desk = Desk()
    row = desk.ask("one", 1024, 1024)
    assert desk.recalls[0].chain.tokens == 768
    desk.answer(1, 768, 768)
    assert desk.begun == {row: 768}
    desk.finish()
    other = desk.ask("two", 1000, 768)
    assert len(desk.recalls) == 1, "what is kept in memory is as good"
    assert desk.begun[other] == 960
    desk.ask("three", 2000, 1536)
    assert desk.recalls[-1].chain.tokens == 1536


def test_a_disk_that_takes_longer_than_prefill_is_not_waited_for() -> None:
    desk = Desk()
    row = desk.ask("slow", 2000, 1024)
    desk.take(desk.scheduler.expire(0.1))
    assert not desk.begun
    desk.take(desk.scheduler.expire(60.0))
    assert desk.begun == {row: 0}
    assert desk.cancelled == [1]
    desk.answer(1, 1024, 1024)
    assert not desk.restored, "it comes too late"
    desk.finish()
    now, asked = 60.0, len(desk.recalls)
    for number, pause in enumerate((10.0, 20.0, 40.0, 80.0, 160.0, 320.0, RETRY_SECONDS, RETRY_SECONDS)):
        early = desk.ask(f"early {number}", 2000, 1024, token=b"e%03d" % number, now=now + pause - 0.5)
        assert early in desk.begun, "the disk is left alone for a while"
        desk.finish()
        late = desk.ask(f"late {number}", 2000, 1024, token=b"l%03d" % number, now=now + pause)
        assert len(desk.recalls) == asked + 2 * number + 1, "one that is given up is said, too"
        now += 2 * pause
        desk.take(desk.scheduler.expire(now))
        assert desk.begun[late] == 0
        desk.finish()


def test_the_time_that_members_read_for_rows_before_is_none_of_a_recalls() -> None:
    """Else a queue of quick reads would look like a slow disk, and nothing be recalled for a while."""
    desk = Desk()
    for name in ("one", "two", "three"):
        desk.ask(name, 2000, 1024, token=name[:4].encode().ljust(4), key=name)
    for number in (1, 2, 3):
        desk.take(desk.scheduler.expire((number - 0.5) * LEAST_SECONDS))
        desk.answer(number, 1024, 1024)
        desk.finish()
    assert [number for number, _ in desk.restored] == [1, 2, 3]
    assert desk.cancelled == []


def test_members_read_for_one_row_of_a_key_at_a_time() -> None:
    """So another key's row waits for one of each key's reads, however many rows a key has."""
    desk = Desk()
    rows = [desk.ask(name, 2000, 1024, token=name.encode().ljust(4)) for name in ("one", "two", "six")]
    other = desk.ask("else", 2000, 1024, token=b"else", key="another")
    assert [recall.row for recall in desk.recalls] == [rows[0], other]
    desk.answer(1, 1024, 1024)
    assert [recall.row for recall in desk.recalls] == [rows[0], other, rows[1]]
    desk.take(desk.scheduler.cancel("two"))
    desk.answer(2, 1024, 1024)
    assert [recall.row for recall in desk.recalls if recall.chain.names] == [rows[0], other, rows[1], rows[2]]


def test_later_rows_pass_one_that_waits_for_disks() -> None:
    desk = Desk()
    desk.ask("waits", 2000, 1024)
    row = desk.ask("passes", 100, 0)
    assert desk.begun == {row: 0}


def test_what_nobody_wants_any_more_is_given_up() -> None:
    desk = Desk()
    row = desk.ask("one", 2000, 1024)
    assert desk.scheduler.load().kv_usage > 0
    desk.take(desk.scheduler.cancel("one"))
    assert (desk.cancelled, desk.discarded) == ([1], [row])
    assert desk.scheduler.load().kv_usage == 0
    desk.answer(1, 1024, 1024)
    assert not desk.begun


def test_a_restored_prefix_is_one_of_memory_then() -> None:
    desk = Desk()
    desk.ask("one", 2000, 1024)
    desk.answer(1, 1024, 1024)
    desk.finish()
    row = desk.ask("two", 1200, 0)
    assert desk.begun[row] >= 1024
    assert len(desk.restored) == 1


def test_a_member_that_says_what_cannot_be_ends_the_epoch() -> None:
    desk = Desk()
    desk.ask("one", 2000, 1024)
    with pytest.raises(InvalidInput):
        desk.answer(1, 1025)
    desk.answer(7, 1 << 31)


def test_blocks_end_where_prefixes_are_named() -> None:
    chain = chain_of(bytes(32), b"ckey", bytes(4 * 70_000))
    assert Chain.unpack(chain.packed()) == chain
    named = PrefixNames(bytes(32), b"ckey")
    named.extend(bytes(4 * 70_000))
    assert set(chain.edges) <= set(named.names)
    assert chain.edges[0] == STORED_BLOCK


def test_caches_that_cannot_be_cut_are_restored_at_a_length_that_all_members_have_or_not() -> None:
    desk = Desk(exact=True)
    row = desk.ask("one", 2000, 1024)
    desk.answer(1, 1024, 1024)
    assert (desk.restored, desk.begun) == ([(1, 1024)], {row: 1024})
    desk.finish()
    other = desk.ask("two", 2000, 1024, token=b"two ")
    desk.answer(2, 1024, 768)
    assert desk.cancelled == [2]
    assert [(each.row, each.chain.tokens) for each in desk.recalls[-1:]] == [(other, 768)]
    desk.answer(3, 768, 768)
    assert desk.restored[1:] == [(3, 768)]
    assert desk.begun[other] == 768
    desk.finish()
    third = desk.ask("three", 2000, 1024, token=b"thre")
    desk.answer(4, 1024, 512)
    desk.answer(5, 0, 512)
    assert desk.begun[third] == 0
    assert desk.cancelled == [2, 4, 5]


@pytest.mark.parametrize("exact", [False, True])
def test_nothing_is_recalled_up_to_the_middle_of_an_image(exact: bool) -> None:
    desk = Desk(exact=exact)
    row = desk.ask("one", 2000, 1024, images=((500, 600), (700, 770), (1000, 1100)))
    assert desk.recalls[-1].chain.tokens == 256, "768, 512 and 1024 are inside of images"
    desk.answer(1, 256, 256)
    assert desk.begun == {row: 256}
    desk.finish()
    other = desk.ask("two", 2000, 1024, token=b"two ", images=((256, 512), (513, 800)))
    assert desk.recalls[-1].chain.tokens == 1024
    desk.answer(2, 768, 1024)
    if exact:
        assert [each.chain.tokens for each in desk.recalls[-2:]] == [0, 512]
        desk.answer(3, 512, 512)
    assert desk.begun[other] == 512


def test_of_what_is_recalled_a_row_begins_with_no_part_of_an_image() -> None:
    """Not even where its prompt is, by name, the beginning of what another row's image was read with."""
    desk = Desk()
    desk.ask("one", 2000, 1024)
    desk.answer(1, 1024, 1024)
    desk.finish()
    row = desk.ask("two", 1770, 0, images=((900, 1760),))
    assert desk.begun[row] == 896
