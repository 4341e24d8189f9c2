"""Summaries of samples, as the tables show them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that at least `fraction` of all are not above (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def summary(values: Sequence[float], *, digits: int = 3) -> dict[str, float]:
    """count, mean, p50, p95, p99 and max; {"count": 0} alone for nothing."""
    if not values:
        return {"count": 0}
    found = {
        "mean": statistics.fmean(values),
        "p50": percentile(values, 0.5),
        "p95": percentile(values, 0.95),
        "p99": percentile(values, 0.99),
        "max": max(values),
    }
    return {"count": len(values), **{name: round(value, digits) for name, value in found.items()}}


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
