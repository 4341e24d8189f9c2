"""Which descriptors are still open: told by what they lead to, for other threads may get the same numbers."""

from __future__ import annotations

import os
from typing import Any

import pytest


class Descriptors:
    """Those that `os.open` and `os.pipe` have given out since this was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._given: list[tuple[int, tuple[int, int]]] = []
        opens, pipes = os.open, os.pipe

        def remember(number: int) -> int:
            self._given.append((number, _place(number)))
            return number

        def pipe() -> tuple[int, int]:
            first, second = pipes()
            return remember(first), remember(second)

        def open_(*of: Any, **how: Any) -> int:
            return remember(opens(*of, **how))

        monkeypatch.setattr(os, "open", open_)
        monkeypatch.setattr(os, "pipe", pipe)

    def left(self) -> list[int]:
        """Those that are open."""
        return [number for number, place in self._given if _place(number) == place]


def _place(number: int) -> tuple[int, int]:
    try:
        found = os.fstat(number)
    except OSError:
        return -1, -1
    return found.st_dev, found.st_ino
