"""The prefixes that every member of a ring keeps: the tokens and marks of each, and the marks of rows."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Sequence
from typing import NamedTuple

from sealring.mesh.ring.bad_step import bad_step
from sealring.mesh.ring.prefix_marks import MOST, Marks

MAX_PREFIXES = 1024


class Origin(NamedTuple):
    """The identity of a kept prefix on all members and in all epochs: the first tokens of a row of an
    epoch."""

    epoch: int
    row: int
    tokens: int


class KeptPrefixes:
    """State of one epoch. All methods that change it raise InvalidInput (BAD_STEP)."""

    def __init__(self) -> None:
        self.tokens = 0
        """The tokens of all prefixes."""
        self.marks = Marks()
        self._origins: dict[int, Origin] = {}
        self._restored: dict[int, bytes] = {}  # of these, and their names
        self._highest = 0
        self._digest: bytes | None = None

    def __len__(self) -> int:
        return len(self._origins)

    def held(self, prefix: int) -> int:
        """The tokens of a prefix; 0 for one that is not kept."""
        origin = self._origins.get(prefix)
        return origin.tokens if origin is not None else 0

    def all(self) -> dict[int, int]:
        """Kept prefix -> its tokens."""
        return {prefix: origin.tokens for prefix, origin in self._origins.items()}

    def keep(
        self, prefix: int, origin: Origin, marks: Sequence[int], *, whole: bool
    ) -> tuple[tuple[int, ...], bool]:
        """Keeps the first tokens of a row, `whole` if it has no more: its marks, and whether one is at the
        end."""
        lengths, has = _lengths(marks, origin.tokens, prefix), self.marks.of_row(origin.row)
        if not set(lengths).issubset(has):
            raise bad_step(f"row {origin.row} does not have the marks of prefix {prefix}")
        cut = origin.tokens in has
        self._add(prefix, origin)
        self.marks.keep(prefix, origin.row, origin.tokens, lengths, whole=whole)
        return lengths, cut

    def adopt(self, prefix: int, origin: Origin, marks: Sequence[int]) -> tuple[int, ...]:
        """Keeps a prefix of an earlier epoch; its marks."""
        lengths = _lengths(marks, origin.tokens, prefix)
        self._add(prefix, origin)
        self.marks.add(prefix, (*lengths, origin.tokens))
        return lengths

    def restore(self, prefix: int, origin: Origin, name: bytes) -> None:
        """Keeps a prefix that was read from disk."""
        self._add(prefix, origin)
        self.marks.add(prefix, (origin.tokens,))
        self._restored[prefix] = name

    def give_up(self, prefix: int) -> None:
        """Keeps a prefix no longer."""
        origin = self._origins.pop(prefix, None)
        if origin is None:
            raise bad_step(f"prefix {prefix} cannot be given up: it is not kept")
        self.tokens -= origin.tokens
        self._restored.pop(prefix, None)
        self.marks.drop(prefix)
        self._digest = None

    def begin(self, row: int, prefix: int, tokens: int, *, takes: bool) -> None:
        """A row begins with the first tokens of a prefix, and `takes` it or leaves it kept."""
        self.marks.begin(row, prefix, tokens)
        self._digest = None
        if takes:
            self.give_up(prefix)

    def evicted(self, row: int) -> None:
        """A row is gone, and its marks with it."""
        self.marks.forget_row(row)
        self._digest = None

    def mark(self, row: int, tokens: int) -> None:
        """Marks a row at the tokens that it holds."""
        if len(self.marks.of_row(row)) >= MOST:
            raise bad_step(f"row {row} cannot be marked at {tokens} tokens")
        self.marks.mark(row, tokens)
        self._digest = None

    def unmark(self, row: int, prefix: int, marks: tuple[int, ...]) -> None:
        """Gives up marks of a prefix, or with 0 those of a row."""
        has = self.marks.of_prefix(prefix) if prefix else self.marks.of_row(row)
        unknown = len(set(marks)) < len(marks) or not set(marks) <= set(has)
        if not marks or unknown or self.held(prefix) in marks:
            raise bad_step("marks that are given up are not there")
        if prefix:
            self.marks.unmark(prefix, marks)
        else:
            self.marks.unmark_row(row, marks)
        self._digest = None

    def digest(self) -> bytes:
        """Hash of the kept prefixes, their origins and marks, and of the marks of rows: members could
        otherwise keep different ones unnoticed."""
        if self._digest is None:
            digest = hashlib.sha256(struct.pack(">I", len(self._origins)))
            for prefix in sorted(self._origins):
                digest.update(struct.pack(">QQQI", prefix, *self._origins[prefix]))
                digest.update(self._restored.get(prefix, b""))
                digest.update(_packed(self.marks.of_prefix(prefix)))
            for row in sorted(self.marks.rows()):
                digest.update(struct.pack(">Q", row) + _packed(self.marks.of_row(row)))
            self._digest = digest.digest()
        return self._digest

    def _add(self, prefix: int, origin: Origin) -> None:
        if prefix <= self._highest:
            raise bad_step(f"prefix {prefix} is not a new prefix")
        if len(self._origins) >= MAX_PREFIXES:
            raise bad_step(f"prefix {prefix} is one more than {MAX_PREFIXES}")
        self._highest = prefix
        self._origins[prefix] = origin
        self.tokens += origin.tokens
        self._digest = None


def _lengths(marks: Sequence[int], tokens: int, prefix: int) -> tuple[int, ...]:
    """The lengths of a prefix's marks besides its end."""
    found = tuple(marks)
    if (
        len(found) >= MOST
        or list(found) != sorted(set(found))
        or (found and not 0 < found[0] <= found[-1] < tokens)
    ):
        raise bad_step(f"prefix {prefix} has {len(found)} marks that cannot be")
    return found


def _packed(lengths: Collection[int]) -> bytes:
    return struct.pack(f">I{len(lengths)}I", len(lengths), *sorted(lengths))
