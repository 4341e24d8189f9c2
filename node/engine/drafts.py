"""Drafts at the head: the tokens that it guesses, and which of them were right.

A step with drafts computes a row's last token and those that the head guesses behind it, and the tail samples
a token behind each. What it samples is right as long as what the head has guessed so far is what was sampled.
Further steps compute what the head has guessed behind that, before anybody knows whether it was right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        start = self._place() if said[-_WORD:] == last.to_bytes(_WORD, "little") else -1
        if start < 0:
            return [last] * count
        follows = said[start:][: count * _WORD]
        while len(follows) < count * _WORD:  # it goes round
            follows += follows[: count * _WORD - len(follows)]
        return list(memoryview(follows).cast("I"))

    def knows(self) -> bool:
        """Whether the last tokens have occurred before."""
        return self._place() >= 0

    def _place(self) -> int:
        """Where what follows the last tokens begins, in bytes; -1 if they are new."""
        for length in _LENGTHS:
            if len(self._said) > length * _WORD:
                place = self._newest(bytes(self._said[-length * _WORD :]))
                if place >= 0:
                    return place + length * _WORD
        return -1

    def _newest(self, key: bytes) -> int:
        """Where the newest occurrence before the last one begins, in bytes; -1 for nowhere."""
        place = self._said.rfind(key, 0, -_WORD)
        while place % _WORD and place > 0:
            place = self._said.rfind(key, 0, place + len(key) - 1)
        return place


@dataclass(slots=True)
class _Chain:
    """What the head guesses of one row from one settling to the next, and how much of it was right."""

    guessed: Sequence[int]
    at: int = 0
    accepted: int = 0
    last: int = 0  # that was sampled
    broken: bool = False


class Runs:
    """Of the rows of an epoch: which tokens went out behind each other, and how many came back right.

    `came` is called by the receiving thread, the rest by the compute loop.
    """

    def __init__(self) -> None:
        self._chains: dict[int, _Chain] = {}
        self._runs: dict[int, tuple[_Chain, list[int]]] = {}

    def begin(self, step: ResolvedStep, last: int, guessed: Sequence[int]) -> list[int]:
        """The tokens to compute: the row's last, and the first of what is `guessed` to follow."""
        chain = self._chains[step.rows[0]] = _Chain(guessed)
        return self._sent(step, chain, [last, *self._next(chain, step.drafts)])

    def go_on(self, step: ResolvedStep) -> list[int]:
        """The tokens to compute behind those of the run before."""
        chain = self._chains[step.rows[0]]
        return self._sent(step, chain, self._next(chain, 1 + step.drafts))

    @staticmethod
    def _next(chain: _Chain, count: int) -> list[int]:
        chain.at += count
        return list(chain.guessed[chain.at - count : chain.at])

    def _sent(self, step: ResolvedStep, chain: _Chain, run: list[int]) -> list[int]:
        self._runs[step.number] = chain, run
        return run

    def came(self, step: ResolvedStep, sampled: Sequence[int]) -> list[int]:
        """Those of the sampled tokens that count: the first at least, unless a run before was wrong."""
        chain, run = self._runs.pop(step.number)
        if chain.broken or (chain.accepted and run[0] != chain.last):
            chain.broken = True
            return []
        count = 1
        while count < len(run) and run[count] == sampled[count - 1]:
            count += 1
        chain.broken = count < len(run)
        chain.accepted += count
        chain.last = sampled[count - 1]
        return list(sampled[:count])

    def settle(self, change: Settling) -> None:
        """Raises InvalidInput (BAD_STEP) where the gateway counts otherwise."""
        chain = self._chains.pop(change.row, None)
        if chain is None or chain.accepted != change.accepted:
            raise InvalidInput(
                f"not {change.accepted} tokens of row {change.row} were right",
                reason="BAD_STEP",
                hint="gateway and head disagree; the epoch must end",
            )
        chain.broken = True  # what is still under way of it was computed in vain

    def forget(self, row: int) -> None:
        self._chains.pop(row, None)
