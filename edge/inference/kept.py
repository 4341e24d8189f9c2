"""Answers kept under an idempotency key (draft-ietf-httpapi-idempotency-key-header), a header or metadata.

A request with the same key continues an answer under way, or gets a complete one again; nothing is computed
twice. This process alone keeps them, in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import ChainMap, Counter
from collections.abc import AsyncGenerator, Callable
from typing import TypeAlias

from sealring.edge.inference.answer import weight
from sealring.edge.inference.timers import AwakeTimer
from sealring.mesh.errors import Cancelled, FailedPrecondition, InvalidInput, SealringError, Unavailable
from sealring.mesh.rpc.crowd import Crowd, Place
from sealring.v1 import inference_pb2 as inference

KEPT_SECONDS = 600.0
"""Seconds that an answer is kept after its end: longer than clients go on trying."""

LEFT_SECONDS = 60.0
"""Seconds that an answer without a reader goes on."""

MAX_LEFT = 64
"""Answers without a reader, at once. For one more, the oldest of the caller that has most is cancelled as if
it had no key."""

KEPT_BYTES = 64 << 20
"""Bytes of all answers together. Those of the caller that has most make room: the oldest that have ended. If
that is not enough, the longest under way is kept no more, and its events go to its present readers."""

ANSWER_BYTES = 6 << 10
"""Memory of each beside its events: a task, a timer, the key. Measured: 6,200 bytes with a key of 250."""

Events: TypeAlias = AsyncGenerator[inference.GenerateResponse, None]


class _Kept:
    """An answer's events from number `first` on; `readers` are the numbers of those that each reads next.

    Events of one that is `passing` are kept until all have read them, and the next is waited for then.
    """

    def __init__(self, caller: str, digest: bytes, events: Events, grown: Callable[[str, int], None]) -> None:
        self.caller = caller
        self.digest = digest
        self.events: list[inference.GenerateResponse] = []
        self.first = 0
        self.size = 0
        self.readers: dict[object, int] = {}
        self.passing = False
        self.left: Place | None = None
        """Its place among those without a reader."""
        self._grown = grown
        self._taken = asyncio.Event()
        self.news = asyncio.Event()
        self.task = asyncio.ensure_future(self._collect(events))
        self.leave()

    def leave(self) -> None:
        """Nobody reads it."""
        self.timer = AwakeTimer(LEFT_SECONDS, self.task.cancel)

    async def _collect(self, events: Events) -> SealringError | None:
        self._grow(ANSWER_BYTES)
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    self.events.append(event)
                    self._grow(weight(event))
                    self._tell()
                    while self.passing and self.events:
                        self._taken.clear()
                        await self._taken.wait()
            return None
        except SealringError as error:
            return error

    def _tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def _grow(self, size: int) -> None:
        self.size += size
        self._grown(self.caller, size)

    def read(self, reader: object) -> inference.GenerateResponse | None:
        """The next event for a reader; None while there is none."""
        at = self.readers[reader] - self.first
        if at == len(self.events):
            return None
        event = self.events[at]
        self.readers[reader] += 1
        self.trim()
        return event

    def trim(self) -> None:
        """Forgets what all readers of an answer that is `passing` have read."""
        read = min(self.readers.values(), default=self.first) - self.first
        if self.passing and read:
            self._grow(-sum(map(weight, self.events[:read])))
            del self.events[:read]
            self.first += read
            self._taken.set()


class KeptAnswers:
    """Answers by caller and `Idempotency-Key`. For one event loop."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str], _Kept] = {}
        self._ended: dict[tuple[str, str], _Kept] = {}  # the oldest first
        self.kept = ChainMap(self._under_way, self._ended)
        self._sizes: Counter[str] = Counter()
        self._left = Crowd(MAX_LEFT)

    def events(self, caller: str, key: str, digest: bytes, start: Callable[[], Events]) -> Events:
        """All events of the answer that has this key, or that `start` begins. `digest` is of what is asked.

        Raises InvalidInput (BAD_IDEMPOTENCY_KEY), FailedPrecondition (IDEMPOTENCY_KEY_REUSED).
        """
        if not 0 < len(key) <= 255 or not key.isprintable():
            raise InvalidInput("the Idempotency-Key is malformed", reason="BAD_IDEMPOTENCY_KEY")
        name = (caller, key)
        kept = self.kept.get(name)
        if kept is None:
            kept = self._under_way[name] = _Kept(caller, digest, start(), self._grown)
            kept.task.add_done_callback(lambda task: self._end(name, kept))
        elif kept.digest != digest:
            raise FailedPrecondition(
                "the Idempotency-Key was used for another request",
                hint="use a new key for every request",
                reason="IDEMPOTENCY_KEY_REUSED",
            )
        return self._read(kept)

    async def _read(self, kept: _Kept) -> Events:
        if not kept.task.done():
            kept.timer.cancel()
        if kept.left is not None:
            kept.left.close()
        if kept.first:
            raise Unavailable(
                "the answer was too long to be kept", hint="send the request again", reason="ANSWER_NOT_KEPT"
            )
        reader = object()
        kept.readers[reader] = kept.first
        try:
            while True:
                while (event := kept.read(reader)) is not None:
                    yield event
                if kept.task.done():
                    break
                news = asyncio.ensure_future(kept.news.wait())
                try:
                    await asyncio.wait((news, kept.task), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
            error = Cancelled("nobody read the answer") if kept.task.cancelled() else kept.task.result()
            if error is not None:
                raise error
        finally:
            del kept.readers[reader]
            kept.trim()
            if not kept.readers and not kept.task.done():
                self._leave(kept)

    def _leave(self, kept: _Kept) -> None:
        if kept.passing:
            kept.task.cancel()
        else:
            kept.leave()
            kept.left = self._left.enter(kept.caller, kept.task.cancel)

    def _end(self, name: tuple[str, str], kept: _Kept) -> None:
        """Keeps an answer that has ended; one that failed is computed anew when it is asked for again."""
        kept.timer.cancel()
        if kept.left is not None:
            kept.left.close()
        failed = kept.task.cancelled() or kept.task.exception() or kept.task.result() is not None
        if self._under_way.get(name) is kept:
            del self._under_way[name]
        if kept.passing or failed:
            self._grown(kept.caller, -kept.size)
            kept.passing = False  # readers that are behind are soon given up
            return
        self._ended[name] = kept
        kept.timer = AwakeTimer(KEPT_SECONDS, lambda: self._forget(name))
        self._make_room()

    def _grown(self, caller: str, size: int) -> None:
        self._sizes[caller] += size
        if not self._sizes[caller]:
            del self._sizes[caller]
        if size > 0:
            self._make_room()

    def _make_room(self) -> None:
        while self._sizes.total() > KEPT_BYTES:
            for caller, _ in self._sizes.most_common():
                if oldest := next((name for name in self._ended if name[0] == caller), None):
                    self._forget(oldest)
                    break
                if under_way := [name for name in self._under_way if name[0] == caller]:
                    self._pass_on(max(under_way, key=lambda each: self._under_way[each].size))
                    return
            else:
                return

    def _pass_on(self, name: tuple[str, str]) -> None:
        """Keeps an answer under way no more."""
        kept = self._under_way.pop(name)
        kept.passing = True
        kept.trim()
        if not kept.readers:
            kept.task.cancel()

    def _forget(self, name: tuple[str, str]) -> None:
        kept = self._ended.pop(name)
        kept.timer.cancel()
        self._grown(kept.caller, -kept.size)
