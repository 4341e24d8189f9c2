from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from sealring.node.engine.ranks import MOST, highest, worthwhile


@pytest.mark.parametrize("levels", [3, 400, 1_000_000])
@pytest.mark.parametrize("count", [1, 20, MOST])
def test_the_highest_are_those_of_a_whole_sort_and_equal_ones_in_order(levels: int, count: int) -> None:
    vocabulary = 20_001
    assert worthwhile(vocabulary)
    values = np.random.default_rng(count).integers(0, levels, (3, vocabulary)).astype(np.float32)
    found, places = highest(mx.array(values), count)
    expected = np.argsort(-values, axis=-1, kind="stable")[:, :count]
    assert np.array_equal(np.array(places), expected)
    assert np.array_equal(np.array(found), np.take_along_axis(values, expected, axis=-1))
