"""A bounded queue from the coordinator to one stream; a peer that does not read is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from typing import Generic, TypeVar

from sealring.mesh.errors import SealringError, Unavailable

Message = TypeVar("Message")


class Outbox(Generic[Message]):
    """The queue of a stream, and the error that it ends with."""

    def __init__(self, limit: int = 512) -> None:
        self._limit = limit
        self._waiting: dict[Hashable, Message] = {}
        self._wake = asyncio.Event()
        self._closed = False
        self._error: SealringError | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._closed

    def put(self, message: Message) -> None:
        """Send a message, unless the stream is ending."""
        if self._closed:
            return
        if len(self._waiting) >= self._limit:
            self._waiting.clear()
            self.close(Unavailable("peer does not read", hint="connect again", reason="SLOW_PEER"))
            return
        self._waiting[object()] = message
        self._wake.set()

    def put_latest(self, subject: Hashable, message: Message, *, first: bool = False) -> None:
        """Queues the newest message on a subject in place of an older one; with `first` before all others.

        Not counted against the limit: each subject has one message at most.
        """
        if self._closed:
            return
        self._waiting.pop(subject, None)
        if first:
            self._waiting = {subject: message, **self._waiting}
        else:
            self._waiting[subject] = message
        self._wake.set()

    def close(self, error: SealringError | None = None, *, last: Message | None = None) -> None:
        """End the stream after what waits and `last`; with `error` as its status if there is one."""
        if self._closed:
            return
        if last is not None:
            self._waiting[object()] = last
        self._closed, self._error = True, error
        self._wake.set()

    async def messages(self) -> AsyncIterator[Message]:
        """Everything that is put, until closed. Raises the error that it was closed with."""
        while True:
            waiting, self._waiting = self._waiting, {}
            for message in waiting.values():
                yield message
            if self._waiting:
                continue
            if self._closed:
                break
            self._wake.clear()
            await self._wake.wait()
        if self._error is not None:
            raise self._error
