"""The load of gateways over the last quarter of an hour, which is watched while nobody looks."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.errors import SealringError

SAMPLE_SECONDS = 5.0
KEPT_SECONDS = 900.0
MOST_MODELS = 16
"""Models whose load is kept; of more the first by name."""

_WINDOW_SECONDS = 15.0
_FIRST = "sealring_time_to_first_token_seconds_bucket"
_TOKENS = "sealring_generation_tokens_total"
_HITS = "sealring_prefix_cache_hits_total"
_ASKED = "sealring_prefix_cache_queries_total"
_FROM_DISK = "sealring_prefix_cache_disk_tokens_total"
_GAUGES = {
    "sealring_num_requests_running": "running",
    "sealring_num_requests_waiting": "waiting",
    "sealring_kv_cache_usage_perc": "kv_usage",
    "sealring_prefix_cache_tokens": "prefix_tokens",
    "sealring_prefix_cache_bytes": "prefix_bytes",
}

Sample = dict[tuple[str, str, str], float]
"""Values by metric, model and bucket."""


class GatewayLoad:
    """A gateway's load by model, over the last seconds that were looked at."""

    def __init__(self, gateway: str, exposition: Callable[[], Awaitable[str]]) -> None:
        self._gateway = gateway
        self._exposition = exposition
        self._samples: deque[tuple[float, Sample]] = deque()

    async def look(self, now: float) -> list[dict[str, Any]]:
        """The gateway's load by model: requests running and waiting, KV memory in use (0 to 1), tokens per
        second, median seconds to the first token (None without requests). Of prompt tokens,
        `prefix_share` came from the prefix cache, and `disk_share` were read from disk into it. If the
        gateway does not answer, `trouble` says why."""
        try:
            newest = _sample(await self._exposition())
        except (SealringError, ValueError) as error:  # ValueError: metrics that no parser reads
            return [{"gateway": self._gateway, "trouble": str(error)}]
        self._samples.append((now, newest))
        while now - self._samples[0][0] > _WINDOW_SECONDS:
            self._samples.popleft()
        since, oldest = self._samples[0]
        models = sorted({model for metric, model, _ in newest if metric in _GAUGES})
        return [{"gateway": self._gateway, **_load(model, newest, oldest, now - since)} for model in models]


def _sample(exposition: str) -> Sample:
    return {
        (one.name, one.labels.get("model_name", ""), one.labels.get("le", "")): one.value
        for family in text_string_to_metric_families(exposition)
        for one in family.samples
    }


def _load(model: str, newest: Sample, oldest: Sample, seconds: float) -> dict[str, Any]:
    def grown(metric: str, bucket: str = "") -> float:
        key = metric, model, bucket
        value = newest.get(key, 0.0) - oldest.get(key, 0.0)
        return value if value >= 0 else newest.get(key, 0.0)  # a gateway that began anew counts from 0

    buckets = sorted(
        (float(bucket), grown(_FIRST, bucket))
        for metric, of, bucket in newest
        if metric == _FIRST and of == model
    )
    asked = grown(_ASKED)
    return {
        "model": model,
        **{word: newest.get((metric, model, ""), 0.0) for metric, word in _GAUGES.items()},
        "tokens_per_second": grown(_TOKENS) / seconds if seconds else None,
        "first_token": median(buckets),
        "prefix_share": grown(_HITS) / asked if asked else None,
        "disk_share": grown(_FROM_DISK) / asked if asked else None,
    }


def median(buckets: list[tuple[float, float]]) -> float | None:
    """The upper bound of the bucket with the median; buckets are (upper bound, how many up to it), ascending.

    None where nothing was observed, or more than half beyond the last bound.
    """
    total = buckets[-1][1] if buckets else 0.0
    found = next((bound for bound, count in buckets if count * 2 >= total > 0), None)
    return None if found == float("inf") else found


class LoadHistory:
    """Points of the last 15 minutes by model, summed over gateways. It asks them every five seconds."""

    def __init__(self, gateways: Sequence[GatewayLoad], *, clock: Clock = monotonic_clock) -> None:
        self._gateways = gateways
        self._clock = clock
        self._points: deque[tuple[float, dict[str, list[float | None]]]] = deque()
        self._newest: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Watches, for ever."""
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    async def sample(self) -> None:
        """Asks every gateway once, and forgets what is too old."""
        now = self._clock()
        found = await asyncio.gather(*(one.look(now) for one in self._gateways))
        self._newest = list(itertools.chain.from_iterable(found))
        self._points.append((now, _point(self._newest)))
        while now - self._points[0][0] > KEPT_SECONDS:
            self._points.popleft()

    async def look(self) -> dict[str, Any]:
        """The newest load of each gateway as in `GatewayLoad.look`, and by model the points of `history`, the
        oldest first: [seconds ago, tokens per second, rows, waiting, seconds to the first token]."""
        if not self._points:
            await self.sample()
        now = self._clock()
        history: dict[str, list[list[float | None]]] = {}
        for at, point in self._points:
            for model, values in point.items():
                history.setdefault(model, []).append([round(now - at, 1), *values])
        return {"gateways": self._newest, "history": history}


def _point(rows: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """By model: tokens per second, rows and waiting requests of all gateways, and the slowest first token."""
    points: dict[str, list[float | None]] = {}
    known = [one for one in rows if "trouble" not in one]
    for model in sorted({one["model"] for one in known})[:MOST_MODELS]:
        of = [one for one in known if one["model"] == model]
        sums = [sum(one[name] or 0.0 for one in of) for name in ("tokens_per_second", "running", "waiting")]
        firsts = [one["first_token"] for one in of if one["first_token"] is not None]
        points[model] = [*sums, max(firsts, default=None)]
    return points
