"""An event loop in virtual time, for many processes at once: nothing waits, all happens in one order.

Each handle belongs to the process of its context (`memorynetwork.py`). A process that stands still has its
handles kept until it goes on; those of a process that was killed are dropped, so that not even its `finally`
blocks run.
"""

# ruff: noqa: SLF001 - asyncio offers no other way to decide when a handle runs

from __future__ import annotations

import asyncio
import gc
import heapq
import zlib
from collections.abc import AsyncGenerator, Callable
from contextvars import Context
from itertools import count
from typing import Any, TextIO
from weakref import WeakKeyDictionary

from memorynetwork import Process, process

MOST_AT_ONCE = 1_000_000
"""Callbacks without progress of time: code that spins."""

COLLECTED = 10_000
"""After as many callbacks garbage is collected, and never else: what ends with it ends at the same moment."""

_LATE = 1e-6


class VirtualLoop(asyncio.BaseEventLoop):
    """Time passes when nothing is left to do. Threads do their work at once."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0
        self._since_progress = 0
        self.handled = 0
        """Callbacks that have run."""
        self.digest = 0
        """The digest of all callbacks in their order."""
        self.trace: TextIO | None = None
        """Has a line for each of them."""
        self._timers: list[tuple[float, int, Process, asyncio.TimerHandle]] = []
        """A heap of what is due, by time and number, with the process by whose clock it is."""
        self._numbers = count()
        self._slept: dict[Process, float] = {}
        self._kept: dict[Process, list[asyncio.Handle]] = {}
        self._buried: list[asyncio.Task[Any]] = []
        self._owners: WeakKeyDictionary[asyncio.Task[Any], Process] = WeakKeyDictionary()
        self.faults: list[dict[str, Any]] = []
        """What went wrong without anybody to tell, as asyncio describes it."""

    # Time

    @property
    def everywhere(self) -> float:
        """Seconds that have passed, with those that machines have slept."""
        return self._now

    def time(self) -> float:
        """Seconds that the running process's machine was awake."""
        return self._now - self._slept.get(process.get(_NOBODY), 0.0)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        owner = process.get(_NOBODY)
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when + self._slept.get(owner, 0.0), next(self._numbers), owner, handle))
        return handle

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    # Processes

    def go_on(self, one: Process, *, asleep: float = 0.0) -> None:
        """The process runs again; for its clock `asleep` seconds did not pass."""
        self._ready.extend(self._kept.pop(one, ()))
        if asleep:
            self._slept[one] = self._slept.get(one, 0.0) + asleep
            self._timers = [
                (when + asleep if owner is one else when, number, owner, handle)
                for when, number, owner, handle in self._timers
            ]
            heapq.heapify(self._timers)

    def bury(self, one: Process) -> None:
        """Forgets what a killed process had to do. Its tasks stay as they are until the loop is closed."""
        self._buried += [task for task, owner in self._owners.items() if owner is one and not task.done()]
        self._kept.pop(one, None)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        made = _Task(next(self._numbers), coro, loop=self, **options)
        context = options.get("context")
        owner = process.get(_NOBODY) if context is None else context.get(process, _NOBODY)
        self._owners[made] = owner  # a task's own context is known only since Python 3.12
        return made

    # What asyncio's loops do

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        while not ready:
            if not timers:
                raise RuntimeError("everything waits, and nothing will happen any more")
            when, _, _, handle = heapq.heappop(timers)
            if handle._cancelled:
                continue
            if when > self._now:
                # A little later, for a sum of floats may leave too little to wait for: no time would pass.
                self._now, self._since_progress = when + _LATE, 0
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            owner = handle._context.get(process)
            if owner is not None and (owner.ended or owner.stands):
                if not owner.ended:
                    self._kept.setdefault(owner, []).append(handle)
                continue
            self.handled += 1
            self._tell(handle, owner)
            self._since_progress += 1
            try:
                handle._context.run(handle._callback, *handle._args)  # as `_run`, which asks more
            except Exception as error:
                self.call_exception_handler({"message": f"a callback failed: {handle}", "exception": error})
            if self.handled % COLLECTED == 0:
                gc.collect()
        if self._since_progress > MOST_AT_ONCE:
            raise RuntimeError("something spins: a million callbacks while no time passes")

    def _tell(self, handle: asyncio.Handle, owner: Process | None) -> None:
        callback: Any = handle._callback
        of = getattr(callback, "__self__", None)
        if isinstance(of, asyncio.Task):
            callback = of.get_coro()
        name = getattr(callback, "__qualname__", "")
        line = f"{self._now!r} {owner.name if owner is not None else '-'} {name}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        if self.trace is not None:
            self.trace.write(f"{line}\n")

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: Any) -> None:
        pass

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        pass

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, None]) -> None:
        # Outside of the process in which it was collected: that may have ended, and would not close it.
        Context().run(super()._asyncgen_finalizer_hook, agen)  # type: ignore[misc]

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_closed():
            self.faults.append(context)

    def close(self) -> None:
        super().close()
        self._buried.clear()
        self._kept.clear()
        self._timers.clear()


class _Task(asyncio.Task[Any]):
    """A task whose number decides its place in a set: a group cancels its tasks in the order of a set."""

    def __init__(self, number: int, coro: Any, **options: Any) -> None:
        self.number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number


class _Nobody(Process):
    def __init__(self) -> None:
        self.name, self.host = "nobody", ""
        self.ended = self.stands = False


_NOBODY = _Nobody()
