"""Log-probabilities for the rows that ask for them: made at the tail, packed into the tokens record, read at
the head.

They are the log-softmax of the model's own logits in float32: before bias, penalties, temperature and
filters, as at OpenAI and vLLM. Their number is fixed for the life of a row, so both ends of the closing edge
know a record's length beforehand.

The record has the step's tokens first. Then each row that asks has uint32 words, in the order of the tokens:
the sampled token's log-probability, the ids of the likeliest tokens, and their log-probabilities. The
likeliest token comes first; equal ones are in the order of the vocabulary. Log-probabilities are the bits of
a float32. Last come the same words for the tokens of prompts, all but each prompt's first, of rows that ask
for them and get their first token in this step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from sealring.node.engine.ranks import highest

LOWEST = -9999.0
"""Replaces anything lower and NaN, because JSON has no infinities. OpenAI's own figure."""

Asking: TypeAlias = tuple[tuple[int, int, int, int], ...]
"""For each row that asks: its index among the step's sampled rows, the number of likeliest tokens beside each
token, and the number of the prompt's tokens that have log-probabilities. Last comes the length of a vector,
which a row has in place of these."""

Words: TypeAlias = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of one token, and the likeliest tokens in its place as (id, log-probability).

    An answer's first token may have `prompt`: the same of the prompt's tokens from the second on. Where a
    model makes vectors there is nothing but a `vector`.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    prompt: tuple[TokenLogprobs, ...] = ()
    vector: tuple[float, ...] = ()


def asking_of(logprobs: Iterable[int | None], prompts: Iterable[int] = repeat(0)) -> Asking:
    """The rows that ask, from the number of likeliest tokens that each sampled row wants (None: it does not
    ask) and the number of its prompt's tokens that have log-probabilities."""
    asked = enumerate(zip(logprobs, prompts, strict=False))
    return tuple((index, count, tokens, 0) for index, (count, tokens) in asked if count is not None)


def pooled(rows: int, width: int) -> Asking:
    """Rows that all have a vector."""
    return tuple((index, 0, 0, width) for index in range(rows))


def words_of(asking: Asking) -> int:
    """Length of their part of the tokens record, in words."""
    return sum(width or (1 + tokens) * (1 + 2 * count) for _, count, tokens, width in asking)


class Reporter:
    """Makes the rows' part of the record; at least one row must ask."""

    def __init__(self, asking: Asking) -> None:
        counts = [count for _, count, *_ in asking]
        self._rows = mx.array([index for index, *_ in asking], mx.uint32)
        self._width = max(counts)
        self._picked: mx.array | None = None
        if any(count != self._width for count in counts):
            self._picked = mx.array(_places(counts, self._width), mx.uint32)

    def __call__(self, logits: mx.array, tokens: mx.array) -> mx.array:
        """Logits [rows, vocabulary] and the rows' sampled tokens to uint32 [words], lazily."""
        logits = logits[self._rows].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        width = min(self._width, logits.shape[-1])
        columns = [_chosen(logprobs, tokens[self._rows, None])]
        if self._width:
            values, places = highest(logprobs, width)
            columns += [_filled(places, self._width), _filled(values.view(mx.uint32), self._width)]
        table = mx.concatenate(columns, axis=1).flatten()
        return table if self._picked is None else table[self._picked]


def unpack(asking: Asking, words: Words) -> dict[int, TokenLogprobs]:
    """The log-probabilities in the words behind a record's tokens, by the index among the sampled rows."""
    found, start = {}, 0

    def take(count: int) -> TokenLogprobs:
        nonlocal start
        own, middle, end = start, start + 1 + count, start + 1 + 2 * count
        start = end
        values = [_bounded(value) for value in words[middle:end].view(np.float32).tolist()]
        top = tuple(zip(words[own + 1 : middle].tolist(), values, strict=True))
        return TokenLogprobs(_bounded(float(words[own : own + 1].view(np.float32)[0])), top)

    for index, count, _, width in asking:
        if width:
            vector = words[start : start + width].view(np.float32).tolist()
            found[index], start = TokenLogprobs(0.0, (), vector=tuple(vector)), start + width
        else:
            found[index] = take(count)
    for index, count, tokens, _ in asking:
        if tokens:
            found[index] = replace(found[index], prompt=tuple(take(count) for _ in range(tokens)))
    return found


def scores(logits: mx.array, tokens: Sequence[int], count: int) -> mx.array:
    """Words of a prompt's tokens, uint32, lazily; logits [tokens, vocabulary] are those in their places."""
    asking = asking_of([count] * len(tokens))
    return Reporter(asking)(logits, mx.array(list(tokens), mx.uint32))


def _chosen(logprobs: mx.array, tokens: mx.array) -> mx.array:
    return mx.take_along_axis(logprobs, tokens, axis=-1).view(mx.uint32)


def _filled(columns: mx.array, width: int) -> mx.array:
    """The columns, with the last one repeated if the vocabulary is smaller than the announced width."""
    missing = width - columns.shape[1]
    return mx.concatenate([columns, *[columns[:, -1:]] * missing], axis=1) if missing else columns


def _places(counts: Sequence[int], width: int) -> list[int]:
    """Places of the words that rows ask for in a table with 1 + 2 * width words a row."""
    found: list[int] = []
    for row, count in enumerate(counts):
        start = row * (1 + 2 * width)
        found += range(start, start + 1 + count)
        found += range(start + 1 + width, start + 1 + width + count)
    return found


def _bounded(value: float) -> float:
    return value if value >= LOWEST else LOWEST
