"""Guesses an answer's next tokens by the text of prompt and answer."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sealring.node.engine.drafts.tally import WORD, Tally, spelt

_LENGTHS = (3, 2, 1)
"""Numbers of last tokens that are looked up, the most first, as vLLM's prompt_lookup_max and _min; a single
one counts only if it has been right."""

_AT_ONCE = 256
"""Tokens of an answer that are looked up at once if no draft was needed for long: some milliseconds."""

_EXPECTED = 4.0, 5.0
"""Right guesses, and all, that an answer with a prediction begins with. Policy: most of it is meant to come.
A dozen wrong guesses outweigh that."""

_BITS = 21
"""Bits of a token's id in a key. No vocabulary is larger; in one, some guesses would be wrong."""


class _Places:
    """Places where each `length` tokens end, in tokens.

    The prompt's are sorted once, in 16 bytes a token and without holding the interpreter for long. Of the
    answer's, the newest are added token by token.
    """

    def __init__(self, tokens: npt.NDArray[np.uint32], length: int, near: int = -1) -> None:
        self._length = length
        self._mask = (1 << _BITS * length) - 1
        self._last = 0
        self._end = len(tokens)
        for token in tokens[-length:].tolist():
            self._last = self._key(token)
        keys = np.zeros(max(0, len(tokens) - length), np.int64)  # no token follows the last ones
        for place in range(length):
            keys = (keys << _BITS) + (tokens[place : place + len(keys)] & ((1 << _BITS) - 1))
        order = np.argsort(keys, kind="stable")
        self._keys, self._order = keys[order], order
        self._newer: dict[int, int] = {}
        self.before = self._find(self._last, near)
        self._note()

    def add(self, token: int, near: int) -> None:
        """Adds the next token. `before` is then the place where the same last tokens ended before, or -1.

        Of several places it is the one next to `near`, or the newest if `near` is -1.
        """
        self._last = self._key(token)
        self._end += 1
        self.before = self._find(self._last, near)
        self._note()

    def copy(self) -> _Places:
        """A copy for another answer to the same prompt; it shares the sorted part."""
        made = copy.copy(self)
        made._newer = dict(self._newer)
        return made

    def _key(self, token: int) -> int:
        return (self._last << _BITS | token & ((1 << _BITS) - 1)) & self._mask

    def _find(self, key: int, near: int) -> int:
        if self._end < self._length:
            return -1
        newer = self._newer.get(key, -1)
        if newer >= 0 and near < 0:
            return newer
        first, end = (int(self._keys.searchsorted(key, side)) for side in ("left", "right"))
        if first == end:
            return newer
        if near < 0:
            return int(self._order[end - 1]) + self._length
        after = first + int(self._order[first:end].searchsorted(near - self._length))
        found = [
            int(each) + self._length for each in self._order[max(first, after - 1) : min(end, after + 1)]
        ]
        return min(
            [newer, *reversed(found)] if newer >= 0 else reversed(found), key=lambda at: abs(at - near)
        )

    def _note(self) -> None:
        if self._end >= self._length:
            self._newer[self._last] = self._end


class Lookup:
    """Guesses an answer's next tokens by the tokens that followed the same ones before, in prompt or answer.

    An edit changes words of a text and keeps its order. So of several places the one counts that is nearest
    to the place that an unchanged repetition would have reached. Tokens that are new may go on from that
    place, or as after the last token alone. The way that has been right more often in this answer is taken.

    The answer may repeat a client's prediction from its beginning on. So that is looked up as if it stood
    before the prompt, behind the prompt's last tokens.
    """

    def __init__(self, tokens: npt.NDArray[np.uint32], predicted: Sequence[int] = ()) -> None:
        """`tokens`: the prompt, uint32. `predicted`: tokens that the client expects of the answer."""
        self._near = -1
        self._tallies = [Tally(), Tally(), Tally()]
        if len(predicted):
            begin = tokens[-_LENGTHS[0] :]
            tokens = np.concatenate([begin, np.array(predicted, np.uint32), tokens])
            self._near = len(begin)
            self._tallies[:2] = [Tally(*_EXPECTED), Tally(*_EXPECTED)]
        self._said = bytearray(tokens.tobytes())
        self._places = [_Places(tokens, length, self._near) for length in _LENGTHS]
        self._unheard: deque[int] = deque()

    def heard(self, token: int) -> None:
        self._unheard.append(token)  # looked up when drafts are needed, which most rows never do

    def copy(self) -> Lookup:
        made = copy.copy(self)
        made._said = bytearray(self._said)
        made._places = [places.copy() for places in self._places]
        made._tallies = [copy.copy(tally) for tally in self._tallies]
        made._unheard = self._unheard.copy()
        return made

    def drafts(self, last: int, count: int) -> list[int]:
        """The `count` tokens that followed the same ones before, or else `count` times the `last` one."""
        self._hear(len(self._unheard))
        said = self._said
        _, start = self._guess() if said[-WORD:] == spelt(last) else (0.0, -1)
        if start < 0:
            return [last] * count
        follows = said[start * WORD : (start + count) * WORD]
        while len(follows) < count * WORD:  # the answer may repeat its end
            follows += follows[: count * WORD - len(follows)]
        return list(memoryview(follows).cast("I"))

    def right(self) -> float:
        """0 also while more of the answer has to be looked up first."""
        self._hear(_AT_ONCE)
        return 0.0 if self._unheard else self._guess()[0]

    def _hear(self, most: int) -> None:
        for _ in range(min(most, len(self._unheard))):
            token = self._unheard.popleft()
            written, near = spelt(token), self._near
            for tally, place in reversed(self._ways()):
                same = self._said[place * WORD : (place + 1) * WORD] == written
                self._tallies[tally].add(same)
                if same or not tally:
                    near = place  # also if another token followed there: it takes that one's place
            self._near = near + 1 if near >= 0 else -1
            for places in self._places:
                places.add(token, self._near)
            self._said += written

    def _guess(self) -> tuple[float, int]:
        """The rate and the place of the likeliest guess; 0 and -1 if there is no guess."""
        return max(((self._tallies[tally].rate, place) for tally, place in self._ways()), default=(0.0, -1))

    def _ways(self) -> list[tuple[int, int]]:
        """Tallies, and the places, in tokens, from which the answer may go on."""
        *known, single = (places.before for places in self._places)
        for place in known:
            if place >= 0:
                return [(0, place)]
        near = self._near if self._near * WORD < len(self._said) else -1
        return [(tally, place) for tally, place in ((1, near), (2, single)) if place >= 0]
