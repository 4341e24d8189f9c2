"""The lowest log-probabilities that `top_p` and `top_k` let through, and the highest ones of a vocabulary.

Usually the few highest values suffice, which `highest` finds without sorting the whole vocabulary. It cuts it
into blocks: the `count` highest values of a row lie in the `count` blocks whose own highest values are the
highest, so only those blocks are sorted.

Whether they hold a row's whole nucleus shows only once they are computed. If not, the vocabulary is sorted,
and for the next steps without the attempt. The look at the values costs a CPU little. A GPU would stand still
meanwhile, so there the vocabulary is always sorted for a nucleus that no `top_k` bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from sealring.node.engine.params import RowParameters

MOST = 256
"""Most values that are found faster than by sorting the vocabulary."""

_BLOCK = 32
_NEVER = -float("inf")
_SORTED_STEPS = 16
"""Steps for which a vocabulary is sorted at once after a nucleus that was larger."""


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


def needs_guess(row: RowParameters) -> bool:
    """Whether the few highest values may be too few."""
    return not row.greedy and row.top_p < 1 and not 0 < row.top_k <= MOST


def guesses(vocabulary: int) -> bool:
    """Whether the few highest values are tried first on this device."""
    return worthwhile(vocabulary) and mx.default_device() == mx.cpu


class Ranks:
    """Bounds for the rows that have `top_p` or `top_k`, in order."""

    def __init__(self, rows: Sequence[RowParameters], vocabulary: int) -> None:
        top_k = [row.top_k if 0 < row.top_k < vocabulary else vocabulary for row in rows]
        self._guesses = any(needs_guess(row) for row in rows)
        self._sorts = not worthwhile(vocabulary) or any(MOST < row.top_k < vocabulary for row in rows)
        self._sorts = self._sorts or (self._guesses and not guesses(vocabulary))
        self._sorted_steps = 0
        self._bounded = mx.array([[one <= MOST] for one in top_k])
        self._top_k: mx.array | None = None
        if min(top_k) < vocabulary:
            self._top_k = mx.array([[one] for one in top_k], mx.int32)
        self._top_p: mx.array | None = None
        if any(row.top_p < 1 for row in rows):
            # one that is off is more than there is
            self._top_p = mx.array([[row.top_p if row.top_p < 1 else 2.0] for row in rows], mx.float32)

    def __call__(self, logprobs: mx.array) -> tuple[mx.array, mx.array | None]:
        """The lowest value that each row keeps, and how many of the values equal to it, int32; both [rows,
        1].

        `logprobs`: float32 [rows, vocabulary]. None for the second keeps all equal values.
        """
        vocabulary = logprobs.shape[-1]
        total = mx.exp(mx.logsumexp(logprobs, axis=-1, keepdims=True))
        if self._sorts or self._sorted_steps:
            self._sorted_steps = max(self._sorted_steps - 1, 0)
            return self._lowest(-mx.sort(-logprobs, axis=-1), total, vocabulary)[:2]
        floor, room, enough = self._lowest(highest(logprobs, MOST)[0], total, vocabulary)
        if self._guesses and not mx.all(enough).item():
            self._sorted_steps = _SORTED_STEPS
            sure, _, _ = self._lowest(-mx.sort(-logprobs, axis=-1), total, vocabulary)
            floor = mx.where(enough, floor, sure)  # no row's result depends on another's
        return floor, room

    def _lowest(
        self, descending: mx.array, total: mx.array, vocabulary: int
    ) -> tuple[mx.array, mx.array | None, mx.array]:
        """As `__call__`, by the highest values; the third array says whether they suffice for each row."""
        width = descending.shape[-1]
        enough = self._bounded | (width == vocabulary)
        floor = mx.full(total.shape, _NEVER)
        if self._top_p is not None:
            before = mx.cumsum(mx.exp(descending), axis=-1, inclusive=False)
            within = mx.sum(before < self._top_p * total, axis=-1, keepdims=True)
            off = self._top_p > 1
            enough = enough | off | (within < width)
            floor = mx.take_along_axis(descending, mx.maximum(within, 1) - 1, axis=-1)
            floor = mx.where(off, _NEVER, floor)
        if self._top_k is None:
            return floor, None, enough
        last = mx.minimum(self._top_k, width) - 1
        bound = mx.take_along_axis(descending, last, axis=-1)
        room = last + 1 - mx.sum(descending > bound, axis=-1, keepdims=True)
        limits = (self._top_k < vocabulary) & (bound >= floor)
        return mx.where(limits, bound, floor), mx.where(limits, room, vocabulary), enough
