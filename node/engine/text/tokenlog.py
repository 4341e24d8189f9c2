"""An answer's tokens with their log-probabilities, told along with the text that they spell."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from sealring.node.engine.logprobs import TokenLogprobs
from sealring.v1 import inference_pb2 as inference


class TokenLog:
    """The tokens of one answer. Those that are sent spell the text that is sent.

    A token is withheld as long as its text is, which might begin a stop string. A token that is wholly a part
    of the stop string is never sent, nor is one that ends the sequence, unless `ends`.
    """

    def __init__(self, spelling: Callable[[int], bytes], *, ends: bool = False) -> None:
        self.ends = ends
        self._spelling = spelling
        self._held: deque[tuple[int, int, inference.TokenLogprob]] = deque()

    def add(self, token: int, told: TokenLogprobs, start: int, end: int) -> None:
        """A token that made the characters [start, end) of the answer certain."""
        self._held.append((start, end, self._entry(token, told)))

    def of_prompt(self, tokens: Sequence[int], told: Sequence[TokenLogprobs]) -> list[inference.TokenLogprob]:
        """The entries of a prompt's tokens. `told` has all tokens but the first."""
        first = inference.TokenLogprob(id=tokens[0], spelling=self._spelling(tokens[0]))
        entries = [first, *(self._entry(*each) for each in zip(tokens[1:], told, strict=True))]
        for entry in entries:
            entry.prompt = True
        return entries

    def _entry(self, token: int, told: TokenLogprobs) -> inference.TokenLogprob:
        entry = inference.TokenLogprob(id=token, spelling=self._spelling(token), logprob=told.logprob)
        for each, logprob in told.top:
            entry.top.add(id=each, spelling=self._spelling(each), logprob=logprob)
        return entry

    def restore(self, entry: inference.TokenLogprob, start: int, end: int) -> None:
        """A token of an earlier epoch that was not told there, as `held` had it."""
        self._held.append((start, end, entry))

    def held(self) -> list[inference.TokenLogprob]:
        """The tokens that were not sent yet."""
        return [entry for _, _, entry in self._held]

    def take(self, told: int) -> list[inference.TokenLogprob]:
        """Removes and returns the tokens to send with the first `told` characters of the answer."""
        taken = []
        while self._held and self._held[0][1] <= told:
            taken.append(self._held.popleft()[2])
        return taken

    def rest(self, told: int, *, stopped: bool) -> list[inference.TokenLogprob]:
        """The last ones: all, or at a stop string those that begin before it."""
        return [entry for start, _, entry in self._held if not stopped or start < told]
