"""Exits, which take a member's results by a thread that waits for them, and the head's prompts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sealring.mesh.errors import SealringError
from sealring.mesh.ring.composition import Change, Chunk, ResolvedStep
from sealring.node.engine import records
from sealring.node.engine.drafts.source import Rows
from sealring.node.engine.logprobs import Asking, TokenLogprobs, unpack
from sealring.node.engine.receipts import Places, Sampled, bring
from sealring.node.engine.text.picture import Picture
from sealring.node.engine.threads import DeviceWaits, Outbox, StepTimes
from sealring.node.engine.transfer import SendBuffer, SharedSendBuffer
from sealring.node.wire.channel import EngineChannel, RecordHeader


class Prompts(Rows, Protocol):
    """Rows that clients opened at the head: their prompts, and the receiver of their tokens."""

    def prompt(self, row: int) -> npt.NDArray[np.uint32]:
        """The tokens of an opened row's prompt. Raises InvalidInput for a row that was not opened."""

    def gone(self, row: int) -> bool:
        """Whether the row is not open any more; steps that compute it may still come."""

    def ended(self, row: int) -> bool:
        """Whether the row's answer has ended, so that no further token of it counts."""

    def pictures(self, row: int) -> Sequence[Picture]:
        """The images of an opened row's prompt, in order."""

    def prefilled(self, row: int) -> None:
        """Forgets the row's prompt, which is computed."""

    def fail(self, row: int, error: SealringError) -> None:
        """Ends a row with an error of its own; its steps go on until it is evicted."""

    def begin(self, chunk: Chunk) -> None:
        """A row begins with its first chunk.

        Raises InvalidInput (BAD_STEP) if the chunk has a prefix that is not the row's own.
        """

    def change(self, change: Change) -> None:
        """Follows a change of rows and of kept prefixes. Tokens that come for an evicted row are ignored.

        Raises InvalidInput (BAD_STEP) for a prefix that must not be kept.
        """

    def asking(self, rows: Sequence[int], *, first: bool) -> Asking:
        """The step's sampled rows that ask for log-probabilities; `first` if it is their first token."""

    def deliver(
        self,
        step: ResolvedStep,
        tokens: list[int],
        logprobs: Mapping[int, TokenLogprobs],
        *,
        refuted: bool = False,
    ) -> None:
        """Takes a step's tokens, or none when it was executed and samples none.

        They are as many as `step.sampled`, or fewer after drafts. `logprobs` are those of the rows that ask,
        by index in `tokens`. `refuted`: the draft behind them is wrong.
        """


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

    def filled(self, results: SendBuffer, times: StepTimes) -> None:
        """Takes launched results that go nowhere: what a chunk leaves in the caches."""
        self._outbox.put(None, results, times)

    def wait_for(self, times: StepTimes) -> None:
        """As `Outbox.wait_for`."""
        self._outbox.wait_for(times)

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

    def __init__(
        self, channel: EngineChannel, fail: Callable[[BaseException], None], sampled: Sampled | None = None
    ) -> None:
        """`sampled`: at the tail, notes tokens of rows that ask for a receipt."""
        self._channel = channel
        self._sampled = sampled
        super().__init__(fail)

    def tokens(self, step: ResolvedStep, asking: Asking, results: SendBuffer, times: StepTimes) -> None:
        header = records.tokens_record(step, asking)
        places = self._sampled.places(step) if self._sampled is not None else ()
        self._outbox.put((header, places) if places else header, results, times)

    def send(self, header: RecordHeader, results: SendBuffer, times: StepTimes) -> None:
        """Sends results as a record."""
        self._outbox.put(header, results, times)

    def pass_on(self, header: RecordHeader, data: bytes) -> None:
        """Sends bytes that are at hand."""
        self.send(header, SharedSendBuffer([data]), StepTimes(header.step, time.perf_counter()))

    def _deliver(self, label: object, buffers: list[memoryview]) -> None:
        places: Places = ()
        if not isinstance(label, RecordHeader):
            assert isinstance(label, tuple)
            label, places = label
        bring(places, np.frombuffer(buffers[0], np.uint32).tolist() if places else ())
        assert isinstance(label, RecordHeader)
        self._channel.send(label, *buffers)
