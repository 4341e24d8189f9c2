"""Changes of logits before a token is chosen: masked endings, then bias, then penalties.

Endings are masked until an answer is long enough: `min_tokens` and `ignore_eos` of a request. Their logits
become minus infinity before bias and penalties, so that the length of an answer does not depend on the model.
A row's masked tokens depend on its position alone: an answer that goes on after a fault, or is computed with
drafts, has the same mask as without.

Repetition is mlx-lm's (`make_repetition_penalty`, after Keskar et al. 2019, arXiv:1909.05858): the logits of
the last tokens of prompt and answer, each once, are divided by the penalty where they are above 0 and
multiplied where they are below. Presence and frequency are OpenAI's: for each token that occurs c times in
the answer so far, presence + c * frequency is taken off its logit; the prompt does not count.

All rows of a lane go through the same few operations; parameters that a row lacks are neutral. A row's
history stays on the device, because the next step is launched before its token is known to the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from sealring.node.engine.params import RowParameters

_NEVER = -float("inf")


@dataclass(slots=True)
class History:
    """The tokens of rows, as far as their penalties need them. A part that no row needs is None.

    `recent`: uint32 [rows, width], the last tokens, the newest last; _NOTHING where there are fewer.
    `counts`: float32 [rows, vocabulary], how often each token was generated; None, too, before the first one.
    """

    rows: int
    recent: mx.array | None = None
    counts: mx.array | None = None

    @classmethod
    def of_prompts(cls, rows: Sequence[RowParameters]) -> History:
        """The history before the first token of an answer."""
        width = max((row.repetition_context_size for row in rows), default=0)
        if not width:
            return cls(len(rows))
        recent = np.full((len(rows), width), _NOTHING, np.uint32)
        for index, row in enumerate(rows):
            if row.prompt_tail:
                recent[index, -len(row.prompt_tail) :] = row.prompt_tail
        return cls(len(rows), mx.array(recent))

    def extended(self, other: History) -> History:
        """The rows of both, in order."""
        return History(
            self.rows + other.rows,
            _joined(self.recent, self.rows, other.recent, other.rows, _NOTHING),
            _joined(self.counts, self.rows, other.counts, other.rows, 0),
        )

    def kept(self, keep: Sequence[int], rows: Sequence[RowParameters]) -> History:
        """The rows with these indices, in this order; `rows` are their parameters."""
        width = max((row.repetition_context_size for row in rows), default=0)
        recent = self.recent if width else None
        counts = self.counts if any(row.counts for row in rows) else None
        picked = None if recent is None and counts is None else mx.array(list(keep), mx.uint32)
        return History(
            len(keep),
            recent[picked, -width:] if recent is not None else None,
            counts[picked] if counts is not None else None,
        )

    def begin_counts(self, vocabulary: int, answered: Sequence[Sequence[int]]) -> None:
        """Counts tokens from now on, beginning with those that rows have `answered` in an earlier epoch."""
        if self.counts is None:
            counts = np.zeros((self.rows, vocabulary), np.float32)
            for row, tokens in zip(counts, answered, strict=True):
                np.add.at(row, np.array(tokens, np.uint32), 1)
            self.counts = mx.array(counts)

    def add(self, tokens: mx.array) -> None:
        """One generated token per row, uint32 [rows]."""
        if self.recent is not None:
            self.recent = mx.concatenate([self.recent[:, 1:], tokens[:, None].astype(mx.uint32)], axis=1)
        if self.counts is not None:
            self.counts = self.counts.at[mx.arange(self.rows), tokens].add(1.0)

    def add_all(self, tokens: mx.array, first: Sequence[int]) -> None:
        """Adds the `first` tokens of each row, one after the other; uint32 [rows, tokens] are generated."""
        kept = mx.array(list(first))[:, None]
        if self.recent is not None:
            recent = mx.concatenate([self.recent, tokens.astype(mx.uint32)], axis=1)
            places = kept + mx.arange(self.recent.shape[1])
            self.recent = mx.take_along_axis(recent, places, axis=1)
        if self.counts is not None:
            counted = (mx.arange(tokens.shape[1]) < kept).astype(mx.float32)
            self.counts = self.counts.at[mx.arange(self.rows)[:, None], tokens].add(counted)


class Endings:
    """Masks of a lane's rows, in its order; their next tokens are at `positions` of their answers."""

    def __init__(self, rows: Sequence[RowParameters], positions: Sequence[int]) -> None:
        self._rows = [
            (*each, at) for each, at in zip(enumerate(rows), positions, strict=True) if each[1].masks
        ]
        self._until = 0
        """The step from which on other tokens are masked."""

        self._table: tuple[mx.array, mx.array] | None = None

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __call__(self, logits: mx.array, step: int) -> mx.array:
        """Logits [rows, vocabulary] of the rows' tokens number `step` from here, -inf where one is masked."""
        if step >= self._until:
            self._build(step, logits.shape[-1])
        if self._table is None:
            return logits
        place, token = self._table
        return logits.at[place, token].add(mx.array(_NEVER, logits.dtype))

    def _build(self, step: int, vocabulary: int) -> None:
        ends = [row.masked_until - at for _, row, at in self._rows if row.masked_until - at > step]
        self._until = min(ends, default=1 << 62)
        entries = [
            (index, token)
            for index, row, at in self._rows
            for token in row.masked_always + (row.masked if row.masked_until - at > step else ())
            if token < vocabulary
        ]
        self._table = None
        if entries:
            places, tokens = zip(*entries, strict=True)
            self._table = mx.array(places, mx.uint32), mx.array(tokens, mx.uint32)


class Penalties:
    """The penalties of a lane's rows, in the lane's order."""

    def __init__(self, rows: Sequence[RowParameters], vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._biases = _bias_table(rows, vocabulary)
        self._repetition = _column([row.repetition_penalty for row in rows])
        self._presence = _column([row.presence_penalty for row in rows])
        self._frequency = _column([row.frequency_penalty for row in rows])
        sizes = np.array([row.repetition_context_size for row in rows])
        self._within = mx.array(np.arange(sizes.max(), 0, -1)[None] <= sizes[:, None])
        self._counting = any(row.counts for row in rows)
        self._answered = [row.answered for row in rows]

    def __call__(self, logits: mx.array, history: History) -> mx.array:
        """Adjusted logits, float32 [rows, vocabulary]."""
        if self._counting:
            history.begin_counts(self._vocabulary, self._answered)
        logits = logits.astype(mx.float32)
        if self._biases is not None:
            place, token, bias = self._biases
            logits = logits.at[place, token].add(bias)
        if history.recent is not None:
            seen = self._seen(history.recent)
            penalty = self._repetition
            logits = mx.where(seen, mx.where(logits < 0, logits * penalty, logits / penalty), logits)
        if history.counts is not None:
            counts = history.counts
            logits = logits - counts * self._frequency - (counts > 0) * self._presence
        return logits

    def _seen(self, recent: mx.array) -> mx.array:
        """Marks the tokens that are among a row's last, bool [rows, vocabulary]."""
        nothing = self._vocabulary  # one more column, for what has no logit
        tokens = mx.minimum(mx.where(self._within, recent, nothing), nothing)
        seen = mx.zeros((recent.shape[0], nothing + 1), mx.bool_)
        return mx.put_along_axis(seen, tokens, mx.array(True), axis=1)[:, :nothing]


_NOTHING = 0xFFFFFFFF


def _bias_table(rows: Sequence[RowParameters], vocabulary: int) -> tuple[mx.array, mx.array, mx.array] | None:
    """Row index, token and bias of every bias of every row; None without any."""
    entries = [
        (index, token, bias)
        for index, row in enumerate(rows)
        for token, bias in row.logit_bias
        if token < vocabulary
    ]
    if not entries:
        return None
    place, token, bias = zip(*entries, strict=True)
    return mx.array(place, mx.uint32), mx.array(token, mx.uint32), mx.array(bias, mx.float32)


def _joined(
    one: mx.array | None, one_rows: int, two: mx.array | None, two_rows: int, blank: int
) -> mx.array | None:
    """The rows of both; the narrower array, or a missing one, is filled with `blank` on the left."""
    present = [array for array in (one, two) if array is not None]
    if not present:
        return None
    width, dtype = max(array.shape[1] for array in present), present[0].dtype

    def filled(array: mx.array | None, rows: int) -> mx.array:
        if array is None:
            return mx.full((rows, width), blank, dtype)
        if array.shape[1] == width:
            return array
        return mx.concatenate([mx.full((rows, width - array.shape[1]), blank, dtype), array], axis=1)

    return mx.concatenate([filled(one, one_rows), filled(two, two_rows)])


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(np.array(values, np.float32)[:, None])
