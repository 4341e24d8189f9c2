from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.node.engine import asking_of
from sealring.node.engine.logprobs import LOWEST, Reporter, unpack, words_of


def reference(logits: list[float], token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    highest = max(logits)
    total = highest + math.log(sum(math.exp(value - highest) for value in logits))
    order = sorted(range(len(logits)), key=lambda each: (-logits[each], each))
    return logits[token] - total, [(each, logits[each] - total) for each in order[:count]]


@settings(deadline=None, max_examples=25)
@given(
    asks=st.lists(st.sampled_from([None, 0, 1, 5, 20]), min_size=1, max_size=6),
    vocabulary=st.integers(21, 60),
    seed=st.integers(0, 1000),
)
def test_what_is_packed_is_what_a_reference_finds(asks: list[int | None], vocabulary: int, seed: int) -> None:
    asking = asking_of(asks)
    if not asking:
        assert words_of(asking) == 0
        return
    source = np.random.default_rng(seed)
    logits = source.integers(-6, 6, (len(asks), vocabulary)) / 2  # ties
    tokens = source.integers(0, vocabulary, len(asks))
    report = Reporter(asking)(mx.array(logits.astype(np.float32)), mx.array(tokens.astype(np.uint32)))
    packed = np.array(report)
    assert packed.dtype == np.uint32
    assert packed.shape == (words_of(asking),)
    found = unpack(asking, packed)
    assert list(found) == [index for index, ask in enumerate(asks) if ask is not None]
    for index, count, *_ in asking:
        logprob, top = reference(logits[index].tolist(), int(tokens[index]), count)
        assert found[index].logprob == pytest.approx(logprob, abs=1e-4)
        assert [each for each, _ in found[index].top] == [each for each, _ in top]
        assert [value for _, value in found[index].top] == pytest.approx([v for _, v in top], abs=1e-4)


def test_impossible_tokens_have_a_number() -> None:
    logits = mx.array([[0.0, -math.inf, math.nan]])
    found = unpack(((0, 0, 0, 0),), np.array(Reporter(((0, 0, 0, 0),))(logits[:, :2], mx.array([1]))))
    assert found[0].logprob == LOWEST
    found = unpack(((0, 3, 0, 0),), np.array(Reporter(((0, 3, 0, 0),))(logits, mx.array([0]))))
    assert found[0].logprob == LOWEST
    assert all(value == LOWEST for _, value in found[0].top)


def test_a_small_vocabulary_fills_what_was_announced() -> None:
    asking = ((0, 20, 0, 0),)
    report = Reporter(asking)(mx.array([[1.0, 0.0, 2.0]]), mx.array([0]))
    assert report.shape == (words_of(asking),)
    assert [each for each, _ in unpack(asking, np.array(report))[0].top[:3]] == [2, 0, 1]
