"""Drafts at the head: the tokens that it guesses, and which of them were right.

A step with drafts computes a row's last token and those that the head guesses behind it, and the tail samples
a token behind each. What it samples is right as long as what the head has guessed so far is what was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.composition import ResolvedStep, Settling

_LENGTHS = (3, 2)
"""Tokens that must have occurred before, the most first, as in vLLM's prompt_lookup_max and _min."""

_WORD = 4


class Lookup:
    """Guesses how an answer goes on by what followed the same tokens before, in prompt or answer."""

    def __init__(self, tokens: bytes) -> None:
        """`tokens`: those of the prompt, uint32 in the machine's order."""
        self._said = bytearray(tokens)

    def add(self, token: int) -> None:
        """The answer's next token."""
        self._said += token.to_bytes(_WORD, "little")

    def drafts(self, last: int, count: int) -> list[int]:
        """`count` tokens that may follow the answer's `last` one: those that follow the newest place with the
        same last tokens, or else as many times the last one."""
        said = self._said
        if said[-_WORD:] != last.to_bytes(_WORD, "little"):
            return [last] * count
        for length in _LENGTHS:
            place = self._newest(bytes(said[-length * _WORD :])) if len(said) > length * _WORD else -1
            if place >= 0:
                follows = said[place + length * _WORD :][: count * _WORD]
                while len(follows) < count * _WORD:  # it goes round
                    follows += follows[: count * _WORD - len(follows)]
                return list(memoryview(follows).cast("I"))
        return [last] * count

    def _newest(self, key: bytes) -> int:
        """Where the newest occurrence before the last one begins, in bytes; -1 for nowhere."""
        place = self._said.rfind(key, 0, -_WORD)
        while place % _WORD and place > 0:
            place = self._said.rfind(key, 0, place + len(key) - 1)
        return place


class Runs:
    """Of the rows of an epoch: which tokens went out behind each other, and how many came back right."""

    def __init__(self) -> None:
        self._runs: dict[int, Sequence[int]] = {}
        self._accepted: dict[int, int] = {}

    def sent(self, step: ResolvedStep, run: Sequence[int]) -> None:
        """The row's last token, and the drafts behind it."""
        self._runs[step.number] = run

    def came(self, step: ResolvedStep, sampled: Sequence[int]) -> list[int]:
        """Those of the sampled tokens that count, one at least."""
        run = self._runs.pop(step.number)
        count = 1
        while count < len(run) and run[count] == sampled[count - 1]:
            count += 1
        self._accepted[step.rows[0]] = count
        return list(sampled[:count])

    def settle(self, change: Settling) -> None:
        """Raises InvalidInput (BAD_STEP) where the gateway counts otherwise."""
        if self._accepted.pop(change.row, 0) != change.accepted:
            raise InvalidInput(
                f"not {change.accepted} tokens of row {change.row} were right",
                reason="BAD_STEP",
                hint="gateway and head disagree; the epoch must end",
            )

    def forget(self, row: int) -> None:
        self._accepted.pop(row, None)
