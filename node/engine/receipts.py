"""What an engine notes of rows that ask for a receipt: the head what it delivers, the tail what it samples.

Both cost a hash update or an append for each token, beside the step's path: the head's in the thread that
turns tokens into text, the tail's in the one that sends them off.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from sealring.mesh.receipt.digests import AnswerHash, sampled_digest
from sealring.mesh.ring.composition import Change, Eviction, ResolvedStep, Settling
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference


class Delivered:
    """The answer of one row as the head has delivered it: hashes of its text, and its tokens."""

    def __init__(self, binding: bytes, prompt_tokens: int, given: int) -> None:
        """`given`: tokens of the answer that an earlier epoch has brought."""
        self.binding = binding
        self._prompt_tokens, self._given = prompt_tokens, given
        self._answer = AnswerHash()
        self._tokens = array("I")

    def add(self, text: str, parsed: inference.Parsed | None) -> None:
        """Takes the next piece of the answer."""
        if parsed is None:
            self._answer.add(text)
        else:
            self._answer.add(text, parsed.reasoning, parsed.tool_calls)

    def token(self, token: int) -> None:
        """Takes the next token, also one of an earlier epoch."""
        self._tokens.append(token)

    def digests(self, row: int, finish: inference.FinishReason.ValueType) -> engine.RowDigests:
        """All that the head signs for the whole answer."""
        hashes = self._answer.digests()
        return engine.RowDigests(
            row=row,
            binding=self.binding,
            given=self._given,
            tokens=len(self._tokens),
            sampled=sampled_digest(self.binding, self._tokens[self._given :]),
            text=hashes.text,
            reasoning=hashes.reasoning,
            calls=hashes.calls,
            order=hashes.order,
            finish=finish,
            prompt_tokens=self._prompt_tokens,
        )


@dataclass(slots=True)
class _Row:
    """A row's tokens of this epoch. `settled` of them count; behind these are those of `open` drafts."""

    binding: bytes
    given: int
    tokens: array[int] = field(default_factory=lambda: array("I"))
    settled: int = 0
    open: int = 0


Places: TypeAlias = Sequence[tuple[int, _Row, int]]
"""For each token whose row asks for a receipt: its index in the step, the row, and its index in the row."""


class Sampled:
    """The tokens that the tail samples for rows that ask for a receipt.

    The compute thread says where the tokens of a step belong, and another thread brings them, step by step.
    Those of drafts that were wrong are overwritten by what is sampled after they were settled.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def begin(self, row: int, choices: int, binding: bytes, given: int) -> None:
        """A row begins, and with it the copies with the next numbers."""
        for number in range(row, row + choices):
            self._rows[number] = _Row(binding, given)

    def places(self, step: ResolvedStep) -> Places:
        """The places of the tokens of a step that is launched next."""
        if not self._rows:
            return []
        places = []
        for index, number in enumerate(step.sampled):
            if (row := self._rows.get(number)) is None:
                continue
            places.append((index, row, row.settled + row.open))
            if step.drafts:
                row.open += 1
            else:
                row.settled += 1
        return places

    def change(self, change: Change) -> None:
        """A row's open drafts are settled, or it is evicted."""
        if isinstance(change, Settling) and (row := self._rows.get(change.row)) is not None:
            row.settled, row.open = row.settled + change.accepted, 0
        elif isinstance(change, Eviction):
            self._rows.pop(change.row, None)

    def digests(self, row: int, tokens: int) -> engine.RowDigests:
        """The hash that the tail signs for an answer's first `tokens` tokens but those of earlier epochs.

        There is none where the tail has not sampled as many.
        """
        digests = engine.RowDigests(row=row, tokens=tokens)
        if (one := self._rows.get(row)) is not None and one.given <= tokens:
            digests.binding, digests.given = one.binding, one.given
            if len(sampled := one.tokens[: tokens - one.given]) == tokens - one.given:
                digests.sampled = sampled_digest(one.binding, sampled)
        return digests


def bring(places: Places, tokens: Sequence[int]) -> None:
    """Puts a step's tokens into their places; for the thread that sends them off."""
    for index, row, at in places:
        if at < len(row.tokens):
            row.tokens[at] = tokens[index]
        else:
            row.tokens.append(tokens[index])
