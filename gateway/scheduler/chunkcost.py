"""What a prefill step of a number of tokens costs a stage, as measured.

A step has a fixed part (its launch, its records, reading the weights) and a part for each token. Both are
fitted to the medians of what steps of several sizes took, newer ones counting for more; where steps of about
a size have been seen, their own median corrects the line there. Before anything was seen a step as such is
taken to cost as much as `GUESS` tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from statistics import median

GUESS = 16.0
"""Tokens that cost as much as a step as such, where nothing tells."""

_SAMPLES = 9
_FORGET = 0.99
_FAINTEST = 0.05
_TRUST = 1e-3  # of the guess beside what was seen
_ENOUGH = 3  # samples of a size count fully
_TINY = 1e-9


class _Seen:
    """Steps of about one size: their tokens, what they took, and when the last one was seen."""

    def __init__(self) -> None:
        self.tokens: deque[float] = deque(maxlen=_SAMPLES)
        self.seconds: deque[float] = deque(maxlen=_SAMPLES)
        self.count = 0
        self.at = (0.0, 0.0)

    def add(self, tokens: float, seconds: float, count: int) -> None:
        self.tokens.append(tokens)
        self.seconds.append(seconds)
        self.count = count
        self.at = median(self.tokens), max(_TINY, median(self.seconds))


class ChunkCost:
    """Seconds of one stage; `tokens` are those of a whole step."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._count = 0
        self._line: tuple[float, float] | None = None

    @property
    def known(self) -> bool:
        return bool(self._seen)

    @property
    def _largest(self) -> int:
        return max(self._seen, default=-1)

    @property
    def ratio(self) -> float:
        """Tokens that cost as much as a step as such."""
        fixed, each = self.line()
        return fixed / max(each, _TINY)

    def add(self, tokens: float, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._count += 1
        self._seen.setdefault(_size(tokens), _Seen()).add(tokens, seconds, self._count)
        self._line = None

    def seconds(self, tokens: float) -> float:
        """What a step of so many is believed to take; more than were ever seen take as much more."""
        fixed, each = self.line()
        believed = (fixed + each * tokens) * self._correction(_size(tokens))
        if _size(tokens) <= self._largest or not self._seen:
            return believed
        seen, seconds = self._seen[self._largest].at
        return max(believed, seconds * tokens / seen)

    def within(self, seconds: float, most: int) -> int:
        """The most tokens that a step may have to take no longer than that; 0 when it is too little."""
        fixed, each = self.line()
        for size in range(_size(most), -1, -1):
            least, greatest = (1 << size) // 2 + 1, min(1 << size, most)
            if self.seconds(greatest) <= seconds:
                return greatest
            if self.seconds(least) <= seconds:
                found = int((seconds / self._correction(size) - fixed) / max(each, _TINY))
                if size > self._largest and self._seen:
                    seen, took = self._seen[self._largest].at
                    found = min(found, int(seen * seconds / took))
                return max(least, min(found, greatest))
        return 0

    def line(self) -> tuple[float, float]:
        """Seconds of a step as such, and of each of its tokens."""
        if self._line is None:
            self._line = self._fitted()
        return self._line

    def _fitted(self) -> tuple[float, float]:
        """Least squares of relative errors, with a faint pull to the guess where sizes are too alike."""
        points = list(self._points())
        if not points:
            return GUESS * _TINY, _TINY
        pull = _TRUST * max(weight for _, _, weight in points)
        one = sum(weight for _, _, weight in points) + pull
        by = sum(weight * tokens for tokens, _, weight in points) - pull * GUESS
        square = sum(weight * tokens * tokens for tokens, _, weight in points) + pull * GUESS**2
        first = sum(weight * seconds for _, seconds, weight in points)
        second = sum(weight * seconds * tokens for tokens, seconds, weight in points)
        scale = one * square - by * by  # above 0, because the guess is of no size that was seen
        fixed, each = (square * first - by * second) / scale, (one * second - by * first) / scale
        if fixed < 0:
            return 0.0, second / square
        if each < 0:
            return first / one, 0.0
        return fixed, each

    def _points(self) -> Iterator[tuple[float, float, float]]:
        for seen in self._seen.values():
            tokens, seconds = seen.at
            fresh = max(_FAINTEST, _FORGET ** (self._count - seen.count))
            yield tokens, seconds, min(_ENOUGH, len(seen.seconds)) * fresh / seconds**2

    def _correction(self, size: int) -> float:
        """What steps of about this size take against the line, believed less the longer ago it was seen."""
        seen = self._seen.get(size)
        if seen is None:
            return 1.0
        fixed, each = self.line()
        tokens, seconds = seen.at
        off = seconds / max(_TINY, fixed + each * tokens)
        return float(max(0.1, min(off, 10.0)) ** (_FORGET ** (self._count - seen.count)))


def _size(tokens: float) -> int:
    """The power of two that holds so many tokens."""
    return max(0, (int(-(-tokens // 1)) - 1).bit_length())


class LonePrefill:
    """Tells a ChunkCost what prefill steps took on a ring that did nothing else.

    Steps that have been announced before another one is round follow it through the full pipeline, so from
    one that brings a token to the next it takes as long as the steps in between do in a stage. The head says
    of a step without a token that it has gone on; the tail is behind by what the pipeline holds.
    """

    def __init__(self, cost: ChunkCost, stages: int) -> None:
        self._cost = cost
        self._stages = stages
        self._steps: deque[tuple[int, int]] = deque()
        self._since: tuple[float, bool] | None = None
        self._between: list[int] = []
        self._broken = False

    def announced(self, number: int, tokens: int) -> None:
        """A step of so many tokens, while no lane runs."""
        if self._broken:  # something else is in between
            self._forget()
        self._steps.append((number, tokens))

    def broken(self) -> None:
        """Something else is announced. Steps from before still tell, for it comes behind them."""
        self._broken = bool(self._steps)
        if not self._steps:
            self._forget()

    def done(self, number: int, sampled: bool, now: float) -> None:
        passed = False
        while self._steps and self._steps[0][0] <= number:
            self._between.append(self._steps.popleft()[1])
            passed = True
        if sampled and self._since is not None and self._between:
            self._tell(now - self._since[0], self._since[1])
        if sampled or (self._since is None and passed):
            # with nothing behind it, what comes next was not waiting for it
            self._since = (now, sampled) if passed and self._steps else None
            self._between.clear()

    def _forget(self) -> None:
        self._steps.clear()
        self._between.clear()
        self._since, self._broken = None, False

    def _tell(self, seconds: float, full: bool) -> None:
        fill = 0 if full else self._stages - 1
        steps = len(self._between) + fill
        tokens = sum(self._between) + fill * max(self._between)
        if seconds > 0:
            self._cost.add(tokens / steps, seconds / steps)
