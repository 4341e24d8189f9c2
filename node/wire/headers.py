"""The headers of records, apart from their sealing: engines, which seal nothing, do not load that."""

from __future__ import annotations

import enum
from typing import NamedTuple

MAX_RECORD_BYTES = 16 << 20


class Kind(enum.IntEnum):
    """Content of a record."""

    CONFIRM = 1
    ACTIVATIONS = 2
    TOKENS = 3
    SAMPLING = 4
    CONTROL = 5

    __hash__ = int.__hash__


class RecordHeader(NamedTuple):
    """Properties of a record that both ends derive. They are authenticated and never sent.

    `step` is the step's number, `digest` the composition digest (32 bytes), `dtype` a short ASCII name,
    `shape` at most 8 dimensions, `length` the plaintext's length in bytes (at most 16 MiB).
    """

    kind: Kind
    step: int
    digest: bytes
    dtype: str
    shape: tuple[int, ...]
    length: int
