from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache, RotatingKVCache

from sealring.mesh.errors import Internal
from sealring.mesh.ring import Composition, Times
from sealring.node.engine import RowParameters, caches
from sealring.node.engine.lanes import PATIENCE, Lane, Lanes, Row
from sealring.node.engine.sampling import Sampler
from sealring.node.engine.staging.grid import Grid
from sealring.node.engine.staging.mrope import Positions
from sealring.v1 import control_pb2 as control

WINDOW = 6


def filled(number: int, tokens: int) -> list[Any]:
    """Caches of a row whose keys tell the row and the token."""
    plain, window, state = KVCache(), RotatingKVCache(WINDOW), ArraysCache(1)
    for token in range(tokens):
        entry = mx.array([[[[float(number), float(token)]]]])
        plain.update_and_fetch(entry, -entry)
        window.update_and_fetch(entry, -entry)
    state[0] = mx.array([[float(number)]])
    return [plain, window, state]


def contents(cache: list[Any]) -> tuple[Any, Any, Any]:
    plain, window, state = cache
    # a window turns round, and its unused places are zeros; rows are numbered from 1
    ordered = sorted((entry for entry in window.keys[0, 0].tolist() if entry[0]), key=lambda entry: entry[1])
    return plain.keys[0, 0, : plain.offset].tolist(), ordered[-WINDOW:], state[0].tolist()


def lane_contents(cache: list[Any], rows: int) -> list[Any]:
    return [contents(cache if rows == 1 else caches.extract(cache, index)) for index in range(rows)]


@settings(max_examples=25, deadline=None)
@given(choices=st.randoms(use_true_random=False))
def test_caches_follow_the_composition(choices: random.Random) -> None:
    composition = Composition(epoch=1, max_rows=50, prefill_chunk=20)
    lanes, lengths = Lanes(), {}
    for number in range(1, 13):
        changes, ready = [], sorted(composition.prefilling())
        held = [row for rows in composition.lanes.all().values() for row in rows]
        leaving = choices.sample(held, choices.randint(0, len(held)))
        joining = choices.sample(ready, choices.randint(0, len(ready)))
        for row in choices.sample(leaving + joining, len(leaving + joining)):
            if row in leaving or choices.random() < 0.2:
                changes.append(control.Change(evict=control.Evict(row=row)))
            else:
                changes.append(control.Change(admit=control.Admit(row=row, lane=choices.randrange(2))))
        length = lengths[number] = choices.randint(1, 10)
        chunk = control.Chunk(row=number, start=0, end=length, prompt_tokens=length)
        step = control.Step(number=number, changes=changes, prefill=control.Prefill(chunks=[chunk]))
        lanes.apply(composition.apply(step).changes)
        lanes.start(
            Row(number, filled(number, length), sampler=Sampler([RowParameters(logprobs=number)], [1]))
        )
        for lane, rows in composition.lanes.all().items():
            found = lanes.check(lane, rows)
            assert lane_contents(found.cache, len(rows)) == [
                contents(filled(row, lengths[row])) for row in rows
            ]
            assert found.sampler is not None
            assert [count for _, count, *_ in found.sampler.asking] == list(rows)
        for row in composition.prefilling():
            assert lanes.prefilling(row).number == row


class Rows:
    """Lanes of rows with plain caches in two layers, and the tokens that each row ought to have."""

    def __init__(self, times: Times = ((1, 1.0),), spare: int = 1 << 20) -> None:
        self.composition = Composition(epoch=1, max_rows=50, prefill_chunk=1000)
        self.lanes, self.tokens, self._steps = Lanes(times, lambda: spare), dict[int, int](), 0

    def step(self, changes: Sequence[control.Change] = (), **work: Any) -> None:
        self._steps += 1
        step = control.Step(number=self._steps, changes=changes, **work)
        self.lanes.apply(self.composition.apply(step).changes)

    def prefill(self, number: int, tokens: int, positions: Positions | None = None) -> None:
        chunk = control.Chunk(row=number, start=0, end=tokens, prompt_tokens=tokens)
        self.step(prefill=control.Prefill(chunks=[chunk]))
        cache = [KVCache(), KVCache()]
        for layer, one in enumerate(cache):
            entry = mx.array([[[[float(number), float(token), float(layer)] for token in range(tokens)]]])
            one.update_and_fetch(entry, -entry)
        self.lanes.start(Row(number, cache, positions=positions))
        self.tokens[number] = tokens

    def change(self, *, leave: Sequence[int] = (), join: Sequence[tuple[int, int]] = ()) -> None:
        changes = [control.Change(evict=control.Evict(row=row)) for row in leave]
        changes += [control.Change(admit=control.Admit(row=row, lane=lane)) for row, lane in join]
        self.step(changes)

    def decode(self, number: int) -> None:
        """One more token of each row of a lane."""
        rows = self.composition.lanes.of(number)
        self.step(decode=control.Decode(lane=number))
        lane = self.lanes.check(number, rows)
        for layer, one in enumerate(lane.cache):
            entry = [[[[float(row), float(self.tokens[row]), float(layer)]]] for row in rows]
            (spread,) = lane.spread([mx.array(entry)])
            one.update_and_fetch(spread, -spread)
        for row in rows:
            self.tokens[row] += 1

    def check(self) -> None:
        for number, rows in self.composition.lanes.all().items():
            lane = self.lanes.check(number, rows)
            names = mx.array([[float(row)] for row in rows])
            assert lane.gathered(lane.spread([names]))[0].tolist() == names.tolist()
            for place, row in zip(lane.places, rows, strict=True):
                self._check_row(lane, place, row)
            for batch in lane.cache if lane.width > 1 else ():
                offsets, masks = batch.offset.tolist(), np.array(batch.make_mask(1))
                for place, row in zip(lane.places, rows, strict=True):
                    assert offsets[place] == self.tokens[row]
                    seen = masks[place, 0, 0, :-1].tolist()  # by the next token, beside itself
                    assert seen == [False] * batch.paddings[place] + [True] * self.tokens[row]

    def _check_row(self, lane: Lane, place: int, row: int) -> None:
        tokens = self.tokens[row]
        own = lane.cache if lane.width == 1 else caches.look_at(lane.cache, place)
        for layer, one in enumerate(own):
            columns = np.full(tokens, row), np.arange(tokens), np.full(tokens, layer)
            expected = np.stack(columns, axis=1)
            assert one.offset == tokens
            assert np.array_equal(np.array(one.keys[0, 0, :tokens]), expected)
            assert np.array_equal(np.array(-one.values[0, 0, :tokens]), expected)


@settings(max_examples=12, deadline=None)
@given(choices=st.randoms(use_true_random=False))
def test_rows_take_places_of_others_and_keep_their_tokens(choices: random.Random) -> None:
    rows = Rows(spare=choices.choice((0, 1 << 20)))
    for number in range(1, 20):
        rows.prefill(number, choices.choice((1, 5, 40, 200, 250, 300)))
        ready = sorted(rows.composition.prefilling())
        held = [row for each in rows.composition.lanes.all().values() for row in each]
        leave = choices.sample(held, choices.randint(0, min(2, len(held) // 4)))
        join = choices.sample(ready, choices.randint(0, len(ready)))
        rows.change(leave=leave, join=[(row, int(choices.random() < 0.1)) for row in join])
        rows.check()
        for lane in rows.composition.lanes.all():
            for _ in range(choices.choice((0, 1, 3, PATIENCE + 1))):
                rows.decode(lane)
        rows.check()


def eight_rows(times: Times = ((1, 1.0),), spare: int = 1 << 20) -> tuple[Rows, Lane]:
    rows = Rows(times, spare)
    for number in range(1, 9):
        rows.prefill(number, 150)
    rows.change(join=[(number, 0) for number in range(1, 9)])
    return rows, rows.lanes.check(0, tuple(range(1, 9)))


def test_a_row_that_joins_gets_the_place_of_one_that_left_and_no_other_is_copied() -> None:
    rows, lane = eight_rows()
    held = lane.cache[0].keys
    rows.change(leave=[2])
    assert (lane.places, lane.width) == ([0, 2, 3, 4, 5, 6, 7], 8)
    rows.decode(0)
    rows.prefill(9, 20)
    rows.change(join=[(9, 0)])
    assert (lane.places, lane.width) == ([0, 2, 3, 4, 5, 6, 7, 1], 8)
    assert lane.cache[0].keys is held
    rows.check()


SLOWER = ((7, 7.0), (8, 8.0))


@pytest.mark.parametrize("times", [(), SLOWER])
def test_no_place_stays_empty_where_that_takes_time(times: Times) -> None:
    rows, lane = eight_rows(times)
    rows.change(leave=[2])
    assert (lane.places, lane.width) == (list(range(7)), 7)
    rows.prefill(9, 20)
    rows.change(leave=[1], join=[(9, 0)])
    assert (lane.places, lane.width) == ([1, 2, 3, 4, 5, 6, 0], 7)
    rows.check()


def test_few_places_stay_empty_and_not_for_long() -> None:
    rows, lane = eight_rows()
    rows.change(leave=[2, 3])
    assert lane.width == 6
    rows.prefill(9, 20)
    rows.prefill(10, 20)
    rows.change(join=[(9, 0), (10, 0)])
    rows.change(leave=[4])
    for _ in range(PATIENCE):
        rows.decode(0)
    assert lane.width == 8
    rows.decode(0)
    assert lane.width == 7
    rows.check()


@pytest.mark.parametrize(("spare", "width"), [(0, 8), (511, 8), (512, 9)])
def test_an_empty_place_takes_no_memory_that_is_not_there(spare: int, width: int) -> None:
    rows, lane = eight_rows(spare=spare)
    rows.prefill(9, 256)  # which takes two blocks, with room for one more token
    rows.change(join=[(9, 0)])
    rows.change(leave=[1])
    assert lane.width == width


@pytest.mark.parametrize("tokens", [151, 400])
def test_for_a_row_that_is_longer_than_the_others_all_are_laid_out_anew(tokens: int) -> None:
    rows, lane = eight_rows()
    rows.prefill(9, tokens)
    rows.change(leave=[2], join=[(9, 0)])
    assert (lane.places, lane.width) == (list(range(8)), 8)
    assert lane.cache[0].paddings == [tokens - 150] * 7 + [0]
    rows.check()


def test_rows_that_take_fewer_blocks_without_the_longest_are_laid_out_anew() -> None:
    rows, lane = eight_rows()
    rows.prefill(9, 300)
    rows.change(join=[(9, 0)])
    rows.change(leave=[9])
    assert (lane.width, lane.cache[0].keys.shape[2]) == (8, 256)
    rows.check()


def two_rows() -> Lanes:
    lanes = Lanes()
    composition = Composition(epoch=1, max_rows=5, prefill_chunk=9)
    chunks = [control.Chunk(row=row, start=0, end=row, prompt_tokens=row) for row in (1, 2)]
    composition.apply(control.Step(number=1, prefill=control.Prefill(chunks=chunks)))
    for row in (1, 2):
        lanes.start(Row(row, filled(row, row)))
    admits = [control.Change(admit=control.Admit(row=row, lane=0)) for row in (1, 2)]
    lanes.apply(composition.apply(control.Step(number=2, changes=admits)).changes)
    return lanes


def test_a_lane_of_one_row_needs_no_batch_caches() -> None:
    lanes = two_rows()
    lane = lanes.check(0, (1, 2))
    assert isinstance(lane.cache[0], BatchKVCache)
    lane.recompose([1], [])
    assert isinstance(lane.cache[0], KVCache)
    assert lane.rows == [2]
    assert lane.sampler is None


@pytest.mark.parametrize(("lane", "rows"), [(0, (2, 1)), (0, (1,)), (1, (1, 2))])
def test_other_rows_than_the_compositions_are_a_fault(lane: int, rows: tuple[int, ...]) -> None:
    with pytest.raises(Internal):
        two_rows().check(lane, rows)


def test_no_row_is_left_after_the_end() -> None:
    lanes = two_rows()
    lanes.check(0, (1, 2))
    lanes.clear()
    with pytest.raises(Internal):
        lanes.check(0, (1, 2))


def test_no_change_of_rows_asks_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[filled(number, 2 + number)[0]] for number in range(5)]
    monkeypatch.setattr(mx.array, "tolist", lambda _: pytest.fail("a device was asked"))
    batch = caches.recompose(caches.merge(rows[:2]), [0, 1], rows[2:])
    batch = caches.recompose(batch, [0, 3, 4], [])
    copied = caches.extract(batch, 1)
    batch = caches.recompose(batch, [1], [copied])
    monkeypatch.undo()
    assert batch[0].paddings == batch[0].left_padding.tolist() == [0, 0]
    assert batch[0].offset.tolist() == [5, 5]
    assert batch[0].keys[:, 0, :5, 0].tolist() == [[3.0] * 5] * 2


def test_positions_of_images_follow_their_rows_from_place_to_place() -> None:
    rows = Rows()
    widths = {1: 0, 2: 3, 3: 0, 4: 5, 5: 4, 6: 0}
    for number, width in widths.items():
        positions = Positions.of([Grid(2, 1, 2, width)]) if width else None
        rows.prefill(number, 30 - number, positions)

    def found() -> list[int | None]:
        """The width of each row's image, by the positions of its place."""
        there = rows.composition.lanes.of(0)
        lane = rows.lanes.check(0, there)
        (places,) = lane.spread([mx.array(there)])
        shown = lane.positions
        each = [shown.row(place) if shown is not None else None for place in range(lane.width)]
        deltas = {
            row: None if one is None else one.deltas for row, one in zip(places.tolist(), each, strict=True)
        }
        known = {(width - 2 * width,): width for width in widths.values() if width}
        return [0 if (delta := deltas[row]) is None else known[delta] for row in there]

    for leave, join in (
        ((), (1,)),
        ((), (2, 3, 4)),
        ((1,), ()),
        ((), (5,)),
        ((2, 3), (6,)),
        ((4,), ()),
        ((5,), ()),
    ):
        rows.change(leave=leave, join=[(row, 0) for row in join])
        for _ in range(2):
            assert found() == [widths[row] for row in rows.composition.lanes.of(0)]
            rows.decode(0)
