"""What gateways have counted of requests, added up by key, model or day."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sealring.v1.inference_pb2 import GetUsageResponse

COUNTED = ("requests", "prompt_tokens", "cached_tokens", "answered_tokens")
_SUMS = (*COUNTED, "ring_ms")


def first_day(now: float, days: int) -> str:
    """The first of the last `days` days, as 2026-11-30."""
    return (datetime.datetime.fromtimestamp(now).date() - datetime.timedelta(days=days - 1)).isoformat()


def added_up(found: Iterable[GetUsageResponse], by: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each group that occurs, with its sums; the newest day first, then by answered tokens.

    `by` are some of day, key and model. `key` is a key's id, or empty; its `label` stands beside it.
    """
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for answer in found:
        labels = {one.key: one.label for one in answer.keys}
        for one in answer.usage:
            place = tuple(getattr(one, name) for name in by)
            label = {"label": labels.get(one.key, "")} if "key" in by else {}
            row = rows.setdefault(place, dict(zip(by, place, strict=True)) | label | dict.fromkeys(_SUMS, 0))
            for name in _SUMS:
                row[name] += getattr(one, name)
    shown = sorted(rows.values(), key=lambda row: -row["answered_tokens"])
    return sorted(shown, key=lambda row: row.get("day", ""), reverse=True)


def key_name(key: str, label: str) -> str:
    """How a key is called: by its label, or its id."""
    return label or key or "no key"
