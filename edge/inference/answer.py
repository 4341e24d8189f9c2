"""Carries one answer from the scheduler to the client that asked."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from sealring.edge.inference.timings import Prefill, Timings
from sealring.mesh.errors import SealringError, forget_frames
from sealring.v1 import inference_pb2 as inference

MOST_LOGPROBS = 256
"""Tokens with log-probabilities that a joined delta may have: messages have a limit."""


EVENT_BYTES = 256
"""Memory of an event beside its content, about."""

ENTRY_BYTES = 128
"""Memory of each log-probability in it, about."""


def weight(event: inference.GenerateResponse) -> int:
    """Bytes of memory that an event takes, about."""
    return event.ByteSize() + EVENT_BYTES + ENTRY_BYTES * _entries(event.delta.logprobs)


def _entries(logprobs: Sequence[inference.TokenLogprob]) -> int:
    return sum(1 + len(one.top) for one in logprobs)


class AnswerWriter(Protocol):
    """The events of one request, as a ring writes them: of `Answer` for a client of this gateway, of
    `gateway.rings.served.GuestAnswer` for a client of another gateway.

    A ring calls `opened` when the head is given the prompt, `waits` when the head has read it and it waits
    for memory, `computed` when members are given it to compute. Then come `started`, deltas and `finished`.
    `fail` ends the answer after all that came before it, `give_up` without what nobody has read.
    """

    timings: Timings

    @property
    def unread(self) -> int:
        """Bytes of memory that wait for the reader, about; the ring bounds them."""

    def opened(self) -> None: ...

    def waits(self) -> None: ...

    def computed(self) -> None: ...

    def paused(self) -> None: ...

    def prefilled(self, done: int, prompt_tokens: int) -> None:
        """A chunk of the prompt is computed behind `done` tokens of it."""

    def started(self, event: inference.Started) -> None: ...

    def delta(self, delta: inference.Delta, held: Sequence[inference.TokenLogprob] = ()) -> None:
        """Adds a piece of one choice. The log-probabilities that are `held` come later. The writer copies
        what it keeps: the delta is a part of a step's message."""

    def finished(self, event: inference.Finished) -> None: ...

    def fail(self, error: SealringError) -> None: ...

    def give_up(self, error: SealringError) -> None: ...


class Answer:
    """An `AnswerWriter` that one task reads, in the same event loop.

    Text that the reader has not taken yet is joined into one delta, so a slow client costs no more than its
    own answer's length. Sealed chunks cannot be joined. The ring bounds what is `unread`.
    """

    def __init__(self, *, tell_prefill: bool = False) -> None:
        self.timings = Timings()
        self._prefill = Prefill() if tell_prefill else None
        self._events: deque[tuple[inference.GenerateResponse, int]] = deque()
        self._event = inference.GenerateResponse()
        self._open: inference.Delta | None = None  # of `_event`, joined with the deltas that follow
        self._texts: list[str] = []  # of these
        self._error: SealringError | None = None
        self.over = False
        self._waiter: asyncio.Future[None] | None = None
        self._joining = 0  # bytes of memory of the open delta, about
        self._queued = 0

    @property
    def unread(self) -> int:
        return self._queued + self._joining

    def opened(self) -> None:
        pass  # a client hears nothing before `started`

    def waits(self) -> None:
        pass

    def computed(self) -> None:
        pass

    def paused(self) -> None:
        pass

    def prefilled(self, done: int, prompt_tokens: int) -> None:
        if self._prefill is not None and (told := self._prefill.at(done, prompt_tokens)) is not None:
            self._put(inference.GenerateResponse(prefilling=told))

    def started(self, event: inference.Started) -> None:
        event.load_ms = self.timings.load_ms
        self._put(inference.GenerateResponse(started=event))

    def delta(self, delta: inference.Delta, held: Sequence[inference.TokenLogprob] = ()) -> None:
        """A delta with `parsed` is never joined with another."""
        self._prefill = None
        opened = self._open
        if delta.sealed or delta.HasField("parsed"):
            self._begin(delta)
            self._flush()
        elif opened is None or opened.choice != delta.choice:
            self._begin(delta)
        else:
            self._texts.append(delta.text)
            opened.tokens = delta.tokens
            opened.logprobs.MergeFrom(delta.logprobs)
            self._grow(delta)
        self._wake()

    def _begin(self, delta: inference.Delta) -> None:
        self._flush()
        self._event = event = inference.GenerateResponse()
        self._open = opened = event.delta
        opened.CopyFrom(delta)
        self._joining = EVENT_BYTES
        self._grow(delta)

    def _grow(self, delta: inference.Delta) -> None:
        self._joining += delta.ByteSize()
        if logprobs := delta.logprobs:
            self._joining += ENTRY_BYTES * _entries(logprobs)
            if self._open is not None and len(self._open.logprobs) >= MOST_LOGPROBS:
                self._flush()

    def finished(self, event: inference.Finished) -> None:
        self._put(inference.GenerateResponse(finished=event))
        self.over = True

    def fail(self, error: SealringError) -> None:
        forget_frames(error)
        self._error = error
        self.over = True
        self._wake()

    def give_up(self, error: SealringError) -> None:
        self._events.clear()
        self._texts.clear()
        self._open = None
        self._queued = self._joining = 0
        self.fail(error)

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> inference.GenerateResponse:
        """The next event. Raises what the request failed with."""
        while True:
            if self._events:
                event, size = self._events.popleft()
                self._queued -= size
                return event
            if self._open is not None:
                self._flush()
                continue
            if self._error is not None:
                raise self._error
            if self.over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _put(self, event: inference.GenerateResponse) -> None:
        self._flush()
        self._queue(event, weight(event))
        self._wake()

    def _queue(self, event: inference.GenerateResponse, size: int) -> None:
        self._queued += size
        self._events.append((event, size))

    def _flush(self) -> None:
        if (opened := self._open) is not None:
            if self._texts:
                opened.text += "".join(self._texts)
                self._texts.clear()
            self._queue(self._event, self._joining)
            self._joining = 0
            self._open = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
