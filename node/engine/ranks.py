"""The lowest log-probabilities that `top_p` and `top_k` let through, and the highest ones of a vocabulary.

Usually the few highest values suffice, which `highest` finds without sorting the whole vocabulary. It cuts it
into blocks: the `count` highest values of a row lie in the `count` blocks whose own highest values are the
highest, so only those blocks are sorted.

For a nucleus that no `top_k` bounds they may be too few. `lowest_of_nucleus` then bisects for its lowest
value by sums over the vocabulary. A CPU looks at the few highest first, because the sums take it ten times as
long. A GPU would stand still during a look, so there the sums are always made. Whichever it is, a row's
result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from sealring.node.engine.params import RowParameters

MOST = 256
"""Most values that are found faster than by sorting the vocabulary."""

_BLOCK = 32
_NEVER = -float("inf")

_HALVINGS = 16
"""Halvings of a range of at most 29 (natural logarithm), which separate values that are 0.0005 apart. A
model in half precision has values further apart wherever a nucleus may end."""

_LEAST = 1e-30
"""Replaces a `top_p` of 0, with which the likeliest token is kept."""


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
    """Whether the few highest values are looked at first on this device."""
    return worthwhile(vocabulary) and mx.default_device() == mx.cpu


class Ranks:
    """Bounds for the rows that have `top_p` or `top_k`, in order."""

    def __init__(self, rows: Sequence[RowParameters], vocabulary: int) -> None:
        top_k = [row.top_k if 0 < row.top_k < vocabulary else vocabulary for row in rows]
        self._few = MOST if worthwhile(vocabulary) else vocabulary
        self._looks = guesses(vocabulary)
        self._sorts = self._few == vocabulary or any(MOST < one < vocabulary for one in top_k)
        wide = [needs_guess(row) and self._few < vocabulary for row in rows]
        self._wide: mx.array | None = mx.array(wide)[:, None] if any(wide) else None
        self._top_k: mx.array | None = None
        if min(top_k) < vocabulary:
            self._top_k = mx.array([[one] for one in top_k], mx.int32)
        self._top_p: mx.array | None = None
        if any(row.top_p < 1 for row in rows):
            # a row without top_p gets more than any sum
            top_p = np.array([[max(row.top_p, _LEAST) if row.top_p < 1 else 2.0] for row in rows], np.float32)
            self._top_p = mx.array(top_p)
            self._width = mx.array(_widths(top_p, vocabulary))
        self._sums_alone = all(wide) and not self._looks and self._top_k is None

    def __call__(self, logprobs: mx.array) -> tuple[mx.array, mx.array | None]:
        """The lowest value that each row keeps, and how many of the values equal to it, int32; both [rows,
        1].

        `logprobs`: float32 [rows, vocabulary]. None for the second keeps all equal values.
        """
        if self._sums_alone:
            return self._by_sums(logprobs), None
        descending = -mx.sort(-logprobs, axis=-1) if self._sorts else highest(logprobs, MOST)[0]
        floor = mx.full((logprobs.shape[0], 1), _NEVER)
        if self._top_p is not None:
            floor, enough = self._by_order(logprobs, descending[:, : self._few])
            if self._wide is not None and not self._looks:
                floor = mx.where(self._wide, self._by_sums(logprobs), floor)
            elif self._wide is not None and not mx.all(enough).item():
                floor = mx.where(enough, floor, self._by_sums(logprobs))
        if self._top_k is None:
            return floor, None
        last = mx.minimum(self._top_k, descending.shape[-1]) - 1
        bound = mx.take_along_axis(descending, last, axis=-1)
        room = last + 1 - mx.sum(descending > bound, axis=-1, keepdims=True)
        vocabulary = logprobs.shape[-1]
        limits = (self._top_k < vocabulary) & (bound >= floor)
        return mx.where(limits, bound, floor), mx.where(limits, room, vocabulary)

    def _by_order(self, logprobs: mx.array, descending: mx.array) -> tuple[mx.array, mx.array]:
        """The nucleus's lowest value by a row's highest ones, and whether they suffice; both [rows, 1]."""
        assert self._top_p is not None
        total = mx.exp(mx.logsumexp(logprobs, axis=-1, keepdims=True))
        before = mx.cumsum(mx.exp(descending), axis=-1, inclusive=False)
        within = mx.sum(before < self._top_p * total, axis=-1, keepdims=True)
        enough = within < descending.shape[-1]
        if self._wide is not None:
            enough = enough | ~self._wide
        return self._unless_off(mx.take_along_axis(descending, mx.maximum(within, 1) - 1, axis=-1)), enough

    def _by_sums(self, logprobs: mx.array) -> mx.array:
        assert self._top_p is not None
        search = lowest_of_nucleus if self._looks else _compiled()
        return self._unless_off(search(logprobs, self._top_p, self._width))

    def _unless_off(self, floor: mx.array) -> mx.array:
        assert self._top_p is not None
        return mx.where(self._top_p > 1, _NEVER, floor)


def lowest_of_nucleus(logprobs: mx.array, top_p: mx.array, width: mx.array) -> mx.array:
    """The lowest value of each row's nucleus, float32 [rows, 1], lazily and without sorting.

    A value is in it if all higher ones together have less than `top_p` of the mass. It is at most `width`
    below the logarithm of all mass. One that is less than `width` / 2^16 below the nucleus may be kept, too.
    `logprobs` are float32 [rows, vocabulary], `top_p` and `width` float32 [rows, 1].
    """
    mass = mx.exp(logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True))
    low, step = -width, width
    for _ in range(_HALVINGS):
        step = step * 0.5
        middle = low + step
        above = mx.sum(mx.where(mass > mx.exp(middle), mass, 0.0), axis=-1, keepdims=True)
        low = mx.where(above < top_p, low, middle)
    return mx.min(mx.where(mass > mx.exp(low), logprobs, float("inf")), axis=-1, keepdims=True)


@cache
def _compiled() -> Callable[..., mx.array]:
    """The compiled function for a GPU, whose time depends on the number of operations. It slows a CPU
    down."""
    compiled: Callable[..., mx.array] = mx.compile(lowest_of_nucleus)
    return compiled


def _widths(top_p: npt.NDArray[np.float32], vocabulary: int) -> npt.NDArray[np.float32]:
    """The mass outside a nucleus is at most that of its lowest value, as often as there are tokens."""
    outside = np.maximum(1.0 - top_p, np.finfo(np.float32).eps)
    widths: npt.NDArray[np.float32] = np.log(vocabulary / outside).astype(np.float32)
    return widths
