"""Threads beside the compute loop: results on their way out, and records on their way in.

One thread waits for results and hands them on. So a stage's next graph is built while the device computes the
last one, and results leave at once. At the head another thread receives tokens, so that the gateway hears of
them while the compute loop is busy.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from statistics import median
from typing import TypeVar

from sealring.mesh.clock import AwakeClock, Clock
from sealring.mesh.errors import DeadlineExceeded, EpochEnded, Internal
from sealring.node.engine.records import Incoming
from sealring.node.engine.transfer import SendBuffer
from sealring.node.wire.channel import EngineChannel, Kind
from sealring.node.wire.timelog import TimeLog, now

LAUNCHES = 4
"""Launched results at once; the compute loop waits before it launches more."""

TRACE_LENGTH = 4096

T = TypeVar("T")
OnError = Callable[[BaseException], None]


@dataclass(slots=True)
class StepTimes:
    """The times of one step on one member, `time.perf_counter` seconds."""

    step: int
    started: float
    built: float = 0.0
    """The time at which its graph is complete: before its input arrives, unless the stage awaits it."""
    fed: float = 0.0
    """The time at which its input has arrived."""
    launched: float = 0.0
    ready: float = 0.0
    sent: float = 0.0
    decode: bool = False


PACE_STEPS = 32
"""Decode steps that a member's pace is measured by: about a second of them."""


def step_us(steps: Sequence[StepTimes]) -> int:
    """Median microseconds that the device took for the last decode steps; 0 for fewer than `PACE_STEPS`.

    A step's time begins when its input has arrived and the step before is ready. `steps`: oldest first.
    """
    last = steps[-2 * PACE_STEPS :]
    took = [one.ready - max(one.fed, before.ready) for before, one in pairwise(last) if one.decode]
    return int(1e6 * median(took)) if len(took) >= PACE_STEPS else 0


class DeviceWaits:
    """Waits for the device, to tell one that hangs from one that computes: MLX's waits have no timeout.

    `clock` counts the time in which this process could run. Only `seconds` reads it.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or AwakeClock()
        self._waiting: set[int] = set()
        self._answers = self._seen = 0
        self._since = self._clock()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Marks the calling thread as waiting for the device."""
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            yield
        finally:
            self._answers += 1
            self._waiting.discard(thread)

    def seconds(self) -> float:
        """Seconds in which a thread waited at each call and the device answered none; for one caller."""
        now, answers = self._clock(), self._answers
        if not self._waiting or answers != self._seen:
            self._seen, self._since = answers, now
        return now - self._since


class Outbox:
    """Waits for launched results, in order, and passes their bytes to `sink`, but those without a label."""

    def __init__(self, sink: Callable[[object, list[memoryview]], None], on_error: OnError) -> None:
        self.waits = DeviceWaits()
        self._sink = sink
        self._on_error = on_error
        self._queue: SimpleQueue[tuple[object | None, SendBuffer, StepTimes] | None] = SimpleQueue()
        self._credits: SimpleQueue[None] = SimpleQueue()
        for _ in range(LAUNCHES):
            self._credits.put(None)
        self.trace: deque[StepTimes] = deque(maxlen=TRACE_LENGTH)
        self._ready = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, label: object | None, results: SendBuffer, times: StepTimes) -> None:
        """Takes launched results, waiting while there are `LAUNCHES`. Raises EpochEnded."""
        self._credits.get()
        self._check()
        self._queue.put((label, results, times))

    def wait_for(self, times: StepTimes) -> None:
        """Waits until the device has computed the results that were put with `times`. Raises EpochEnded."""
        with self._ready:
            self._ready.wait_for(lambda: times.ready or self._over)
        self._check()

    def _check(self) -> None:
        if self._over:
            raise EpochEnded("the epoch ended while results were under way")

    def end(self) -> None:
        """Wakes every thread that waits here; results under way are dropped."""
        self._over = True
        self._queue.put(None)
        self._credits.put(None)
        with self._ready:
            self._ready.notify_all()

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None and not self._over:
                label, results, times = item
                with self.waits.one():
                    buffers = results.wait()
                with self._ready:
                    times.ready = times.sent = time.perf_counter()
                    self._ready.notify_all()
                if label is not None:
                    self._sink(label, buffers)
                    times.sent = time.perf_counter()
                self.trace.append(times)
                results.release()
                del item, results, buffers
                self._credits.put(None)
        except BaseException as error:
            self._on_error(error)


class Intake:
    """Announced records, received by the compute loop itself when it needs them.

    A thread that received them ahead would be one more to wake on a record's way.
    """

    def __init__(self, channel: EngineChannel, deadline: float) -> None:
        self._channel = channel
        self._deadline = deadline
        self.copied = TimeLog(3)
        """Step, begin and end, nanoseconds, of each record that was taken in."""

    def announce(self, records: Sequence[Incoming]) -> None:
        for record in records:
            self._channel.expect(record.header)

    def take(self, kind: Kind, use: Callable[[memoryview], T]) -> T:
        """Passes the next record's payload to `use` and returns its result.

        Raises EpochEnded, DeadlineExceeded when no record arrives, Internal for one of another kind.
        """
        try:
            received = self._channel.receive(self._deadline)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no record came within {self._deadline:g} s",
                reason="RECORD_OVERDUE",
                hint="a member of the ring hangs; the epoch must end",
            ) from None
        begun, step = now(), received.header.step
        try:
            if received.header.kind != kind:
                raise Internal("another record came than the one that was announced")
            return use(received.data)
        finally:
            received.release()
            self.copied.add(step, begun, now())


class Inbox:
    """At the head: a thread receives announced records in order and passes each to `unpack`."""

    def __init__(
        self, channel: EngineChannel, unpack: Callable[[Incoming, memoryview], None], on_error: OnError
    ) -> None:
        self._channel = channel
        self._unpack = unpack
        self._on_error = on_error
        self._announced: SimpleQueue[Incoming | None] = SimpleQueue()
        self.copied = TimeLog(3)
        """Step, begin and end, nanoseconds, of each record that was taken in."""
        self._over = False
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)
        self._thread.start()

    def announce(self, records: Sequence[Incoming]) -> None:
        for record in records:
            self._channel.expect(record.header)
            self._announced.put(record)

    def end(self) -> None:
        self._over = True
        self._announced.put(None)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while (record := self._announced.get()) is not None and not self._over:
                received = self._channel.receive()
                begun = now()
                try:
                    self._unpack(record, received.data)
                finally:
                    received.release()
                self.copied.add(record.header.step, begun, now())
        except BaseException as error:
            self._on_error(error)
