"""The highest values of each row of a vocabulary, without sorting all of it.

The vocabulary is cut into blocks. The `count` highest values of a row lie in the `count` blocks whose own
highest values are highest, so only those blocks are sorted.
"""

from __future__ import annotations

import mlx.core as mx

MOST = 256
"""Most values that are found faster than by sorting the vocabulary."""

_BLOCK = 32


def worthwhile(vocabulary: int) -> bool:
    """Whether `highest` is less work than sorting the vocabulary."""
    return vocabulary > 2 * MOST * _BLOCK


def highest(values: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` highest of each row of [rows, vocabulary] and their places, uint32, both [rows, count].

    The highest comes first, and of equal ones the one that comes first in the vocabulary. `count` is at most
    MOST and at most the vocabulary.
    """
    rows, vocabulary = values.shape
    if not worthwhile(vocabulary):
        places = mx.argsort(-values, axis=-1)[:, :count]
        return mx.take_along_axis(values, places, axis=-1), places
    blocks = -(-vocabulary // _BLOCK)
    missing = blocks * _BLOCK - vocabulary
    if missing:
        values = mx.pad(values, [(0, 0), (0, missing)], constant_values=-float("inf"))
    table = values.reshape(rows, blocks, _BLOCK)
    # in their order in the vocabulary, for the sake of equal values
    chosen = mx.sort(mx.argsort(-mx.max(table, axis=-1), axis=-1)[:, :count], axis=-1)[:, :, None]
    found = mx.take_along_axis(table, chosen, axis=1).reshape(rows, -1)
    order = mx.argsort(-found, axis=-1)[:, :count]
    places = (chosen * _BLOCK + mx.arange(_BLOCK, dtype=mx.uint32)).reshape(rows, -1)
    return mx.take_along_axis(found, order, axis=-1), mx.take_along_axis(places, order, axis=-1)
