"""Counts what requests have used, where they came in, and writes it down every few seconds."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from sealring.edge.access.keyfile import KeyRecord
from sealring.edge.access.quota import day_of
from sealring.gateway.usage.store import Place, UsageStore, Used
from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.errors import InvalidInput, Unavailable
from sealring.v1 import inference_pb2 as inference

log = structlog.get_logger()

FLUSH_SECONDS = 10.0
"""How much a gateway that is killed has not written down at most."""

MOST_SHOWN = 20_000
_MOST_WAITING = 4096
_DISK = (sqlite3.Error, OSError)


class Usage(Collector):
    """Use it from one event loop. What cannot be written waits, bounded; nothing waits for the disk."""

    def __init__(
        self, store: UsageStore, name_of: Callable[[str], str] = lambda key: "", *, clock: Clock = wall_clock
    ) -> None:
        """`name_of` gives the name of a machine by its member's id, or "" for another key."""
        self._store = store
        self._name_of = name_of
        self._names: dict[str, str] = {}
        self._clock = clock
        self._new: dict[Place, Used] = {}
        self._turn = asyncio.Lock()
        self._failing = False
        self._day = ""
        self._spent = Counter[str]()
        self._behind = False
        """Whether what is stored of today is not counted yet."""

        self._today()
        try:
            self._count_stored(self._day, store.read(self._day))
        except _DISK as error:
            log.error("usage_unreadable", error=error)

    def spent(self, key_id: str) -> int:
        """Tokens that a key has used today, as far as they count towards a quota."""
        return self._today()[key_id]

    def add(self, key_id: str, model: str, used: Used) -> None:
        """Counts a request that is over."""
        self._today()[key_id] += used.computed
        place = Place(self._day, key_id, model)
        if place not in self._new and len(self._new) >= _MOST_WAITING:
            place = Place(self._day, "", "")
        self._new[place] = self._new.get(place, Used()) + used
        if place.key and (name := self._name_of(key_id)):
            self._names[key_id] = name

    async def run(self) -> None:
        """Writes every few seconds what is new, for ever."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Counts what is stored of a day that has begun, and writes what is new. Where the disk does neither,
        it is tried again with the next."""
        async with self._turn:
            self._today()
            writing: dict[Place, Used] = {}
            names: dict[str, str] = {}
            try:
                if self._behind:
                    day = self._day
                    self._count_stored(day, await asyncio.to_thread(self._store.read, day))
                if self._behind or not self._new:
                    return
                writing, self._new = self._new, {}
                names, self._names = self._names, {}
                await asyncio.to_thread(self._store.add, writing, names)
                self._failing = False
            except _DISK as error:
                self._names = names | self._names
                for place, used in writing.items():
                    self._new[place] = self._new.get(place, Used()) + used
                if not self._failing:
                    log.warning("usage_not_written", error=error)
                self._failing = True

    async def tell(
        self, asked: inference.GetUsageRequest, keys: Iterable[KeyRecord]
    ) -> inference.GetUsageResponse:
        """What was used since a day, what keys may use, and the names of machines.

        Raises InvalidInput (BAD_DAY), Unavailable (USAGE_UNREADABLE).
        """
        if len(asked.since) > 10 or not all(one.isdecimal() or one == "-" for one in asked.since):
            raise InvalidInput("a day is written as 2026-11-30", reason="BAD_DAY", param="since")
        await self.flush()
        try:
            async with self._turn:
                found = await asyncio.to_thread(self._store.read, asked.since, MOST_SHOWN + 1)
                names = await asyncio.to_thread(self._store.names) | self._names
        except _DISK as error:
            raise Unavailable(
                f"what was used cannot be read: {error}",
                hint="see that the gateway's disk has room and works",
                reason="USAGE_UNREADABLE",
            ) from None
        for place, used in self._new.items():
            if place.day >= asked.since:
                found[place] = found.get(place, Used()) + used
        rows = sorted(found.items(), key=lambda one: one[0].day, reverse=True)
        today = self._today()
        answer = inference.GetUsageResponse(more=len(rows) > MOST_SHOWN, today=self._day)
        for (day, key, model), used in rows[:MOST_SHOWN]:
            answer.usage.add(
                day=day,
                key=key,
                model=model,
                requests=used.requests,
                prompt_tokens=used.prompt,
                cached_tokens=used.cached,
                answered_tokens=used.answered,
                ring_ms=used.ring_ms,
            )
        seen, now = {row.key for row in answer.usage}, self._clock()
        for one in keys:
            if one.id in seen or one.usable(now):
                answer.keys.add(
                    key=one.id, label=one.label, tokens_a_day=one.tokens_a_day, tokens_today=today[one.id]
                )
        for machine in sorted(seen & names.keys()):
            answer.keys.add(key=machine, label=names[machine], tokens_today=today[machine])
        return answer

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """For Prometheus: keys are as bounded as their file, and have no name; members as the roster."""
        told = GaugeMetricFamily(
            "sealring_key_tokens_today", "computed for a key since midnight", labels=("key", "name")
        )
        for key, tokens in self._today().items():
            told.add_metric([key, self._name_of(key)], tokens)
        yield told

    def _today(self) -> Counter[str]:
        """Tokens that keys have used today. A new day begins with those that are not written yet."""
        day = day_of(self._clock()).isoformat()
        if day != self._day:
            self._day, self._spent, self._behind = day, Counter(), True
            self._count(self._new)
        return self._spent

    def _count_stored(self, day: str, stored: Mapping[Place, Used]) -> None:
        """Counts what was stored of `day`, unless another has begun meanwhile."""
        if day == self._day:
            self._count(stored)
            self._behind = False

    def _count(self, found: Mapping[Place, Used]) -> None:
        for place, used in found.items():
            if place.day == self._day:
                self._spent[place.key] += used.computed
