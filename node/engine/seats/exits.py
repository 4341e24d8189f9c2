"""Exits: where a member's results go, by a thread that waits for them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import numpy as np

from sealring.mesh.ring.composition import ResolvedStep
from sealring.node.engine import records
from sealring.node.engine.logprobs import Asking, unpack
from sealring.node.engine.threads import DeviceWaits, Outbox, StepTimes
from sealring.node.engine.transfer import SendBuffer, SharedSendBuffer
from sealring.node.wire.channel import EngineChannel, RecordHeader

from .prompts import Prompts


class Exit(ABC):
    """Takes launched results from the compute thread."""

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._outbox = Outbox(self._deliver, fail)

    @property
    def waits(self) -> DeviceWaits:
        """The waits for the device, of the outbox's thread and others."""
        return self._outbox.waits

    @property
    def trace(self) -> deque[StepTimes]:
        """The times of the last steps, oldest first."""
        return self._outbox.trace

    @abstractmethod
    def tokens(self, step: ResolvedStep, asking: Asking, results: SendBuffer, times: StepTimes) -> None:
        """Delivers sampled tokens, uint32 [rows], then the log-probabilities that `asking` describes."""

    @abstractmethod
    def _deliver(self, label: object, buffers: list[memoryview]) -> None: ...

    def end(self) -> None:
        """Wakes every thread that waits here and drops what is under way; any thread."""
        self._outbox.end()

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended within `timeout` seconds."""
        return self._outbox.join(timeout)


class OwnExit(Exit):
    """The exit of a ring of one: tokens go to its own prompts."""

    def __init__(self, prompts: Prompts, fail: Callable[[BaseException], None]) -> None:
        self._prompts = prompts
        super().__init__(fail)

    def tokens(self, step: ResolvedStep, asking: Asking, results: SendBuffer, times: StepTimes) -> None:
        self._outbox.put((step, asking), results, times)

    def _deliver(self, label: object, buffers: list[memoryview]) -> None:
        assert isinstance(label, tuple)
        step, asking = label
        tokens = np.frombuffer(buffers[0], np.uint32).tolist()
        logprobs = unpack(asking, np.frombuffer(b"".join(buffers[1:]), np.uint32)) if asking else {}
        self._prompts.deliver(step, tokens, logprobs)


class LinkExit(Exit):
    """The exit of a member of a longer ring: records to the next member."""

    def __init__(self, channel: EngineChannel, fail: Callable[[BaseException], None]) -> None:
        self._channel = channel
        super().__init__(fail)

    def tokens(self, step: ResolvedStep, asking: Asking, results: SendBuffer, times: StepTimes) -> None:
        self.send(records.tokens_record(step, asking), results, times)

    def send(self, header: RecordHeader, results: SendBuffer, times: StepTimes) -> None:
        """Sends results as a record."""
        self._outbox.put(header, results, times)

    def pass_on(self, header: RecordHeader, data: bytes) -> None:
        """Sends bytes that are at hand."""
        self.send(header, SharedSendBuffer([data]), StepTimes(header.step, time.perf_counter()))

    def _deliver(self, label: object, buffers: list[memoryview]) -> None:
        assert isinstance(label, RecordHeader)
        self._channel.send(label, *buffers)
