"""Which files of a folder are opened."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_noted: list[tuple[str, set[str]]] = []


@contextlib.contextmanager
def opened_in(folder: Path) -> Iterator[set[str]]:
    """The files that are opened there meanwhile, by their paths in it, but for what code in Rust opens."""
    if not _noted:
        sys.addaudithook(_note)  # for good
    opened: set[str] = set()
    _noted.append((f"{folder}/", opened))
    yield opened
    _noted[-1] = ("", set())


def _note(event: str, told: tuple[Any, ...]) -> None:
    folder, opened = _noted[-1]
    if event == "open" and folder and str(told[0]).startswith(folder):
        opened.add(str(told[0]).removeprefix(folder))
