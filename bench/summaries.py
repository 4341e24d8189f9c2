"""Summaries of samples, as the tables show them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest value with at least `fraction` of all values at or below it (nearest rank)."""
    return float(np.quantile(values, fraction, method="inverted_cdf"))


def summary(values: Sequence[float]) -> dict[str, float]:
    """count, mean, p50, p95, p99 and max; {"count": 0} alone for nothing."""
    if not values:
        return {"count": 0}
    p50, p95, p99 = np.quantile(values, (0.5, 0.95, 0.99), method="inverted_cdf")
    found = {"mean": np.mean(values), "p50": p50, "p95": p95, "p99": p99, "max": max(values)}
    return {"count": len(values), **{name: round(float(value), 3) for name, value in found.items()}}
