"""An event loop in a thread of its own, for callers that wait."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class Portal:
    """Runs coroutines in its loop. The thread ends with `close`, or when nothing refers to the portal."""

    def __init__(self) -> None:
        ready: concurrent.futures.Future[Callable[[], None]] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        # A daemon, because a program may end without having closed its client.
        self._thread = threading.Thread(target=_live, args=(self._loop, ready), name="sealring", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, ready.result())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for `work`, and cancels it if the wait is interrupted. Raises RuntimeError once closed."""
        future = self._start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C
            raise

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` if the portal is open. In the loop's own thread, which collects garbage too, it only
        starts it: a wait there would keep the loop from running it."""
        with contextlib.suppress(RuntimeError):
            future = self._start(work)
            if threading.current_thread() is not self._thread:
                future.result()

    def pieces(
        self, source: AsyncIterator[T], end: Callable[[], Coroutine[Any, Any, None]]
    ) -> Generator[T, None, None]:
        """The items of `source`; `end` is awaited when the iteration ends or is left."""

        async def piece() -> tuple[T, ...]:
            async for one in source:
                return (one,)
            return ()

        try:
            while found := self.run(piece()):
                yield found[0]
        finally:
            self.finish(end())

    def close(self) -> None:
        """Cancels what runs and ends the thread."""
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise


def _live(loop: asyncio.AbstractEventLoop, ready: concurrent.futures.Future[Callable[[], None]]) -> None:
    """The thread's work. It has no reference to the portal, which would never be collected otherwise."""

    async def until_end() -> None:
        end = asyncio.Event()

        def stop() -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end.set)

        ready.set_result(stop)
        await end.wait()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(until_end())
