"""Sources: where a member's rows and the inputs of its steps come from."""

from __future__ import annotations

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.composition import (
    Change,
    Chunk,
    Eviction,
    ResolvedStep,
    Settling,
)
from sealring.node.engine import records
from sealring.node.engine.borders import Border
from sealring.node.engine.caches import Cache
from sealring.node.engine.drafts.guesses import GuessesAhead
from sealring.node.engine.drafts.runs import Runs
from sealring.node.engine.drafts.source import Proposed
from sealring.node.engine.drafts.sources import Sources
from sealring.node.engine.feedback import LocalFeedback, RingFeedback
from sealring.node.engine.logprobs import unpack
from sealring.node.engine.records import Incoming
from sealring.node.engine.staging import ShardSpec, StageSpec
from sealring.node.engine.staging.layout import TOKENS, TensorSpec
from sealring.node.engine.threads import Inbox, Intake
from sealring.node.engine.transfer import ReceiveBuffer, Transfer
from sealring.node.engine.vision.prefilling import Images
from sealring.node.wire.channel import EngineChannel, Kind
from sealring.node.wire.timelog import TimeLog
from sealring.v1 import control_pb2 as control

from .exits import LinkExit, Prompts

_ROUNDS = 8
"""Rounds of which the shortest says how long the head will wait for its tokens."""


def _nothing() -> None: ...


class Input(NamedTuple):
    """Arrays to call a stage on. `arrive` waits for the content of `buffer`, if any, and puts it
    there."""

    arrays: list[mx.array]
    buffer: ReceiveBuffer | None = None
    arrive: Callable[[], None] = _nothing


class Source(ABC):
    """One member's rows and inputs. `announce` is called by the thread that reads commands, the rest by the
    compute thread."""

    guesses = False
    """Whether steps with drafts are possible."""
    copied: TimeLog | None = None
    """Step, begin and end, nanoseconds, of each record that was taken in."""
    runs: Runs | None = None
    """The runs of drafts, at the head."""

    def announce(self, step: ResolvedStep) -> None:  # noqa: B027
        """Announces the records that the step brings to the channel."""

    @abstractmethod
    def begin(self, chunk: Chunk) -> bytes:
        """A row begins with its first chunk: its parameter record, b"" if it has none.

        Raises InvalidInput (BAD_STEP) if the chunk does not fit the row that was opened.
        """

    @abstractmethod
    def chunk(self, step: ResolvedStep, chunk: Chunk) -> Input:
        """The input of a prompt's chunk. Raises InvalidInput (BAD_STEP) if it does not fit its row."""

    @abstractmethod
    def decode(self, step: ResolvedStep) -> Input:
        """The last tokens of a lane's rows, or the stage state for them."""

    def verify(self, step: ResolvedStep) -> Input:
        """Each row's last token and the drafts behind it, or further drafts, or the stage state for them."""
        raise no_drafts()

    def take_over(self, chunk: Chunk, row: Cache) -> None:  # noqa: B027
        """Takes what the member before has computed of a row's chunk with doubled layers, once the chunks of
        the step are launched."""

    def launched(self, step: ResolvedStep, tokens: mx.array | None) -> None:  # noqa: B027
        """Notes a launched step; `tokens` are the sampled ones if this member samples."""

    def work(self) -> bool:
        """Does something that can wait; False if there is nothing."""
        return False

    def change(self, change: Change) -> None:  # noqa: B027
        """Follows a change, before the caches do.

        Raises InvalidInput (BAD_STEP) for a prefix that must not be kept, or drafts counted otherwise.
        """

    def end(self) -> None:  # noqa: B027
        """Wakes every thread that waits here; any thread."""

    def join(self, timeout: float) -> None:  # noqa: B027
        """Waits until the source's own thread has ended."""


class _Opened(Source):
    """Rows that were opened at this member."""

    def __init__(self, prompts: Prompts, images: Images | None = None) -> None:
        self._prompts = prompts
        self._images = images
        self.runs = self._runs = Runs()

    def begin(self, chunk: Chunk) -> bytes:
        self._prompts.begin(chunk)
        record = self._prompts.parameters(chunk.row)
        if len(record) != chunk.params_bytes:
            raise bad_chunk(chunk)
        return record

    def chunk(self, step: ResolvedStep, chunk: Chunk) -> Input:
        tokens = self._prompts.prompt(chunk.row)
        if chunk.end > len(tokens) or chunk.last != (chunk.end == len(tokens)):
            raise bad_chunk(chunk)
        arrays = [mx.array(tokens[None, chunk.start : chunk.end])]
        if self._images is not None and (pictures := self._prompts.pictures(chunk.row)):
            if any(one.start < edge < one.end for one in pictures for edge in (chunk.start, chunk.end)):
                raise bad_chunk(chunk)
            fail = partial(self._prompts.fail, chunk.row)
            arrays += self._images.inputs(chunk.row, pictures, chunk.start, chunk.end, fail)
        if chunk.last:
            self._prompts.prefilled(chunk.row)
        return Input(arrays)

    def change(self, change: Change) -> None:
        if isinstance(change, Settling):
            self._runs.settle(change, ended=self._prompts.ended(change.row))
        elif isinstance(change, Eviction):
            self._runs.forget(change.row)
            if self._images is not None:
                self._images.forget(change.row)
        self._prompts.change(change)


class _Sampling(Source):
    """The source of a member that samples: its rows' last tokens never leave the device."""

    _feedback: LocalFeedback

    def decode(self, step: ResolvedStep) -> Input:
        return Input([self._feedback.inputs(step.rows)])

    def launched(self, step: ResolvedStep, tokens: mx.array | None) -> None:
        self._feedback.launched(step, tokens)

    def change(self, change: Change) -> None:
        self._feedback.change(change)
        super().change(change)

    def end(self) -> None:
        self._feedback.end()


class Alone(_Sampling, _Opened):
    """The source of a ring of one."""

    def __init__(self, prompts: Prompts, images: Images | None = None) -> None:
        super().__init__(prompts, images)
        self._feedback = LocalFeedback()


class Head(_Opened):
    """The source of a ring's head; a thread of its own receives the tokens that the tail samples."""

    guesses = True

    def __init__(
        self,
        spec: StageSpec,
        prompts: Prompts,
        channel: EngineChannel,
        moves: Transfer,
        deadline: float,
        fail: Callable[[BaseException], None],
        sources: Sources | None = None,
        images: Images | None = None,
    ) -> None:
        """`sources`: of drafts; None where none may be made."""
        super().__init__(prompts, images)
        self._sources = sources or Sources()
        self._workers = self._sources.workers.values()
        self._guessing = self._sources.at_head
        self._spec = spec
        self._transfer = moves
        self._feedback = RingFeedback(deadline, self.work)
        self._inbox = Inbox(channel, self._unpack, fail)
        self.copied = self._inbox.copied
        self._rounds: deque[float] = deque(maxlen=_ROUNDS)
        self._launched: dict[int, float] = {}  # step under way that samples -> when it was launched

    def announce(self, step: ResolvedStep) -> None:
        if step.drafts and step.source not in self._guessing:
            raise no_source(step.source)
        asking = self._prompts.asking(step.sampled, first=not step.rows)
        self._inbox.announce(records.incoming(step, self._spec, asking))

    def decode(self, step: ResolvedStep) -> Input:
        self._before(step, step.rows)
        buffer = self._transfer.receive_buffer(self._spec.receives, len(step.rows), 1)
        return Input(buffer.arrays, buffer, lambda: buffer.fill(memoryview(self._last(step))))

    def _last(self, step: ResolvedStep) -> bytes:
        return self._feedback.last(step.rows)

    def chunk(self, step: ResolvedStep, chunk: Chunk) -> Input:
        self._before(step, [chunk.row])
        return super().chunk(step, chunk)

    def _before(self, step: ResolvedStep, rows: Sequence[int]) -> None:
        for worker in self._workers:
            worker.before(step, rows, self._prompts)

    def verify(self, step: ResolvedStep) -> Input:
        self._before(step, step.rows)
        return Input([mx.array(self._drafted(step), mx.uint32)])

    def _drafted(self, step: ResolvedStep) -> list[list[int]]:
        if step.continues:
            return [self._runs.go_on(step)]
        last = np.frombuffer(self._feedback.last(step.rows), np.uint32).tolist()
        worker = self._sources.workers.get(step.source)
        if worker is not None:
            worker.complete(step)
        return [
            self._runs.begin(step, row, token, self._proposed(step, row, token))
            for row, token in zip(step.rows, last, strict=True)
        ]

    def _proposed(self, step: ResolvedStep, row: int, last: int) -> Proposed:
        """Drafts behind a row's last token. A row of which nothing may be guessed has none: what is right
        would tell the gateway what it is not to know."""
        source = self._prompts.source(row, step.source)
        if source is None:
            if self._prompts.gone(row):
                return Proposed((), lambda at, count: [last] * count)
            raise no_source(step.source)
        worker = self._sources.workers.get(step.source)
        if worker is not None:
            return worker.propose(row, lambda: not self._runs.broken(row))
        return source.propose(last, step.drafts)

    def launched(self, step: ResolvedStep, tokens: mx.array | None) -> None:
        self._feedback.launched(step, tokens)
        if self._workers and step.rows:
            self._launched[step.number] = time.perf_counter()

    def work(self) -> bool:
        """Lets sources guess that are done before the tokens are there that the head waits for."""
        return any(worker.work(self._spare()) for worker in self._workers)

    def _spare(self) -> float:
        """Seconds until tokens come, by the shortest of the last rounds."""
        under_way = list(self._launched.values())
        if not under_way or not self._rounds:
            return math.inf
        return min(under_way) + min(self._rounds) - time.perf_counter()

    def change(self, change: Change) -> None:
        super().change(change)
        self._feedback.change(change)
        for worker in self._workers:
            worker.change(change)

    def end(self) -> None:
        self._inbox.end()
        self._feedback.end()

    def join(self, timeout: float) -> None:
        self._inbox.join(timeout)

    def _unpack(self, record: Incoming, data: memoryview) -> None:
        """Passes a record of tokens on to the next step and to the prompts. The inbox's thread."""
        words = np.frombuffer(data, np.uint32)
        step, tokens = record.step, words[: record.rows].tolist()
        behind = record.rows + step.guesses * len(step.rows)
        guessed, report = words[record.rows : behind].reshape(len(step.rows), step.guesses), words[behind:]
        launched = self._launched.pop(step.number, None)
        if launched is not None:
            self._rounds.append(time.perf_counter() - launched)
        logprobs = unpack(record.asking, report) if record.asking else {}
        refuted = False
        if step.drafts:
            counted = self._runs.came(step, tokens)
            refuted = self._runs.broken(step.rows[0])
            tokens = [tokens[at] for at in counted]
            logprobs = {place: logprobs[at] for place, at in enumerate(counted) if at in logprobs}
            step = dataclasses.replace(step, sampled=tuple(step.sampled[at] for at in counted))
        for row, ahead in zip(step.rows, guessed.tolist(), strict=True) if step.guesses else ():
            guesses = self._prompts.source(row, step.source)
            if isinstance(guesses, GuessesAhead):
                guesses.offer(step.sampled.count(row), ahead)
        self._feedback.arrived(step, tokens)
        self._prompts.deliver(step, tokens, logprobs, refuted=refuted)
        for worker in self._workers:
            worker.wake()


class Neighbour(Source):
    """The source of a member that is not the head: records of the member before it."""

    guesses = True

    def __init__(
        self,
        spec: StageSpec,
        channel: EngineChannel,
        moves: Transfer,
        deadline: float,
        prompts: StageSpec | None = None,
        border: Border | None = None,
    ) -> None:
        """`prompts` are the layers that compute prompts, if others, and `border` that with the member
        before."""
        self._spec = spec
        self._prompts = prompts or spec
        self._border = border
        self._transfer = moves
        self._intake = Intake(channel, deadline)
        self.copied = self._intake.copied

    def announce(self, step: ResolvedStep) -> None:
        found = records.incoming(step, self._prompts if step.chunks else self._spec)
        if self._border is not None:
            for chunk in step.chunks:
                found.append(records.Incoming(self._border.record(step, chunk), step, 1, chunk.tokens))
        self._intake.announce(found)

    def take_over(self, chunk: Chunk, row: Cache) -> None:
        if (border := self._border) is not None:
            self._intake.take(Kind.CACHES, lambda data: border.fill(row, chunk, data))

    def begin(self, chunk: Chunk) -> bytes:
        return self._intake.take(Kind.SAMPLING, bytes) if chunk.params_bytes else b""

    def chunk(self, step: ResolvedStep, chunk: Chunk) -> Input:
        return self._state(self._prompts.receiving(chunk.taps), 1, chunk.tokens)

    def decode(self, step: ResolvedStep) -> Input:
        return self._state(self._spec.receiving(step.taps), len(step.rows), 1)

    def verify(self, step: ResolvedStep) -> Input:
        return self._state(self._spec.receiving(step.taps), len(step.rows), 1 + step.drafts)

    def _state(self, tensors: Sequence[TensorSpec], rows: int, tokens: int) -> Input:
        buffer = self._transfer.receive_buffer(tensors, rows, tokens)
        return Input(buffer.arrays, buffer, partial(self._intake.take, Kind.ACTIVATIONS, buffer.fill))


# Ranks of a tensor ring, each of which computes a part of every layer


class ShardHead(Head):
    """The head's source in a tensor ring. Every rank needs the tokens that it computes with.

    They are passed on before they are computed with, because the ranks have to compute at the same time.
    """

    guesses = False

    def __init__(
        self,
        spec: ShardSpec,
        prompts: Prompts,
        channel: EngineChannel,
        moves: Transfer,
        deadline: float,
        fail: Callable[[BaseException], None],
        link: LinkExit,
    ) -> None:
        super().__init__(spec, prompts, channel, moves, deadline, fail)
        self._shard = spec
        self._link = link

    def chunk(self, step: ResolvedStep, chunk: Chunk) -> Input:
        found = super().chunk(step, chunk)
        _pass_prompt_on(self._link, step, chunk, np.array(found.arrays[0]).tobytes())
        return found

    def _last(self, step: ResolvedStep) -> bytes:
        tokens = super()._last(step)
        _pass_last_on(self._link, self._shard, step, tokens)
        return tokens


class ShardNeighbour(Neighbour):
    """The source of a rank that is not the first: tokens of the rank before it, passed on to the next."""

    guesses = False

    def __init__(
        self, spec: ShardSpec, channel: EngineChannel, moves: Transfer, deadline: float, link: LinkExit
    ) -> None:
        super().__init__(spec, channel, moves, deadline)
        self._shard = spec
        self._link = link

    def chunk(self, step: ResolvedStep, chunk: Chunk) -> Input:
        tokens = self._intake.take(Kind.ACTIVATIONS, bytes)
        if not self._shard.is_tail:
            _pass_prompt_on(self._link, step, chunk, tokens)
        return Input([mx.array(np.frombuffer(tokens, np.uint32)[None])])

    def decode(self, step: ResolvedStep) -> Input:
        buffer = self._transfer.receive_buffer(self._spec.receives, len(step.rows), 1)
        return Input(buffer.arrays, buffer, lambda: buffer.fill(memoryview(self._last(step))))

    def _last(self, step: ResolvedStep) -> bytes:
        tokens = self._intake.take(Kind.ACTIVATIONS, bytes)
        _pass_last_on(self._link, self._shard, step, tokens)
        return tokens


class ShardTail(_Sampling, ShardNeighbour):
    """The source of the last rank, which has sampled the last tokens itself."""

    def __init__(
        self, spec: ShardSpec, channel: EngineChannel, moves: Transfer, deadline: float, link: LinkExit
    ) -> None:
        super().__init__(spec, channel, moves, deadline, link)
        self._feedback = LocalFeedback()


def _pass_prompt_on(link: LinkExit, step: ResolvedStep, chunk: Chunk, tokens: bytes) -> None:
    link.pass_on(records.state_record(step, [TOKENS], 1, chunk.tokens), tokens)


def _pass_last_on(link: LinkExit, shard: ShardSpec, step: ResolvedStep, tokens: bytes) -> None:
    if shard.rank + 2 < shard.ranks:  # the tail has sampled them
        link.pass_on(records.state_record(step, [TOKENS], len(step.rows), 1), tokens)


def no_source(source: control.DraftSource.ValueType) -> InvalidInput:
    """The error of a step with drafts of a source that guesses nothing of its rows."""
    return InvalidInput(f"source {source} of drafts guesses nothing here", reason="BAD_STEP")


def no_drafts() -> InvalidInput:
    """The error of a step with drafts at a member whose source has none."""
    return InvalidInput("a ring of one and a tensor ring guess no tokens", reason="BAD_STEP")


def bad_chunk(chunk: Chunk) -> InvalidInput:
    """The error of a chunk that contradicts its row."""
    return InvalidInput(
        f"a chunk of row {chunk.row} does not fit the row that was opened",
        reason="BAD_STEP",
        hint="gateway and head disagree; the epoch must end",
    )
