from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache, RotatingKVCache

from sealring.mesh.errors import Internal
from sealring.mesh.ring.composition import Composition
from sealring.node.engine.lanes import Lanes, Row
from sealring.node.engine.params import RowParameters
from sealring.node.engine.sampling import Sampler
from sealring.node.engine.staging import caches
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
        held = [row for rows in composition.lanes().values() for row in rows]
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
        for lane, rows in composition.lanes().items():
            found = lanes.check(lane, rows)
            assert lane_contents(found.cache, len(rows)) == [
                contents(filled(row, lengths[row])) for row in rows
            ]
            assert found.sampler is not None
            assert [count for _, count, _ in found.sampler.asking] == list(rows)
        for row in composition.prefilling():
            assert lanes.prefilling(row).number == row


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
