"""Usage on disk: an SQLite file of two tables, opened for each of its few reads and writes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

import structlog

log = structlog.get_logger()

USAGE_FILE = "usage.sqlite"
MOST_DAYS = 366
MOST_ROWS = 500_000
"""Rows of all days, about 40 MB. The oldest days are forgotten first."""

MOST_A_DAY = 4096
"""Rows of one day, a row for each key and model."""

_SCHEMA = """CREATE TABLE IF NOT EXISTS usage (
  day TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL, requests INTEGER NOT NULL,
  prompt INTEGER NOT NULL, cached INTEGER NOT NULL, answered INTEGER NOT NULL, ring_ms INTEGER NOT NULL,
  PRIMARY KEY (day, key, model)) WITHOUT ROWID"""
_MACHINES = "CREATE TABLE IF NOT EXISTS machines (id TEXT PRIMARY KEY, name TEXT NOT NULL) WITHOUT ROWID"
_ADD = """INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
  requests = requests + excluded.requests, prompt = prompt + excluded.prompt,
  cached = cached + excluded.cached, answered = answered + excluded.answered,
  ring_ms = ring_ms + excluded.ring_ms"""
_BUSY_SECONDS = 5.0


class Place(NamedTuple):
    """What is counted apart: a day (2026-11-30), the id of a key or nothing, a model."""

    day: str
    key: str
    model: str


@dataclass(slots=True)
class Used:
    """Requests, tokens of prompts, those of them that were cached, tokens of answers, ring milliseconds."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    answered: int = 0
    ring_ms: int = 0

    def __add__(self, more: Used) -> Used:
        return Used(*(one + other for one, other in zip(astuple(self), astuple(more), strict=True)))

    @property
    def computed(self) -> int:
        """Tokens that count towards a quota: those that no cache has given."""
        return max(0, self.prompt - self.cached) + self.answered


class UsageStore:
    """The database of one gateway. Every method may be called in any thread, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / USAGE_FILE

    def add(self, new: Mapping[Place, Used], names: Mapping[str, str] | None = None) -> None:
        """Adds all of it or nothing, and forgets what is too old. `names` are those of machines by their ids,
        kept for as long as anything of them. Raises sqlite3.Error, OSError."""
        with self._opened() as opened, opened:
            known: dict[str, set[tuple[str, str]]] = {}
            for place, used in new.items():
                if place.day not in known:
                    found = opened.execute("SELECT key, model FROM usage WHERE day = ?", (place.day,))
                    known[place.day] = set(found)
                there = known[place.day]
                if place[1:] not in there and len(there) >= MOST_A_DAY:
                    place = Place(place.day, "", "")
                there.add(place[1:])
                opened.execute(_ADD, (*place, *astuple(used)))
            opened.executemany("INSERT OR REPLACE INTO machines VALUES (?, ?)", (names or {}).items())
            if opened.execute("DELETE FROM usage WHERE day < ?", (_oldest(opened),)).rowcount:
                opened.execute("DELETE FROM machines WHERE id NOT IN (SELECT key FROM usage)")

    def read(self, since: str = "", most: int = MOST_ROWS) -> dict[Place, Used]:
        """The newest days first, from `since` on. Raises sqlite3.Error, OSError."""
        with self._opened() as opened:
            query = "SELECT * FROM usage WHERE day >= ? ORDER BY day DESC, key, model LIMIT ?"
            return {Place(*row[:3]): Used(*row[3:]) for row in opened.execute(query, (since, most))}

    def names(self) -> dict[str, str]:
        """The names of machines by their ids. Raises sqlite3.Error, OSError."""
        with self._opened() as opened:
            return dict(opened.execute("SELECT id, name FROM machines"))

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """The database. One that is damaged is set aside: the next use begins another."""
        os.close(os.open(self._file, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        try:
            with closing(sqlite3.connect(self._file, timeout=_BUSY_SECONDS)) as opened:
                opened.execute("PRAGMA trusted_schema = OFF")
                opened.execute(_SCHEMA)
                opened.execute(_MACHINES)
                yield opened
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                aside = self._file.with_suffix(".damaged")
                log.error("usage_set_aside", file=str(aside), why=str(error))
                os.replace(self._file, aside)
            raise


def _oldest(opened: sqlite3.Connection) -> str:
    """The first day that is kept. Days are counted, so that a clock that is wrong ends no year."""
    first, days, rows = "", 0, 0
    for day, count in opened.execute("SELECT day, count(*) FROM usage GROUP BY day ORDER BY day DESC"):
        days, rows = days + 1, rows + count
        if days > MOST_DAYS or (rows > MOST_ROWS and first):
            break
        first = day
    return first
