"""Drafts at the head: the tokens that it guesses, and which of them were right.

A step with drafts computes a row's last token and the head's drafts behind it, and the tail samples a token
behind each. A sampled token counts as long as all drafts before it equal the tokens sampled in their places.
Further steps compute the next drafts, before the head knows whether the earlier ones were right.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.composition import ResolvedStep, Settling
from sealring.node.wire.timelog import TimeLog, now
from sealring.v1 import control_pb2 as control

_LENGTHS = (3, 2, 1)
"""Numbers of last tokens that are looked up, the most first, as vLLM's prompt_lookup_max and _min; a single
one counts only if it has been right."""

_KEPT = 0.93
"""Weight of a guess after each later one."""

CAUGHT_UP = 16
"""Tokens that a draft model computes along with a guess: as many as one run can bring."""

_UNTRIED = 2.0
"""A tally's weight before anything was tried."""

_AT_ONCE = 256
"""Tokens of an answer that are looked up at once if no draft was needed for long: some milliseconds."""

_EXPECTED = 4.0, 5.0
"""Right guesses, and all, that an answer with a prediction begins with. Policy: most of it is meant to come.
A dozen wrong guesses outweigh that."""

_WORD = 4
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


@dataclass(slots=True)
class _Tally:
    """How many of the last guesses of one kind were right, or would have been."""

    right: float = 0.5
    tried: float = _UNTRIED

    def add(self, right: bool) -> None:
        self.right, self.tried = _KEPT * self.right + right, _KEPT * self.tried + 1

    @property
    def rate(self) -> float:
        return self.right / self.tried


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
        self._tallies = [_Tally(), _Tally(), _Tally()]
        if len(predicted):
            begin = tokens[-_LENGTHS[0] :]
            tokens = np.concatenate([begin, np.array(predicted, np.uint32), tokens])
            self._near = len(begin)
            self._tallies[:2] = [_Tally(*_EXPECTED), _Tally(*_EXPECTED)]
        self._said = bytearray(tokens.tobytes())
        self._places = [_Places(tokens, length, self._near) for length in _LENGTHS]
        self._unheard: deque[int] = deque()

    def add(self, token: int) -> None:
        """Adds the answer's next token."""
        self._unheard.append(token)  # looked up when drafts are needed, which most rows never do

    def copy(self) -> Lookup:
        """A copy for another answer to the same prompt, before its first token."""
        made = copy.copy(self)
        made._said = bytearray(self._said)
        made._places = [places.copy() for places in self._places]
        made._tallies = [copy.copy(tally) for tally in self._tallies]
        made._unheard = self._unheard.copy()
        return made

    def drafts(self, last: int, count: int) -> list[int]:
        """`count` drafts of the tokens behind the answer's `last` one.

        They are the tokens that followed the same ones before, or else `count` times the last one.
        """
        self._hear(len(self._unheard))
        said = self._said
        _, start = self._guess() if said[-_WORD:] == _spelt(last) else (0.0, -1)
        if start < 0:
            return [last] * count
        follows = said[start * _WORD : (start + count) * _WORD]
        while len(follows) < count * _WORD:  # the answer may repeat its end
            follows += follows[: count * _WORD - len(follows)]
        return list(memoryview(follows).cast("I"))

    def likely(self) -> float:
        """The probability that a draft of the next token is right, by the last such drafts.

        0 if there is no draft, or more of the answer has to be looked up first.
        """
        self._hear(_AT_ONCE)
        return 0.0 if self._unheard else self._guess()[0]

    def _hear(self, most: int) -> None:
        for _ in range(min(most, len(self._unheard))):
            token = self._unheard.popleft()
            spelt, near = _spelt(token), self._near
            for tally, place in reversed(self._ways()):
                right = self._said[place * _WORD : (place + 1) * _WORD] == spelt
                self._tallies[tally].add(right)
                if right or not tally:
                    near = place  # also if another token followed there: it takes that one's place
            self._near = near + 1 if near >= 0 else -1
            for places in self._places:
                places.add(token, self._near)
            self._said += spelt

    def _guess(self) -> tuple[float, int]:
        """The rate and the place of the likeliest guess; 0 and -1 if there is no guess."""
        return max(((self._tallies[tally].rate, place) for tally, place in self._ways()), default=(0.0, -1))

    def _ways(self) -> list[tuple[int, int]]:
        """Tallies, and the places, in tokens, from which the answer may go on."""
        *known, single = (places.before for places in self._places)
        for place in known:
            if place >= 0:
                return [(0, place)]
        near = self._near if self._near * _WORD < len(self._said) else -1
        return [(tally, place) for tally, place in ((1, near), (2, single)) if place >= 0]


def _spelt(token: int) -> bytes:
    return token.to_bytes(_WORD, sys.byteorder)


class Feed(NamedTuple):
    """Tokens of a row that a draft model is to compute next, behind the first `start` ones."""

    start: int
    tokens: npt.NDArray[np.uint32]
    refuted: int  # guesses of the row that were wrong until then

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Guesses:
    """What a draft model guesses of one row: the row's tokens, and guesses behind them.

    `add` and `likely` are called by the thread that receives tokens, the rest by the compute loop, which runs
    the model. A guess may come late, when its token is there already: then it only counts as right or wrong.
    """

    def __init__(
        self,
        prompt: npt.NDArray[np.uint32],
        scope: bytes = b"",
        source: control.DraftSource.ValueType = control.DRAFT_SOURCE_MODEL,
    ) -> None:
        """`prompt`: uint32. Later rows of the same `scope` may use what the model has computed of it; if that
        is empty, none may. `source`: what guesses."""
        self.scope, self.source = scope, source
        self.held = 0
        """Tokens of the row, from its first, that the model has computed."""
        self._text = bytearray(prompt.tobytes())
        self._ahead: list[int] = []
        self._offered: tuple[int, list[int]] | None = None
        self._refuted = 0
        self._sent = 0  # tokens, from the row's first, that steps compute or have computed
        self._run = 1  # tokens of the last step
        self._probe = 0  # tokens of the row from which on a guess is made though no run has it
        self._pause = 1  # tokens to the next such guess
        self._tally = _Tally()
        self._lock = threading.Lock()

    def copy(self) -> Guesses:
        """Guesses of another answer to the same prompt, before its first token."""
        return Guesses(self.text, self.scope, self.source)

    @property
    def text(self) -> npt.NDArray[np.uint32]:
        """The row's tokens, uint32."""
        with self._lock:
            return np.frombuffer(bytes(self._text), np.uint32)

    @property
    def known(self) -> int:
        """The number of the row's tokens."""
        return len(self._text) // _WORD

    @property
    def whole(self) -> int:
        """The number of the row's tokens, and of guesses behind them."""
        return self.known + len(self._ahead)

    @property
    def wanting(self) -> bool:
        """Whether to guess another token: there are to be as many as the last run had behind what steps
        compute, so that the next run finds its drafts there. While there are no runs there is to be one now
        and then, so that it is known how often guesses are right. It is more rare after each: right ones do
        not pay either, or there would be runs."""
        if self._run == 1 and self.known < self._probe:
            return False
        return self.known + len(self._ahead) < max(self.known, self._sent) + self._run

    def add(self, token: int) -> None:
        """Adds the answer's next token."""
        with self._lock:
            if self._ahead:
                right = self._ahead.pop(0) == token
                self._count(right)
                if not right:
                    self._ahead.clear()
                    self._refuted += 1
                    self._sent = 0
                    self.held = min(self.held, self.known)
            self._text += _spelt(token)
            if self._offered is not None and self._offered[0] == self.known:
                self.held, self._ahead, self._offered = self.known, self._offered[1], None

    def offer(self, first: int, guesses: list[int]) -> None:
        """Takes guesses that come with the row's next tokens, for the place `first` tokens behind the
        last."""
        with self._lock:
            self._offered = self.known + first, guesses

    def _count(self, right: bool) -> None:
        self._tally.add(right)
        self._pause = 1 if right and self._run > 1 else min(2 * self._pause, CAUGHT_UP)
        self._probe = self.known + self._pause

    def likely(self) -> float:
        """The probability that the next guess is right, by the last ones; 0 if there were none, and while the
        model is further behind."""
        tried = self._tally.tried > _UNTRIED and self.known - self.held <= CAUGHT_UP
        return self._tally.rate if tried else 0.0

    def begin(self, held: int) -> None:
        """The model has computed the first `held` tokens of the row, and nothing else."""
        with self._lock:
            self.held = held

    def feed(self, most: int, first: int | None = None) -> Feed:
        """At most `most` tokens that the model is to compute next. They count as computed. They begin where
        it has computed nothing, or at place `first` if that comes before. There are none, and none count, if
        the model has computed fewer than `first`: a guess was found wrong, and its cache has to be cut."""
        with self._lock:
            whole = self.whole
            if first is not None and self.held < first:
                return Feed(self.held, np.zeros(0, np.uint32), self._refuted)
            start = self.held if first is None else first
            end = min(whole, start + most)
            sure = np.frombuffer(bytes(self._text[start * _WORD : end * _WORD]), np.uint32)
            behind = self._ahead[max(0, start - self.known) : max(0, end - self.known)]
            self.held = end
            return Feed(start, np.concatenate([sure, np.array(behind, np.uint32)]), self._refuted)

    def guess(self, feed: Feed, token: int) -> None:
        """Takes the model's guess of the token behind those that it was fed."""
        with self._lock:
            if feed.refuted != self._refuted:
                return
            if feed.end < self.known:
                self._count(self._text[feed.end * _WORD : (feed.end + 1) * _WORD] == _spelt(token))
            elif feed.end == self.known + len(self._ahead):
                self._ahead.append(token)

    def step(self, drafts: int) -> None:
        """Notes a step of `drafts` guesses of the model."""
        self._run = 1 + drafts

    def send(self, end: int) -> None:
        """Notes that steps compute the row's tokens and guesses before place `end`."""
        with self._lock:
            self._sent = max(self._sent, end)

    def taken(self, first: int, count: int) -> list[int] | None:
        """The tokens from place `first` on, as far as they are known, and guesses. None if there are
        fewer."""
        with self._lock:
            sure = np.frombuffer(bytes(self._text[first * _WORD : (first + count) * _WORD]), np.uint32)
            begin = max(0, first - self.known)
            found = [*sure.tolist(), *self._ahead[begin : begin + count - len(sure)]]
        return found if len(found) == count else None


Take = Callable[[int, int], list[int]]
"""Drafts of a chain: the number of those before, and how many."""


@dataclass(slots=True)
class _Chain:
    """The drafts of one row from one settling to the next, and how many were accepted."""

    guessed: list[int]
    more: Take | None
    modelled: bool = False
    at: int = 0
    accepted: int = 0
    last: int = 0  # that was sampled
    broken: bool = False

    @property
    def refuted(self) -> bool:
        """Whether the draft is wrong that was guessed where the last sampled token is."""
        place = self.accepted - 1
        return 0 <= place < len(self.guessed) and self.guessed[place] != self.last


class Runs:
    """The runs of all rows of an epoch, and how many of their drafts were accepted.

    `came` is called by the receiving thread, the rest by the compute loop. No lock: a run is added before its
    step is launched, so before its tokens can arrive.
    """

    def __init__(self) -> None:
        self._chains: dict[int, _Chain] = {}
        self._runs: dict[int, list[tuple[_Chain, list[int]]]] = {}
        self.drafted = self.accepted = 0
        """Drafts of the runs that came back, and the accepted ones among them."""
        self._log = TimeLog(4)

    def begin(
        self, step: ResolvedStep, row: int, last: int, guessed: Sequence[int], more: Take | None = None
    ) -> list[int]:
        """The tokens to compute of a row: its last, and the first of the drafts `guessed`, and of what `more`
        gives if these are too few. To be called for a step's rows in order."""
        chain = self._chains[row] = _Chain(list(guessed), more, step.source != control.DRAFT_SOURCE_LOOKUP)
        return self._sent(step, chain, [last, *self._next(chain, step.drafts)])

    def go_on(self, step: ResolvedStep) -> list[int]:
        """The tokens to compute behind those of the run before."""
        chain = self._chains[step.rows[0]]
        return self._sent(step, chain, self._next(chain, 1 + step.drafts))

    @staticmethod
    def _next(chain: _Chain, count: int) -> list[int]:
        missing = chain.at + count - len(chain.guessed)
        if chain.more is not None and missing > 0:
            chain.guessed += chain.more(len(chain.guessed), missing)
        chain.at += count
        return chain.guessed[chain.at - count : chain.at]

    def at(self, row: int) -> int:
        """Drafts of the row's chain that steps compute, or have computed."""
        chain = self._chains.get(row)
        return 0 if chain is None else chain.at

    def broken(self, row: int) -> bool:
        """Whether a draft of the row's chain was wrong, so that no further run brings tokens."""
        chain = self._chains.get(row)
        return chain is None or chain.broken

    def _sent(self, step: ResolvedStep, chain: _Chain, run: list[int]) -> list[int]:
        self._runs.setdefault(step.number, []).append((chain, run))
        return run

    def came(self, step: ResolvedStep, sampled: Sequence[int]) -> list[int]:
        """The places of the sampled tokens that count: at least the first of each row, unless a draft of an
        earlier run was wrong."""
        places: list[int] = []
        for row, (chain, run) in enumerate(self._runs.pop(step.number)):
            begin = row * len(run)
            first = not (chain.accepted or chain.broken)
            count = self._counted(chain, run, sampled[begin : begin + len(run)])
            self._note(len(run) - first, count - first, modelled=chain.modelled)
            places += range(begin, begin + count)
        return places

    def since(self, moment: int) -> tuple[int, int, int]:
        """Drafts, the accepted ones, and those of a model, of the runs that came back since `moment`; any
        thread.

        `moment`: nanoseconds on the machine's monotonic clock.
        """
        recent = [entry for entry in self._log.entries()[0] if entry[0] >= moment]
        drafted, accepted, modelled = (sum(entry[place] for entry in recent) for place in (1, 2, 3))
        return drafted, accepted, modelled

    def _note(self, drafted: int, accepted: int, *, modelled: bool) -> None:
        self.drafted += drafted
        self.accepted += accepted
        self._log.add(now(), drafted, accepted, drafted * modelled)

    @staticmethod
    def _counted(chain: _Chain, run: Sequence[int], sampled: Sequence[int]) -> int:
        if chain.accepted and run[0] != chain.last:
            chain.broken = True  # the draft was taken when that token had come, so `refuted` did not see it
        if chain.broken:
            return 0
        count = 1
        while count < len(run) and run[count] == sampled[count - 1]:
            count += 1
        chain.accepted += count
        chain.last = sampled[count - 1]
        chain.broken = count < len(run) or chain.refuted
        return count

    def settle(self, change: Settling, *, ended: bool = False) -> None:
        """Ends a row's chain. An answer that has `ended` may have done so before the last token that counts.
        Raises InvalidInput (BAD_STEP) if the gateway counts other tokens."""
        chain = self._chains.pop(change.row, None)
        most = 0 if chain is None else chain.accepted
        if chain is None or (change.accepted != most and not (ended and change.accepted < most)):
            raise InvalidInput(
                f"not {change.accepted} tokens of row {change.row} were right",
                reason="BAD_STEP",
                hint="gateway and head disagree; the epoch must end",
            )
        chain.broken = True  # tokens that are still under way do not count

    def forget(self, row: int) -> None:
        self._chains.pop(row, None)
