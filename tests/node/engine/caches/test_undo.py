"""Caches that cannot be cut are restored to the last bit after runs of drafts."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from sealring.mesh.errors import InvalidInput
from sealring.node.engine.caches.undo import UndoLog, cut_to, mark, runs_of

WINDOW, RUNS = 5, 3


class Row:
    """A row whose tokens are numbers, in caches of each kind: keys say which tokens are held, and in which
    order a state took them."""

    def __init__(self) -> None:
        self.parts = [RotatingKVCache(WINDOW), ChunkedKVCache(WINDOW), KVCache(), ArraysCache(1)]
        self.cache: list[Any] = [CacheList(*self.parts[:2]), *self.parts[2:]]

    def take(self, inputs: list[mx.array]) -> None:
        keys = inputs[0].reshape(1, 1, -1, 1)
        window, chunk, whole, state = self.parts
        chunk.maybe_trim_front()
        for part in (window, chunk, whole):
            part.update_and_fetch(keys, -keys)
        order = mx.zeros((1,)) if state[0] is None else state[0]
        for token in keys.flatten():
            order = mx.sin(order * 3 + token)  # which depends on the order
        state[0] = order

    def feed(self, tokens: list[int]) -> None:
        self.take([mx.array([tokens], mx.float32)])

    def held(self) -> list[list[float]]:
        """What later tokens may look back at, oldest first."""
        window, chunk, whole, state = self.parts
        slots = RotatingKVCache.merge([window]).keys  # which is in the order of time
        chunks = chunk.keys[..., : chunk.offset - chunk.start_position, :]
        values = [slots, chunks[..., -WINDOW:, :], whole.keys[..., : whole.offset, :], state[0]]
        return [value.flatten().tolist() for value in values] + [[window.offset, chunk.offset]]


def fed(tokens: list[int], sizes: list[int]) -> Row:
    row, at = Row(), 0
    for size in sizes:
        row.feed(tokens[at : at + size])
        at += size
    return row


lengths = st.lists(st.integers(2, 7), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(prompt=st.lists(st.integers(1, 6), min_size=1, max_size=6), runs=lengths, cut=st.integers(0, 20))
def test_caches_are_as_if_refuted_tokens_had_never_been(prompt: list[int], runs: list[int], cut: int) -> None:
    """Whether a window has slid or not, and wherever in the last runs the settle ends."""
    total, drafted = sum(prompt), sum(runs)
    surplus = min(cut, sum(runs[-RUNS:]) - 1)
    tokens = list(range(1, total + drafted + 1))
    row = fed(tokens, prompt)
    log, at = UndoLog(row.cache, RUNS), total
    for size in runs:
        inputs = [mx.array([tokens[at : at + size]], mx.float32)]
        log.begin(inputs)
        row.take(inputs)
        log.end()
        at += size
    log.settle(surplus, row.take)
    left = total + drafted - surplus
    assert row.held() == fed(tokens[:left], prompt + [1] * (left - total)).held()
    row.feed([77])
    row.feed([78, 79])
    assert row.held() == fed([*tokens[:left], 77, 78, 79], [left, 1, 2]).held()


def test_no_more_can_be_taken_back_than_is_kept() -> None:
    row = fed([1], [1])
    log = UndoLog(row.cache, 2)
    for token in (2, 4, 6):
        inputs = [mx.array([[token, token + 1]], mx.float32)]
        log.begin(inputs)
        row.take(inputs)
        log.end()
    with pytest.raises(InvalidInput, match="further than this member can"):
        log.settle(5, row.take)


def test_a_prefix_is_cut_at_its_marks_again_and_again() -> None:
    tokens = list(range(1, 30))
    row = fed(tokens[:9], [4, 3, 2])
    at = mark(cut_to(row.cache, 9, mark(row.cache)))
    row.feed(tokens[9:20])
    for _ in range(2):
        begun = Row()
        begun.cache = cut_to(row.cache, 9, at)
        begun.parts = [*begun.cache[0].caches, *begun.cache[1:]]
        assert begun.held() == fed(tokens[:9], [9]).held()
        begun.feed([50, 51])
        assert begun.held() == fed([*tokens[:9], 50, 51], [9, 2]).held()
    assert row.held() == fed(tokens[:20], [20]).held()


def test_members_say_how_many_runs_they_take_back() -> None:
    assert [runs_of(Row().cache, stages, steps_alike=True) for stages in (2, 3, 9)] == [2, 3, 4]
    assert runs_of([KVCache()], 3, steps_alike=True) == 64
    assert runs_of([RotatingKVCache(8, keep=4)], 3, steps_alike=True) == 0
    assert runs_of([KVCache()], 3, steps_alike=False) == 0
