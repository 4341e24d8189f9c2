"""Durations and sizes as people write them: `90s`, `10m`, `2h`, `500MB`, `64GiB`."""

from __future__ import annotations

import re

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", 1)
}
_AMOUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z]{1,3})\Z", re.ASCII)


def parse_duration(text: str) -> float:
    """Seconds from a number and one of ms, s, m, h and d. Raises ValueError for anything else."""
    return _parse(text, _SECONDS, "duration", "90s, 10m or 2h")


def parse_size(text: str) -> int:
    """Bytes; GB is a power of 1000 and GiB of 1024. Raises ValueError for anything else."""
    return round(_parse(text, _BYTES, "size", "500MB, 5GB or 64GiB"))


def show_duration(seconds: float) -> str:
    """A duration for `parse_duration`, in the largest unit that divides it."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:g}{unit}"
    return f"{seconds:g}s"


def show_size(count: int) -> str:
    """A size for `parse_size`, in the largest unit that divides it."""
    for unit, value in sorted(_BYTES.items(), key=lambda item: -item[1]):
        if count and count % value == 0:
            return f"{count // value}{unit}"
    return f"{count}B"


def size(count: int) -> str:
    """Bytes in binary units with one decimal, for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if round(amount, 1) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def _parse(text: str, units: dict[str, float] | dict[str, int], what: str, examples: str) -> float:
    matched = _AMOUNT.match(text.strip())
    if matched is None or matched[2] not in units:
        raise ValueError(f"{text[:40]!r} is not a {what} with its unit, such as {examples}")
    return float(matched[1]) * units[matched[2]]
