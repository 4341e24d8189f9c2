"""Marks: the lengths at which a kept prefix can be cut though its caches cannot, because members have kept
their windows and states as they were there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

MOST = 16
"""Lengths of one prefix, its end among them. Each costs memory: the windows and states of all layers."""

NEWEST = 4
"""The longest are always among them, up to half: a conversation parts near its end most often, where a
message is edited or a template leaves out what was thought."""


class Marks:
    """The marks of rows and of kept prefixes, as the gateway and every member compute them alike.

    A mark that a row and prefixes share is there once. A prefix also has a mark at its end.
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, int]] = {}  # row -> length -> number of the mark
        self._prefixes: dict[int, dict[int, int]] = {}
        self._holders: Counter[int] = Counter()
        self._last = 0

    @property
    def count(self) -> int:
        """The marks that are there."""
        return len(self._holders)

    def rows(self) -> Collection[int]:
        """The rows that have marks."""
        return self._rows.keys()

    def of_row(self, row: int) -> Collection[int]:
        return self._rows.get(row, {}).keys()

    def of_prefix(self, prefix: int) -> Collection[int]:
        return self._prefixes.get(prefix, {}).keys()

    def alone(self, prefix: int) -> Collection[int]:
        """The lengths of the marks that nothing but this prefix has."""
        marks = self._prefixes.get(prefix, {}).items()
        return [length for length, mark in marks if self._holders[mark] == 1]

    def mark(self, row: int, tokens: int) -> None:
        """A row is marked at the length that it has."""
        self._set(self._rows, row, self._rows.get(row, {}) | {tokens: self._new()})

    def begin(self, row: int, prefix: int, tokens: int) -> None:
        """A row begins with the first tokens of a prefix."""
        marks = self._prefixes.get(prefix, {}).items()
        self._set(self._rows, row, {length: mark for length, mark in marks if length <= tokens})

    def keep(self, prefix: int, row: int, tokens: int, lengths: Iterable[int], *, whole: bool) -> None:
        """A row is kept as a prefix with these of its marks, which are then the row's, too. `whole`: as long
        as the row is, so that its end is a new mark unless it has one there."""
        has = self._rows.get(row, {})
        marks = {length: has[length] for length in lengths}
        marks[tokens] = has[tokens] if tokens in has else self._new()
        self._set(self._prefixes, prefix, marks)
        if whole:
            self._set(self._rows, row, marks)

    def add(self, prefix: int, lengths: Iterable[int]) -> None:
        """A prefix comes from elsewhere, with marks at these lengths."""
        self._set(self._prefixes, prefix, {length: self._new() for length in lengths})

    def forget_row(self, row: int) -> None:
        self._set(self._rows, row, {})

    def drop(self, prefix: int) -> None:
        self._set(self._prefixes, prefix, {})

    def unmark_row(self, row: int, lengths: Iterable[int]) -> None:
        """Raises KeyError for a mark that the row does not have."""
        self._set(self._rows, row, _without(self._rows.get(row, {}), lengths))

    def unmark(self, prefix: int, lengths: Iterable[int]) -> None:
        """Raises KeyError for a mark that the prefix does not have."""
        self._set(self._prefixes, prefix, _without(self._prefixes.get(prefix, {}), lengths))

    def _new(self) -> int:
        self._last += 1
        return self._last

    def _set(self, holders: dict[int, dict[int, int]], number: int, marks: dict[int, int]) -> None:
        before = holders.pop(number, {})
        self._holders.update(marks.values())
        if marks:
            holders[number] = marks
        for mark in before.values():
            self._holders[mark] -= 1
            if not self._holders[mark]:
                del self._holders[mark]


def _without(marks: Mapping[int, int], lengths: Iterable[int]) -> dict[int, int]:
    left = dict(marks)
    for length in lengths:
        del left[length]
    return left


def thinned(lengths: Iterable[int], most: int = MOST) -> list[int]:
    """At most `most` of these lengths, rising: the longest, and of the others those without which gaps would
    grow most."""
    left = sorted(lengths)
    newest = max(1, min(NEWEST, most // 2))
    while len(left) > most:
        begins = [0, *left]
        del left[min(range(len(left) - newest), key=lambda at: left[at + 1] - begins[at])]
    return left
