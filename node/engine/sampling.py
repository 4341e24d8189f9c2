"""Samples one token for every row of a lane at once, each row by its own parameters.

Grammars come first (node.engine.grammar), then masked endings, bias and penalties (node.engine.penalties).
The filters are those of mlx_lm.sample_utils.make_sampler: on log-probabilities,
before the temperature, and in its order (top_p, min_p, top_k). Each only removes tokens, and none
renormalises for the next. A token is drawn by inverting the cumulative distribution, in the order of the
vocabulary, at one uniform number per row. The number depends on the row's seed and the token's position only,
so a seed gives the same text alone and in any batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from sealring.node.engine.grammar import Masks
from sealring.node.engine.logprobs import Asking, Reporter, asking_of
from sealring.node.engine.params import RowParameters
from sealring.node.engine.penalties import Endings, History, Penalties
from sealring.node.engine.ranks import Ranks, guesses, needs_guess

Words = npt.NDArray[np.uint64]

_NEVER = -float("inf")
_U64 = np.uint64
_GOLDEN = _U64(0x9E3779B97F4A7C15)
_AHEAD = 64
"""Tokens of each row for which random numbers are made at once."""


@dataclass(slots=True)
class _Run:
    """Tokens of rows that may not count. The first of a row always does, and only the history behind it is
    kept, because a history is as long as the vocabulary.

    `first`: their positions. `count`: tokens of each row. `sampled`: uint32 [rows with penalties, tokens] of
    each run.
    """

    first: Words
    count: int = 0
    behind: History | None = None
    sampled: list[mx.array] = field(default_factory=list)


class Sampler:
    """The parameters, positions and histories of a lane's rows, in the lane's order."""

    def __init__(self, rows: Sequence[RowParameters], positions: Sequence[int]) -> None:
        self._rows = list(rows)
        self._history = History.of_prompts([row for row in rows if row.adjusts])
        self._run: _Run | None = None
        self._restart(np.array(positions, dtype=_U64))

    @property
    def greedy(self) -> bool:
        """Whether all rows are greedy and none has penalties, so that sampling costs next to nothing."""
        return self._greedy

    def looks(self, vocabulary: int) -> bool:
        """Whether a call evaluates arrays, so that the step's input has to arrive first.

        A grammar needs the last token. `top_p` needs the logits, to see whether the few highest suffice.
        """
        return self._masks is not None or (self._guessing and guesses(vocabulary))

    @property
    def asking(self) -> Asking:
        """The rows that ask for log-probabilities."""
        return self._asking

    def extend(self, other: Sampler) -> None:
        """Appends the rows of `other`, which must not be used afterwards."""
        positions = np.concatenate([self._now(), other._now()])
        self._rows += other._rows
        self._history = self._history.extended(other._history)
        self._restart(positions)

    def filter(self, keep: Sequence[int]) -> None:
        """Keeps the rows with these indices, in this order."""
        positions = self._now()[list(keep)]
        self._history = self._history_of(keep)
        self._rows = [self._rows[index] for index in keep]
        self._restart(positions)

    def extract(self, index: int) -> Sampler:
        """A sampler of one row, which goes on from the row's position; this one is not changed."""
        one = Sampler([self._rows[index]], [int(self._now()[index])])
        one._history = self._history_of([index])
        return one

    def run(self, logits: mx.array) -> tuple[mx.array, mx.array | None, Asking]:
        """Samples each row's tokens behind a token and each of its drafts, as if all before were right.

        `logits`: [rows, tokens, vocabulary]. Returns the tokens, uint32 [rows * tokens], their
        log-probabilities' words (None if no row asks) and which tokens have them. Further runs go on behind
        all tokens of this one. `settle` has to be called before anything else is sampled.
        """
        count, first = logits.shape[1], self._now()
        if self._run is None:
            self._run = _Run(first)
        self._run.count += count
        each = [row for row in self._rows for _ in range(count)]
        if self._adjusting or self._masks is not None:  # penalties and grammars look at the tokens before
            chosen = []
            for place in range(count):
                chosen.append(self(logits[:, place]))
                if self._run.behind is None:
                    self._run.behind = dataclasses.replace(self._history)
            by_row = mx.stack(chosen, axis=1)
            if self._adjusting:
                self._run.sampled.append(by_row if self._partly is None else by_row[self._partly[0]])
            tokens = by_row.flatten()
        else:
            positions = (first[:, None] + np.arange(count, dtype=_U64)).flatten()
            tokens = Sampler(each, [int(at) for at in positions])(logits.flatten(0, 1))
            self._restart(first + _U64(count))
        asking = asking_of([row.logprobs for row in each])
        return tokens, Reporter(asking)(logits.flatten(0, 1), tokens) if asking else None, asking

    def settle(self, tokens: Sequence[int]) -> None:
        """Goes on behind the first `tokens` tokens of each row's runs."""
        assert self._run is not None
        run, self._run = self._run, None
        for row, kept_of_row in zip(self._rows, tokens, strict=True):
            if row.matcher is not None:
                row.matcher.take_back(run.count - kept_of_row)
        self.go_on_behind(run, tokens)

    def ahead(self, tokens: Sequence[int]) -> Sampler:
        """A sampler of the same rows that goes on behind the first `tokens` tokens of each row's runs, if
        there are runs; this one is not changed. It knows nothing of grammars."""
        rows = [dataclasses.replace(row, matcher=None) for row in self._rows]
        one = Sampler(rows, [int(at) for at in self._now()])
        one._history = self._history_of(range(len(rows)))
        if self._run is not None:
            one.go_on_behind(self._run, tokens)
        return one

    def go_on_behind(self, run: _Run, tokens: Sequence[int]) -> None:
        """Goes on behind the first `tokens` tokens of each row in `run`."""
        if run.behind is not None and self._adjusting:
            self._history = dataclasses.replace(run.behind)
            kept = [tokens[index] - 1 for index in self._adjusting]
            self._history.add_all(mx.concatenate(run.sampled, axis=1)[:, 1:], kept)
        self._restart(run.first + np.array(tokens, dtype=_U64))

    def _history_of(self, keep: Sequence[int]) -> History:
        """The histories of the rows with these indices; rows without penalties have none."""
        places = {index: place for place, index in enumerate(self._adjusting)}
        adjusting = [index for index in keep if index in places]
        return self._history.kept([places[index] for index in adjusting], [self._rows[i] for i in adjusting])

    def _now(self) -> Words:
        return self._positions + _U64(self._taken)

    def _restart(self, positions: Words) -> None:
        self._positions = positions
        self._taken = 0
        self._adjusting = [index for index, row in enumerate(self._rows) if row.adjusts]
        self._greedy = not self._adjusting and all(row.greedy for row in self._rows)
        self._guessing = any(needs_guess(row) for row in self._rows)
        self._asking = asking_of(row.logprobs for row in self._rows)
        matchers = [(index, row.matcher) for index, row in enumerate(self._rows) if row.matcher is not None]
        self._endings = Endings(self._rows, [int(at) for at in positions])
        self._masks = Masks(matchers, len(self._rows)) if matchers else None
        self._ready = False

    def _prepare(self, vocabulary: int) -> None:
        """Puts the rows' parameters on the device; once for all changes of rows between two tokens."""
        rows = self._rows
        self._ready = True
        self._reporter = Reporter(self._asking) if self._asking else None
        if self._greedy:
            return
        self._penalties: Penalties | None = None
        if self._adjusting:
            self._penalties = Penalties([rows[index] for index in self._adjusting], vocabulary)
        self._partly: tuple[mx.array, mx.array, mx.array] | None = None
        if 0 < len(self._adjusting) < len(rows):
            places = np.zeros(len(rows), np.uint32)
            places[self._adjusting] = np.arange(len(self._adjusting))
            adjusted = mx.array([[row.adjusts] for row in rows])
            self._partly = mx.array(self._adjusting, mx.uint32), mx.array(places), adjusted
        self._is_greedy: mx.array | None = None
        if any(row.greedy for row in rows):
            self._is_greedy = mx.array([row.greedy for row in rows])
        filtered = [row for row in rows if not row.greedy]
        self._draws = bool(filtered)
        self._scale = _column([1.0 if row.greedy else 1.0 / row.temperature for row in rows])
        self._seeds = _mix(np.array([row.seed for row in rows], dtype=_U64))
        self._min_p: mx.array | None = None
        if any(row.min_p > 0 for row in filtered):
            with np.errstate(divide="ignore"):
                self._min_p = _column(np.log([row.min_p for row in rows]))
        sorting = [i for i, row in enumerate(rows) if not row.greedy and (row.top_p < 1 or row.top_k)]
        self._ranks = Ranks([rows[index] for index in sorting], vocabulary) if sorting else None
        self._sorting = mx.array(sorting, mx.uint32) if len(sorting) < len(rows) else None

    def __call__(self, logits: mx.array) -> mx.array:
        """Logits [rows, vocabulary] to tokens uint32 [rows], lazily; every row's position advances."""
        if not self._ready:
            self._prepare(logits.shape[-1])
        if self._endings:
            logits = self._endings(logits, self._taken)
        self._taken += 1
        if self._masks is None:
            return self._sample(logits)
        tokens = self._sample(self._masks(logits))
        self._masks.sampled(tokens)
        return tokens

    def _sample(self, logits: mx.array) -> mx.array:
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self._greedy:
            return mx.argmax(logprobs, axis=-1)
        tokens = self._choose(self._adjust(logits, logprobs.astype(mx.float32)))
        if self._adjusting:
            self._history.add(tokens if self._partly is None else tokens[self._partly[0]])
        return tokens

    def report(self, logits: mx.array, tokens: mx.array) -> mx.array | None:
        """The words of log-probabilities of the last call's tokens, uint32, lazily; None if no row asks."""
        return None if self._reporter is None else self._reporter(logits, tokens)

    def _adjust(self, logits: mx.array, logprobs: mx.array) -> mx.array:
        """Log-probabilities after bias and penalties; those of rows without stay as they are, to the bit."""
        if self._penalties is None:
            return logprobs
        if self._partly is not None:
            indices, places, adjusts = self._partly
            logits = logits[indices]
        adjusted = self._penalties(logits, self._history)
        adjusted = adjusted - mx.logsumexp(adjusted, axis=-1, keepdims=True)
        return adjusted if self._partly is None else mx.where(adjusts, adjusted[places], logprobs)

    def _choose(self, logprobs: mx.array) -> mx.array:
        if not self._draws:
            return mx.argmax(logprobs, axis=-1)
        drawn = self._draw(logprobs)
        if self._is_greedy is None:
            return drawn
        return mx.where(self._is_greedy, mx.argmax(logprobs, axis=-1), drawn)

    def _draw(self, logprobs: mx.array) -> mx.array:
        kept = self.kept(logprobs)
        scaled = (logprobs if kept is None else mx.where(kept, logprobs, _NEVER)) * self._scale
        mass = mx.cumsum(mx.exp(scaled - mx.max(scaled, axis=-1, keepdims=True)), axis=-1)
        total = mass[:, -1:]
        reached = (mass > total * self._uniform()) | (mass >= total)
        return mx.argmax(reached, axis=-1)

    def kept(self, logprobs: mx.array) -> mx.array | None:
        """Mask of the tokens that the filters keep, bool [rows, vocabulary]; None if they keep all."""
        if not self._ready:
            self._prepare(logprobs.shape[-1])
        kept = None
        if self._min_p is not None:
            kept = logprobs >= mx.max(logprobs, axis=-1, keepdims=True) + self._min_p
        if self._ranks is not None:
            some = logprobs if self._sorting is None else logprobs[self._sorting]
            floor, room = self._ranks(some)
            if self._sorting is not None:
                floor = self._spread(floor, self._sorting, _NEVER)
                room = None if room is None else self._spread(room, self._sorting, logprobs.shape[-1])
            high = logprobs >= floor
            if room is not None:
                equal = mx.cumsum((logprobs == floor).astype(mx.int32), axis=-1)
                high = high & ((logprobs > floor) | (equal <= room))
            kept = high if kept is None else kept & high
        return kept

    def _spread(self, column: mx.array, rows: mx.array, blank: float) -> mx.array:
        """A column of some rows as one of all rows."""
        whole = mx.full((len(self._rows), 1), blank, column.dtype)
        return mx.put_along_axis(whole, rows[:, None], column, axis=0)

    def _uniform(self) -> mx.array:
        """One number in [0, 1) per row, by SplitMix64 over seed and position (Steele et al., OOPSLA 2014)."""
        index = (self._taken - 1) % _AHEAD
        if index == 0:
            positions = self._now() + np.arange(_AHEAD, dtype=_U64)[:, None]
            bits = _mix(self._seeds + positions * _GOLDEN) >> _U64(40)
            self._uniforms = mx.array((bits.astype(np.float32) * np.float32(2**-24))[:, :, None])
        return self._uniforms[index]


def _column(values: npt.ArrayLike) -> mx.array:
    return mx.array(np.array(values, dtype=np.float32)[:, None])


def _mix(bits: Words) -> Words:
    """SplitMix64's finalizer."""
    bits = (bits ^ (bits >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> _U64(27))) * _U64(0x94D049BB133111EB)
    return bits ^ (bits >> _U64(31))
