"""How a byte-level vocabulary spells bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


@lru_cache(maxsize=1)
def byte_level_table() -> dict[str, int]:
    """GPT-2's printable characters for all bytes (github.com/openai/gpt-2, src/encoder.py)."""
    printable: Sequence[int] = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in table.values())
    table.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return table
