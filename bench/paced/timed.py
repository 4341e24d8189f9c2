"""The times of a real stage's steps, as a table to pace another by: the instrument's check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Points = tuple[tuple[int, float], ...]
"""Sizes, rising, with mean seconds."""

Sums = Sequence[float]
"""Sums over steps of one size: their number, seconds, seconds of the launch, looks back (`_looks`), squares
of those, and their products with the seconds."""

Plain = Mapping[str, Sequence[Sums]]
"""Fit for JSON. `loading`: rows, tokens, context, and least seconds of steps that were timed at load.
`serving`: rows, tokens, and `Sums` of the steps after that, in seconds of a processor."""

_ALIKE = 1.2
"""Ratio of sizes that count as one: a few steps of a size are no mean."""


@dataclass
class StepTimes:
    """Measured steps of a stage: at load the least by rows, tokens and context, later sums by rows and
    tokens."""

    loading: dict[tuple[int, int, int], float] = field(default_factory=dict)
    serving: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def load(self, rows: int, tokens: int, context: int, seconds: float) -> None:
        """Notes a step that was timed at load."""
        size = rows, tokens, context
        self.loading[size] = min(seconds, self.loading.get(size, seconds))

    def add(self, rows: int, tokens: int, context: int, seconds: float, held: float) -> None:
        """Adds a step behind `context` tokens. `held`: seconds for which the launch kept its thread."""
        back = _looks(rows, tokens, context)
        sums = self.serving.setdefault((rows, tokens), [0.0] * 6)
        for place, part in enumerate((1.0, seconds, held, back, back * back, back * seconds)):
            sums[place] += part

    def plain(self) -> Plain:
        """All of it."""
        return {
            "loading": [(*size, seconds) for size, seconds in sorted(self.loading.items())],
            "serving": [(*size, *sums) for size, sums in sorted(self.serving.items())],
        }


def _looks(rows: int, tokens: int, context: int) -> float:
    """Pairs of a token and one before it, which attention computes."""
    return float(rows * tokens * context)


@dataclass
class StepTable:
    """Seconds of decode steps by rows, and of chunks by tokens, without what they look back at.

    Between what was measured there are lines. `look` are seconds of a pair of tokens. `held` is the part of a
    step for which its launch keeps the launching thread. Until `serves`, steps take what they took at load.
    """

    decode: Points
    chunks: Points
    look: float = 0.0
    held: float = 0.0
    loading: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    serves: bool = False

    @classmethod
    def of(cls, plain: Plain) -> StepTable:
        """Sizes that were not served take what they took at load. Raises ValueError without a decode step."""
        loading = {
            (int(rows), int(tokens), int(behind)): took for rows, tokens, behind, took in plain["loading"]
        }
        found = [(int(rows), int(tokens), sums) for rows, tokens, *sums in plain["serving"]]
        look = _slope([sums for _, _, sums in found])
        more = [
            (rows, tokens, (1.0, took, 0.0, _looks(rows, tokens, behind)))
            for (rows, tokens, behind), took in loading.items()
        ]
        rows = _points([(rows, sums) for rows, tokens, sums in found if tokens == 1], look)
        chunks = _points([(tokens, sums) for rows, tokens, sums in found if rows == 1], look)
        rows = _beyond(rows, [(rows, sums) for rows, tokens, sums in more if tokens == 1], look)
        chunks = _beyond(chunks, [(tokens, sums) for rows, tokens, sums in more if rows == 1], look)
        if not rows:
            raise ValueError("no decode step was measured")
        seconds, held = (sum(sums[place] for _, _, sums in found) for place in (1, 2))
        return cls(rows, chunks, look, held / seconds if seconds else 0.0, loading)

    def step(self, rows: int, tokens: int, context: int) -> float:
        """Seconds of a step."""
        if not self.serves and (rows, tokens, context) in self.loading:
            return self.loading[rows, tokens, context]
        alone = _at(self.decode, rows) if tokens == 1 else _at(self.chunks or self.decode, tokens)
        return alone + self.look * _looks(rows, tokens, context)


def _slope(sums: Sequence[Sums]) -> float:
    """Seconds of a look back: the line through the steps of each size, one slope for all."""
    products = sum(both - back * seconds / count for count, seconds, _, back, _, both in sums)
    squares = sum(square - back * back / count for count, _, _, back, square, _ in sums)
    return max(0.0, products / squares) if squares > 0 else 0.0


def _points(sums: Sequence[tuple[int, Sums]], look: float) -> Points:
    """Mean sizes and seconds of sizes that are about alike."""
    groups: list[list[tuple[int, float, float]]] = []
    for size, (count, seconds, _, back, *_) in sorted(sums):
        if not groups or size >= _ALIKE * groups[-1][0][0]:
            groups.append([])
        groups[-1].append((size, count, seconds - look * back))
    found = []
    for group in groups:
        count = sum(steps for _, steps, _ in group)
        size = round(sum(size * steps for size, steps, _ in group) / count)
        found.append((size, max(0.0, sum(seconds for *_, seconds in group) / count)))
    return tuple(found)


def _beyond(points: Points, more: Sequence[tuple[int, Sums]], look: float) -> Points:
    """The points, and those larger than all of them that were timed at load only."""
    largest = max((size for size, _ in points), default=0)
    return (*points, *((size, took) for size, took in _points(more, look) if size > _ALIKE * largest))


def _at(points: Points, size: int) -> float:
    """The value at `size`, on the line between its neighbours; beyond the last point, in proportion to
    that."""
    low, least = points[0]
    if size <= low:
        return least
    for high, most in points[1:]:
        if size <= high:
            return least + (most - least) * (size - low) / (high - low)
        low, least = high, most
    return least * size / low
