"""Rows share every step in families that keep groups of tokens or choose what they attend to. Each row gets
what it gets alone, whenever rows join, leave and reach the end of a group, a window or a choice."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.node.engine import caches, check_runs
from sealring.node.engine.staging import random_model
from sealring.node.engine.staging.anatomy import dissect

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "archs-more.json").read_bytes()
)
FAMILIES = {
    "glm5_next": CONFIGS["glm5_next"],
    "deepseek_v4": CONFIGS["deepseek_v4"],
    # as the published model has blocks of 64 entries, from 4,096 tokens on
    "deepseek_v4 in blocks": CONFIGS["deepseek_v4"] | {"index_block": 2, "index_keep": 3},
    "qwen4_exp": CONFIGS["qwen4_exp"],
}
ROUNDING = 1e-5
SEED = 5

STREAMS = {0: (1, 44), 1: (1, 30), 2: (118, 140), 3: (23, 40)}
"""By stream of tokens: how many are computed as one chunk first, and how many single ones follow up to. Among
them are the ends of windows of 8 tokens, of groups of 4 and of 128, and of choices of 8."""

_MOST = 8

points = st.sampled_from(
    [(stream, at) for stream, (first, last) in STREAMS.items() for at in range(first, last - 4)]
)
changes = st.one_of(
    st.just(("step", 0)),
    st.tuples(st.just("join"), points),
    st.tuples(st.just("leave"), st.integers(0, _MOST)),
    st.tuples(st.just("move"), st.integers(0, _MOST)),
)


class Alone:
    """What single rows of a whole model compute: each stream's logits, and its caches at each length."""

    def __init__(self, key: str) -> None:
        model = random_model(FAMILIES[key], seed=SEED)
        self.whole = check_runs.Whole(model, dissect(model, FAMILIES[key]["model_type"]).adapter)
        self._rows = {stream: self._follow(stream) for stream in STREAMS}

    def _follow(self, stream: int) -> tuple[mx.array, dict[int, Any], dict[int, mx.array]]:
        first, last = STREAMS[stream]
        tokens = mx.random.randint(0, 100, (1, last), key=mx.random.key(stream)).astype(mx.uint32)
        own, held, logits = self.whole.new_cache(), {}, {}
        for begin, end in [(0, first), *((at, at + 1) for at in range(first, last))]:
            logits[end] = self.whole(tokens[:, begin:end], own)[:, -1]
            held[end] = caches.copied(own[0])
        mx.eval(logits)
        return tokens, held, logits

    def token(self, stream: int, at: int) -> mx.array:
        """The token that follows `at` of them, [1, 1]."""
        return self._rows[stream][0][:, at : at + 1]

    def cache(self, stream: int, at: int) -> Any:
        return caches.copied(self._rows[stream][1][at])

    def logits(self, stream: int, at: int) -> mx.array:
        """The last logits of `at` tokens, [1, vocabulary]."""
        return self._rows[stream][2][at]


alone = functools.cache(Alone)


class Shared:
    """Rows that share each step."""

    def __init__(self, key: str, begun: list[tuple[int, int]]) -> None:
        self._alone, self.rows = alone(key), list(begun)
        self._batch = caches.merge([self._alone.cache(*row) for row in begun])
        assert not isinstance(self._batch, caches.RowByRow)

    def change(self, change: str, what: Any) -> None:
        count = len(self.rows)
        if change == "join" and count < _MOST:
            self._recompose(list(range(count)), [self._alone.cache(*what)], [what])
        elif change == "leave" and count > 1:
            self._recompose([index for index in range(count) if index != what % count], [], [])
        elif change == "move" and count > 1:
            place = what % count
            own, row = caches.extract(self._batch, place), self.rows[place]
            self._recompose([index for index in range(count) if index != place], [own], [row])

    def _recompose(self, keep: list[int], joining: list[Any], rows: list[tuple[int, int]]) -> None:
        self._batch = caches.recompose(self._batch, keep, joining)
        self.rows = [self.rows[index] for index in keep] + rows

    def step(self) -> None:
        """Computes a token of each row; those whose streams end leave before."""
        over = [index for index, (stream, at) in enumerate(self.rows) if at >= STREAMS[stream][1]]
        keep = [index for index in range(len(self.rows)) if index not in over]
        if not keep:
            return
        if over:
            self._recompose(keep, [], [])
        tokens = mx.concatenate([self._alone.token(*row) for row in self.rows])
        found = self._alone.whole(tokens, [self._batch])[:, -1]
        self.rows = [(stream, at + 1) for stream, at in self.rows]
        expected = mx.concatenate([self._alone.logits(*row) for row in self.rows])
        differ = mx.abs(found - expected).max(axis=-1) > ROUNDING * mx.abs(expected).max()
        assert not [row for row, wrong in zip(self.rows, differ.tolist(), strict=True) if wrong]  # type: ignore[arg-type]


def follow(key: str, begun: list[tuple[int, int]], then: list[Any]) -> None:
    shared = Shared(key, begun)
    shared.step()
    for change, what in then:
        shared.change(change, what)
        shared.step()


starts = st.lists(points, min_size=2, max_size=_MOST)


@pytest.mark.parametrize("key", FAMILIES)
@settings(deadline=None, max_examples=8)
@given(begun=starts, then=st.lists(changes, max_size=8))
def test_rows_get_the_logits_that_they_get_alone(
    key: str, begun: list[tuple[int, int]], then: list[Any]
) -> None:
    follow(key, begun, then)


@given(st.data(), st.lists(st.sampled_from([-1.0, 0.0, 2.0]), min_size=2, max_size=60), st.integers(1, 70))
def test_a_choice_among_equals_does_not_depend_on_what_stands_behind(
    data: st.DataObject, scores: list[float], behind: int
) -> None:
    """An indexer's scores are equal where none is above 0, and a shorter row has padding behind its own."""
    count = data.draw(st.integers(1, len(scores) - 1))
    first, longer = (
        set(mx.argpartition(-mx.array(one), kth=count - 1)[:count].tolist())  # type: ignore[arg-type]
        for one in (scores, scores + [-1e30] * behind)
    )
    assert first == longer


@pytest.mark.sweep
@pytest.mark.parametrize("key", FAMILIES)
@settings(deadline=None, max_examples=100)
@given(begun=starts, then=st.lists(changes, max_size=25))
def test_rows_that_come_and_go_for_longer_do_too(
    key: str, begun: list[tuple[int, int]], then: list[Any]
) -> None:
    follow(key, begun, then)
