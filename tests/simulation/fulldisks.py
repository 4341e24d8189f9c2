"""Disks without room: on these machines no file is written and no database commits."""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from memorynetwork import process

from sealring.mesh.system import files

FULL: set[str] = set()
"""The hosts whose disks are full."""

TRIED: Counter[str] = Counter()
"""How often the programs of a host tried to write to its full disk."""


def _is_full() -> bool:
    found = process.get(None)
    if found is None or found.host not in FULL:
        return False
    TRIED[found.host] += 1
    return True


def _with_room(do: Callable[..., Any]) -> Callable[..., Any]:
    def check(*arguments: Any, **options: Any) -> Any:
        if _is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return do(*arguments, **options)

    return check


class _Connection(sqlite3.Connection):
    """SQLite writes when a transaction ends."""

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql == "COMMIT" and _is_full():
            raise sqlite3.OperationalError("database or disk is full")
        return super().execute(sql, *values)


files.sync = _with_room(files.sync)  # what is written goes through it before it gets its name
tempfile.mkdtemp = _with_room(tempfile.mkdtemp)
sqlite3.connect = partial(sqlite3.connect, factory=_Connection)  # type: ignore[assignment]
