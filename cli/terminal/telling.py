"""What is said of a wait, and when: shares never fall, and no silence is long."""

from __future__ import annotations

import re

SILENT_SECONDS = 5.0
"""Longest time without a line where there is no terminal, and shortest between lines that differ in figures
alone."""

_SHARE = re.compile(r"([0-9]{1,3}) ?%(?:, )?")
_SIZE = r"[0-9.]+ [KMG]?i?B"
_FIGURES = re.compile(rf"{_SHARE.pattern}|[0-9.]+ of (?={_SIZE})|{_SIZE}(?:/s)?|[0-9]+ (?:s|min|h) left")


class Telling:
    """The words of one wait. A share in them that falls is left out until it is as large as before."""

    def __init__(self, now: float) -> None:
        """`now` in seconds, here and below, of any clock that goes on."""
        self.words = ""
        self.share: int | None = None
        """In percent; None where the words have none."""

        self._largest = 0
        self._began = self._said = now
        self._kind = ""

    def update(self, what: str, now: float) -> str:
        """Takes in what happens now. The line to say of it where there is no terminal, or "" for none yet."""
        found = _SHARE.search(what)
        self.share = min(int(found[1]), 100) if found else None
        if found and self.share is not None:
            if self.share < self._largest:
                what, self.share = what[: found.start()] + what[found.end() :], None
            self._largest = max(self._largest, self.share or 0)
        changed, self.words = what != self.words, what.strip()
        kind = _FIGURES.sub("", self.words)
        if not changed or (kind == self._kind and now - self._said < SILENT_SECONDS):
            return ""
        self._kind, self._said = kind, now
        return self.words

    def due(self, now: float) -> str:
        """The line to say after a silence, or "": the words, and for how long the wait has lasted."""
        if now - self._said < SILENT_SECONDS:
            return ""
        self._said = now
        return f"{self.words} ({now - self._began:.0f} s)"
