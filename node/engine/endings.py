"""Tokens that would end an answer too early, which are masked: `min_tokens` and `ignore_eos` of a request.

Such a token's logit becomes minus infinity before bias and penalties, so that the length of an answer does
not depend on the model. A row's masked tokens depend on its position alone: an answer that goes on after a
fault, or is computed with drafts, has the same mask as without.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from sealring.node.engine.params import RowParameters

_NEVER = -float("inf")


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
