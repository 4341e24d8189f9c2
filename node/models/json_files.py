"""JSON files of model folders, which may come from anybody: what is parsed is bounded in bytes and in values.

Bytes alone are no bound. The 60 MiB of an index that holds empty lists became 1.4 GiB of memory, after 40 s.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

INDEX_VALUES = 300_000
"""Kimi-K2-Thinking has 208,000 tensors, each expert's apart, and an index of 23 MB."""

MAX_VALUES = 1 << 22
"""Four times those of Gemma 3's tokenizer.json, whose 514,000 merges are lists of two."""

LIMITS: tuple[tuple[str, int, int], ...] = (
    ("*.index.json", 32 << 20, INDEX_VALUES),
    ("tokenizer.json", 128 << 20, MAX_VALUES),  # Gemma 3's has 33 MB
    ("vocab.*", 64 << 20, 1 << 20),
    ("*.model", 64 << 20, 0),
    ("*.tiktoken", 64 << 20, 0),
    ("*.json", 16 << 20, 1 << 19),
    ("*.txt", 64 << 20, 0),
    ("*.jinja", 4 << 20, 0),
)
"""Bytes of a file at most, and values of one that is JSON, by the first pattern that its name fits. No other
kind of file is read at all."""


def limit_of(name: str) -> int | None:
    """Bytes of a file at most; None of a kind that is not read, or not whole."""
    return next((limit for pattern, limit, _ in LIMITS if fnmatchcase(name, pattern)), None)


def read_json(file: Path) -> Any:
    """What is in a file. Raises OSError, RecursionError, ValueError (also for too much of either)."""
    return parse_json(*_read(file))


def check_json(file: Path) -> None:
    """Raises what `read_json` raises for too many bytes or values, for a library that reads the file."""
    _check(*_read(file))


def parse_json(text: bytes, most: int) -> Any:
    """A text of `most` values. Raises ValueError, RecursionError."""
    _check(text, most)
    return json.loads(text)


def _check(text: bytes, most: int) -> None:
    # Each value has one of these before it, or is the only one. Some stand in strings, which are few here.
    if sum(text.count(one) for one in (b",", b"[", b"{")) > most:
        raise ValueError(f"JSON of more than {most} values")


def _read(file: Path) -> tuple[bytes, int]:
    limit, most = next((limit, most) for name, limit, most in LIMITS if fnmatchcase(file.name, name))
    with file.open("rb") as stream:
        text = stream.read(limit + 1)
    if len(text) > limit:
        raise ValueError(f"{file.name} has more than {limit} bytes")
    return text, most
