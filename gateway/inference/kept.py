"""Answers that are asked for again by an `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header), which
is metadata of a gRPC call too.

One that is under way goes on, one that has ended is told once more; nothing is computed twice. They are kept
by this process alone, and end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import TypeAlias

from sealring.mesh.errors import Cancelled, FailedPrecondition, InvalidInput, SealringError
from sealring.v1 import inference_pb2 as inference

KEPT_SECONDS = 600.0
"""How long an answer is kept after its end: longer than clients go on trying."""

LEFT_SECONDS = 60.0
"""How long an answer goes on that nobody reads."""

MAX_LEFT = 64
"""Answers that nobody reads, at once; one more is cancelled as if it had no key."""

KEPT_BYTES = 64 << 20
"""Of all answers together; the oldest make room."""

_EVENT_BYTES = 256
"""About what an event takes beside its content."""

Events: TypeAlias = AsyncGenerator[inference.GenerateResponse, None]


class _Kept:
    def __init__(self, digest: bytes, events: Events) -> None:
        self.digest = digest
        self.events: list[inference.GenerateResponse] = []
        self.size = 0
        self.readers = 0
        self.news = asyncio.Event()
        self.task = asyncio.ensure_future(self._collect(events))
        self.leave()

    def leave(self) -> None:
        """Nobody reads it."""
        self.timer = asyncio.get_running_loop().call_later(LEFT_SECONDS, self.task.cancel)

    async def _collect(self, events: Events) -> SealringError | None:
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    self.events.append(event)
                    self.size += event.ByteSize() + _EVENT_BYTES
                    self._tell()
            return None
        except SealringError as error:
            return error

    def _tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


class KeptAnswers:
    """By who asks and the key that it gave. For one event loop."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], _Kept] = {}  # the oldest first

    def events(self, caller: str, key: str, digest: bytes, start: Callable[[], Events]) -> Events:
        """All events of the answer that has this key, or that `start` begins. `digest` is of what is asked.

        Raises InvalidInput (BAD_IDEMPOTENCY_KEY), FailedPrecondition (IDEMPOTENCY_KEY_REUSED).
        """
        if not 0 < len(key) <= 255 or not key.isprintable():
            raise InvalidInput("the Idempotency-Key is malformed", reason="BAD_IDEMPOTENCY_KEY")
        name = (caller, key)
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = _Kept(digest, start())
            kept.task.add_done_callback(lambda task: self._ended(name, kept))
        elif kept.digest != digest:
            raise FailedPrecondition(
                "the Idempotency-Key was used for another request",
                hint="use a new key for every request",
                reason="IDEMPOTENCY_KEY_REUSED",
            )
        return self._read(name, kept)

    async def _read(self, name: tuple[str, str], kept: _Kept) -> Events:
        if not kept.task.done():
            kept.timer.cancel()
        kept.readers += 1
        try:
            told = 0
            while True:
                while told < len(kept.events):
                    told += 1
                    yield kept.events[told - 1]
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
            kept.readers -= 1
            if not kept.readers and not kept.task.done():
                self._leave(kept)

    def _leave(self, kept: _Kept) -> None:
        left = sum(not one.readers and not one.task.done() for one in self._kept.values())
        if left > MAX_LEFT:
            kept.task.cancel()
        else:
            kept.leave()

    def _ended(self, name: tuple[str, str], kept: _Kept) -> None:
        """What failed is not kept: whoever asks again is answered anew."""
        kept.timer.cancel()
        if kept.task.cancelled() or kept.task.exception() or kept.task.result() is not None:
            self._kept.pop(name, None)
            return
        kept.timer = asyncio.get_running_loop().call_later(KEPT_SECONDS, self._kept.pop, name, None)
        size = sum(one.size for one in self._kept.values() if one.task.done())
        for each, one in list(self._kept.items()):
            if size <= KEPT_BYTES:
                break
            if one.task.done():
                size -= one.size
                self._kept.pop(each).timer.cancel()  # not to end one that takes the key anew
