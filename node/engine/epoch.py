"""Executes the steps of one epoch on one member.

`announce` runs in the thread that reads commands: it derives what a step means and announces the records
that it brings. `execute` runs in the compute thread. `end` may come from any thread and lets everybody go.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import structlog

from sealring.mesh.errors import (
    DeadlineExceeded,
    EpochEnded,
    Internal,
    InvalidInput,
    ResourceExhausted,
    SealringError,
    StageFailed,
)
from sealring.mesh.ring.composition import (
    MAX_UNSETTLED,
    Admission,
    Adopting,
    Chunk,
    Composition,
    Dropping,
    Eviction,
    Keeping,
    ResolvedStep,
    Settling,
)
from sealring.mesh.system import mlx_words
from sealring.node.engine import params, records
from sealring.node.engine.drafts import Runs
from sealring.node.engine.feedback import LocalFeedback, RingFeedback
from sealring.node.engine.grammar import Grammars
from sealring.node.engine.lanes import Lanes, Row
from sealring.node.engine.logprobs import Asking, TokenLogprobs, asking_of, scores, unpack
from sealring.node.engine.params import RowParameters
from sealring.node.engine.prefixes import Prefixes
from sealring.node.engine.records import Incoming
from sealring.node.engine.sampling import Sampler
from sealring.node.engine.staging import ShardSpec, Stage
from sealring.node.engine.staging.caches import Cache
from sealring.node.engine.staging.layout import TOKENS
from sealring.node.engine.threads import LAUNCHES, Inbox, Intake, Outbox, StepTimes, step_us
from sealring.node.engine.trace import engine_trace
from sealring.node.engine.transfer import Departure, Landing, SharedDeparture, transfer
from sealring.node.wire.channel import EngineChannel
from sealring.node.wire.headers import Kind, RecordHeader
from sealring.v1 import control_pb2 as control
from sealring.v1 import trace_pb2

log = structlog.get_logger()

RECORD_DEADLINE = 120.0
"""Seconds that a member waits for a record whose step was announced."""

MAX_STEPS_AHEAD = 1024
"""Steps that may be announced and not computed yet; a gateway announces two for each lane."""

_SETTLE_EVERY = 64
"""Decode steps of a lane after which its caches are evaluated whole, also what no output needs."""

SCORED_AT_ONCE = 64
"""Tokens of a prompt whose logits are made at once, where they are asked for."""

_JOIN_SECONDS = 2.0

_NO_MEMORY = re.compile(
    r"unable to allocate|attempting to allocate|out ?of ?memory|insufficient memory|::malloc", re.I
)
"""How MLX says so, which has one kind of error for everything; on a CPU the process ends instead."""

_GPU_RESET = re.compile(r"kIOGPUCommandBufferCallbackError(?!OutOfMemory)(\w{1,40})")
"""How Metal says that it broke off what it computed: Timeout, Hang, PageFault, ImpactingInteractivity, or
InnocentVictim of another program's."""


class Prompts(Protocol):
    """The head's text side, as the epoch sees it."""

    def prompt(self, row: int) -> npt.NDArray[np.uint32]:
        """The tokens of an opened row's prompt. Raises InvalidInput for a row that was not opened."""

    def parameters(self, row: int) -> bytes:
        """The row's parameter record."""

    def drafts(self, row: int, last: int, count: int) -> list[int]:
        """So many tokens that may follow the row's `last` one. Raises InvalidInput (BAD_STEP) for a row that
        was opened without drafts."""

    def prefilled(self, row: int) -> None:
        """The row's prompt is not needed any more."""

    def keep(self, keeping: Keeping) -> None:
        """A row's first tokens are kept. Raises InvalidInput (BAD_STEP) unless they may be."""

    def adopt(self, adopting: Adopting) -> None:
        """A prefix of an earlier epoch is kept in this one. Raises InvalidInput (BAD_STEP)."""

    def reuse(self, chunk: Chunk) -> None:
        """A row begins with a kept prefix. Raises InvalidInput (BAD_STEP) unless it is the row's own."""

    def drop(self, prefix: int) -> None:
        """A prefix is not kept any more."""

    def forget(self, row: int) -> None:
        """The row was evicted; tokens of it may still come and are of no interest."""

    def asking(self, rows: Sequence[int], *, first: bool) -> Asking:
        """Which of a step's sampled rows ask for log-probabilities; `first` where it is their first token."""

    def deliver(self, step: ResolvedStep, tokens: list[int], logprobs: Mapping[int, TokenLogprobs]) -> None:
        """A step's tokens have come round, or it was executed and has none: as many as `step.sampled`, or
        fewer where they follow drafts.

        `logprobs` by the index among them, of the rows that ask.
        """


@dataclass(frozen=True)
class Allowance:
    """What this member gives for caches, in bytes. The gateway plans by these figures; here they hold."""

    per_token: int
    per_row: int
    budget: int

    def check(self, composition: Composition) -> None:
        """Raises ResourceExhausted (KV_BUDGET) where rows and kept prefixes take an eighth too much."""
        held = self.per_token * composition.tokens + self.per_row * composition.rows
        if held > self.budget + self.budget // 8:
            raise ResourceExhausted(
                f"the gateway asks for {held} bytes of caches and this member offers {self.budget}",
                hint="run the same release on gateway and nodes",
                reason="KV_BUDGET",
            )


class StageEpoch:
    """One life of a ring, on one member: its rows, its lanes and its place on the links.

    `channel` is None in a ring of one, `prompts` is given at the head only, `grammars` at the tail. Unless
    the deployment wants it to `speculate`, steps with drafts are refused, and to say what repeats.
    `on_fault` is called once, by any thread, when the epoch cannot go on, and never after `end`.
    """

    def __init__(
        self,
        number: int,
        stage: Stage,
        *,
        prefill_chunk: int,
        max_rows: int,
        allowance: Allowance,
        channel: EngineChannel | None,
        prompts: Prompts | None,
        prefixes: Prefixes,
        grammars: Grammars | None = None,
        speculate: bool = False,
        on_fault: Callable[[BaseException], None],
        deadline: float = RECORD_DEADLINE,
    ) -> None:
        self.number = number
        self.steps = 0
        self._stage = stage
        self._spec = stage.spec
        self._channel = channel
        self._prompts = prompts
        self._grammars = grammars
        self._on_fault = on_fault
        self._allowance = allowance
        self._speculate = speculate
        self._composition = Composition(epoch=number, max_rows=max_rows, prefill_chunk=prefill_chunk)
        self._lanes = Lanes()
        self._runs = Runs()
        self._transfer = transfer()
        self._prefixes = prefixes
        self._failed = False
        self._over = False
        self._over_lock = threading.Lock()
        self._feedback: LocalFeedback | RingFeedback | None = None
        self._shard = self._spec if isinstance(self._spec, ShardSpec) else None
        if channel is None or (self._shard is not None and self._spec.is_tail):
            self._feedback = LocalFeedback()
        elif self._spec.is_head:
            self._feedback = RingFeedback(deadline)
        self._outbox = Outbox(self._deliver_own if channel is None else self._send, self.fail)
        self._inbox: Inbox | None = None
        self._intake: Intake | None = None
        if channel is not None and self._spec.is_head:
            self._inbox = Inbox(channel, self._unpack, self.fail)
        elif channel is not None:
            self._intake = Intake(channel, deadline)

    @property
    def over(self) -> bool:
        return self._over

    @property
    def trace(self) -> list[StepTimes]:
        """The times of the last steps, oldest first; a prompt's are told by chunk."""
        while True:
            try:
                return list(self._outbox.trace)
            except RuntimeError:  # one was added meanwhile
                continue

    def step_us(self) -> int:
        """As `threads.step_us`, of the steps until now. Any thread."""
        return step_us(self.trace)

    def device_seconds(self) -> float:
        """For how long the device has answered nobody who waits. A rank's sums wait for other machines, so 0
        there. One thread."""
        return 0.0 if self._shard is not None else self._outbox.waits.seconds()

    def spans(self, since: int) -> trace_pb2.ProcessTrace:
        """What went on since then, nanoseconds on the machine's monotonic clock. Any thread."""
        taken = self._inbox or self._intake
        trace = engine_trace(self.trace, taken.copied if taken is not None else None, since)
        trace.drafted, trace.accepted = self._runs.since(since)
        return trace

    @property
    def drafts(self) -> tuple[int, int]:
        """At the head: tokens guessed until now, and of them those that were right. Any thread."""
        return self._runs.drafted, self._runs.accepted

    # The thread that reads commands

    def announce(self, step: control.Step) -> ResolvedStep | None:
        """Resolves the next step and announces its records. None when the epoch is over, or now fails."""
        if self._over:
            return None
        try:
            resolved = self._composition.apply(step)
            if resolved.drafts or step.decode.asks:
                self._check_drafts()
            self._allowance.check(self._composition)
            self._check_ahead(resolved.number)
            if (taken := self._inbox or self._intake) is not None:
                asking: Asking = ()
                if self._prompts is not None:
                    asking = self._prompts.asking(resolved.sampled, first=not resolved.rows)
                taken.announce(records.incoming(resolved, self._spec, asking))
        except Exception as error:
            self.fail(error)
            return None
        return resolved

    def _check_drafts(self) -> None:
        """The gateway is not trusted to know: guesses reveal how far an answer repeats what was said."""
        if not self._speculate:
            raise InvalidInput(
                "the gateway wants tokens guessed, and the deployment does not",
                reason="BAD_STEP",
                hint="deploy it with --speculate; a gateway that is not ours may be asking",
            )
        if self._channel is None or self._shard is not None:
            raise InvalidInput("whoever samples alone guesses no tokens", reason="BAD_STEP")
        if not self._prefixes.cuts:
            raise InvalidInput(
                f"the gateway wants tokens guessed, and caches of {self._spec.model_type} cannot be cut",
                reason="BAD_STEP",
                hint="a gateway that is not ours may be asking; this member said so when it attached",
            )

    def _check_ahead(self, step: int) -> None:
        ahead = step - self.steps
        if ahead > MAX_STEPS_AHEAD:
            raise ResourceExhausted(
                f"the gateway announces {ahead} steps ahead",
                hint="run the same release on gateway and nodes",
                reason="TOO_MANY_STEPS",
            )

    # Any thread

    def fail(self, error: BaseException) -> None:
        """The epoch cannot go on; nothing is computed in it any more."""
        if not isinstance(error, EpochEnded | DeadlineExceeded):  # not of a link, but here
            self._failed = True
        if self._stop():
            self._on_fault(error if isinstance(error, SealringError) else self._stage_failed(error))

    def end(self) -> None:
        """Ends the epoch without a fault and wakes every thread that waits in it."""
        self._stop()
        if self._channel is not None:
            self._channel.shut()

    def _stage_failed(self, error: BaseException) -> StageFailed:
        """The error without its own words, which may quote what was computed, unless they are MLX's."""
        spec = self._spec
        where = f"in layers {spec.lo} to {spec.hi - 1}"
        if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
            failed = StageFailed(
                f"there was no memory left for a step {where}",
                hint="send shorter prompts, or lower the node's memory_limit so that less is planned there",
                reason=StageFailed.out_of_memory,
            )
        elif (reset := _GPU_RESET.search(str(error))) is not None:
            failed = StageFailed(
                f"macOS reset the GPU during a step {where} ({reset[1]})",
                hint="if it happens again, end what else uses this GPU, deploy with a smaller prefill chunk, "
                "for shorter steps, or restart the machine",
                reason=StageFailed.gpu_reset,
            )
        else:
            failed = StageFailed(
                f"the code of {spec.model_type} failed {where} ({mlx_words.named(error)})",
                hint="the engine's log says where; if `sealring model check` fails too, it cannot be served",
            )
        failed.__cause__ = error
        return failed

    def _stop(self) -> bool:
        with self._over_lock:
            if self._over:
                return False
            self._over = True
        self._outbox.end()
        if self._inbox is not None:
            self._inbox.end()
        if self._feedback is not None:
            self._feedback.end()
        return True

    # The compute thread

    def close(self) -> None:
        """Ends the epoch and frees its memory."""
        self.end()
        copied = self._outbox.join(_JOIN_SECONDS)
        if self._inbox is not None:
            self._inbox.join(_JOIN_SECONDS)
        if self._channel is not None:
            self._channel.close()
        self.drop()
        if copied:
            self._transfer.close()
        else:  # the outbox reads memory that `close` would free
            log.warning("transfer_left_open")

    def drop(self) -> None:
        """Frees all rows; what was kept of them stays, unless it was computing that failed."""
        self._lanes.clear()
        if self._failed:
            self._prefixes.clear()
            if self._shard is None:  # a rank's sums wait for other ranks, maybe for ever
                self._forget_errors()
        mx.clear_cache()

    def _forget_errors(self) -> None:
        """Waits until nothing is under way any more, and until MLX has handed out what failed of it.

        MLX raises an error in whoever waits for the stream next, once, and each launch that fails leaves
        another: the first step of the next epoch would raise it.
        """
        for _ in range(LAUNCHES + 1):
            try:
                with self._outbox.waits.one():
                    mx.synchronize()
                return
            except RuntimeError as error:
                log.info("gpu_error_forgotten", exc_info=error)

    def execute(self, step: ResolvedStep) -> None:
        """Computes a step; a failure ends the epoch."""
        if self._over:
            return
        try:
            if step.changes:
                self._change(step)
            if step.number == 1:
                self._prefixes.settle()
            if step.drafts:
                self._verify(step)
            elif step.rows:
                self._decode(step)
            elif step.chunks:
                self._prefill(step)
            self.steps = step.number
            if not step.sampled and self._prompts is not None:
                self._prompts.deliver(step, [], {})  # nothing comes round to tell the gateway to go on
        except BaseException as error:
            self.fail(error)
            self.drop()

    def _change(self, step: ResolvedStep) -> None:
        for change in step.changes:
            if isinstance(change, Settling):
                if self._prompts is not None:
                    self._runs.settle(change)
                if isinstance(self._feedback, RingFeedback):
                    self._feedback.settled(change.row)
                self._lanes.settle(change)
        self._keep_and_drop(step)
        self._lanes.apply(change for change in step.changes if isinstance(change, Admission | Eviction))
        for change in step.changes:
            if isinstance(change, Eviction) and self._feedback is not None:
                self._feedback.forget(change.row)
            if isinstance(change, Eviction) and self._prompts is not None:
                self._runs.forget(change.row)
                self._prompts.forget(change.row)

    def _keep_and_drop(self, step: ResolvedStep) -> None:
        for change in step.changes:
            if isinstance(change, Keeping):
                if self._prompts is not None:
                    self._prompts.keep(change)
                _launch(_states(self._prefixes.keep(change, self._lanes.cache_of(change))))
            elif isinstance(change, Adopting):
                if self._prompts is not None:
                    self._prompts.adopt(change)
                self._prefixes.adopt(change)
            elif isinstance(change, Dropping):
                if self._prompts is not None:
                    self._prompts.drop(change.prefix)
                self._prefixes.drop(change.prefix)

    def _decode(self, step: ResolvedStep) -> None:
        """Builds the step's graph while its input is still on the way, then waits for it and launches.

        A stage that evaluates arrays when it is called gets its input first.
        """
        assert step.lane is not None
        times = StepTimes(step.number, time.perf_counter(), decode=True)
        lane = self._lanes.check(step.lane, step.rows)
        if isinstance(self._feedback, LocalFeedback):
            landing, inputs = None, self._own_tokens(step, times)
        else:
            landing = self._transfer.landing(self._spec.receives, len(step.rows), 1)
            inputs = landing.arrays
            if self._stage.awaits_input:
                self._await(landing, step, times)
        outputs = self._stage(inputs, lane.cache)
        if lane.sampler is None and self._shard is not None:
            times.built = time.perf_counter()
            self._await(landing, step, times)
            self._launch_alike(step, outputs[0][:, -1, :])
        elif lane.sampler is None:
            departure = self._transfer.departure(outputs)
            times.built = time.perf_counter()
            self._await(landing, step, times)
            header = records.state_record(step, self._spec.hands_on, len(step.rows), 1)
            self._launch_state(step, header, departure, [], times)
        else:
            looks = lane.sampler.looks(outputs[0].shape[-1])
            if looks:
                self._await(landing, step, times)
            if looks or (landing is None and not lane.sampler.greedy):
                _launch(outputs)  # the device starts while masks and the sampler's many operations are made
            tokens, departure = self._sampled(lane.sampler, outputs[0][:, -1, :])
            times.built = time.perf_counter()
            self._await(landing, step, times)
            self._launch_tokens(step, lane.sampler.asking, tokens, departure, times)
        lane.age += 1
        if lane.age % _SETTLE_EVERY == 0:
            _launch(_states(lane.cache))

    def _verify(self, step: ResolvedStep) -> None:
        """Computes a row's last token and the drafts behind it, or further drafts; ahead as in `_decode`."""
        assert step.lane is not None
        times = StepTimes(step.number, time.perf_counter(), decode=True)
        lane = self._lanes.check(step.lane, step.rows)
        length = len(step.sampled)
        if self._prompts is not None:
            landing, inputs = None, [mx.array([self._drafted(step)], mx.uint32)]
            times.fed = time.perf_counter()
        else:
            landing = self._transfer.landing(self._spec.receives, 1, length)
            inputs = landing.arrays
            if self._stage.awaits_input:
                self._await(landing, step, times)
        outputs = self._stage(inputs, lane.cache)
        if lane.sampler is None:
            departure = self._transfer.departure(outputs)
            times.built = time.perf_counter()
            self._await(landing, step, times)
            header = records.state_record(step, self._spec.hands_on, 1, length)
            self._launch_state(step, header, departure, [], times)
        else:
            if lane.sampler.looks(outputs[0].shape[-1]):
                self._await(landing, step, times)
            tokens, told, asking = lane.sampler.run(outputs[0][0])
            departure = self._transfer.departure([tokens] if told is None else [tokens, told])
            times.built = time.perf_counter()
            self._await(landing, step, times)
            self._launch_tokens(step, asking, tokens, departure, times)

    def _drafted(self, step: ResolvedStep) -> list[int]:
        """At the head: the tokens to compute."""
        assert self._prompts is not None
        assert isinstance(self._feedback, RingFeedback)
        if step.continues:
            return self._runs.go_on(step)
        (row,) = step.rows
        last = int(np.frombuffer(self._feedback.last([row]), np.uint32)[0])
        return self._runs.begin(step, last, self._prompts.drafts(row, last, MAX_UNSETTLED))

    def _own_tokens(self, step: ResolvedStep, times: StepTimes) -> list[mx.array]:
        """In a ring of one the last tokens never leave the device."""
        assert isinstance(self._feedback, LocalFeedback)
        times.fed = times.started
        return [self._feedback.inputs(step.rows)]

    def _await(self, landing: Landing | None, step: ResolvedStep, times: StepTimes) -> None:
        """Waits until the step's input has landed, unless it has.

        Raises Internal (EVALUATED_EARLY) where what was built meanwhile is of what lay there before.
        """
        if landing is None or times.fed:
            return
        if times.built and landing.evaluated:
            self._stage.awaits_input = True  # from the next epoch on
            raise Internal(
                f"a {self._spec.model_type} stage evaluated a step's input before it had arrived",
                hint="the next epoch waits for inputs; report this: the check at load time missed it",
                reason="EVALUATED_EARLY",
            )
        if self._shard is not None:
            landing.fill(memoryview(self._last_tokens(self._shard, step)))
        elif isinstance(self._feedback, RingFeedback):
            landing.fill(memoryview(self._feedback.last(step.rows)))
        else:
            assert self._intake is not None
            self._intake.take(Kind.ACTIVATIONS, landing.fill)
        times.fed = time.perf_counter()

    # A rank that computes a part of every layer

    def _last_tokens(self, shard: ShardSpec, step: ResolvedStep) -> bytes:
        """Of a step's rows, uint32, and passed on to the ranks that have not sampled them."""
        if isinstance(self._feedback, RingFeedback):
            tokens = self._feedback.last(step.rows)
        else:
            assert self._intake is not None
            tokens = self._intake.take(Kind.ACTIVATIONS, bytes)
        if shard.rank + 2 < shard.ranks:
            self._pass_on(records.state_record(step, [TOKENS], len(step.rows), 1), tokens)
        return tokens

    def _pass_on(self, header: RecordHeader, tokens: bytes) -> None:
        """Before they are computed with: the ranks after this one have to compute with it."""
        times = StepTimes(header.step, time.perf_counter())
        self._outbox.put(header, SharedDeparture([tokens]), times)

    def _launch_alike(self, step: ResolvedStep, logits: mx.array) -> None:
        """Nobody here wants the logits, but the tail evaluates them, and each sum takes every rank."""
        _launch(logits)
        if step.sampled and self._feedback is not None:
            self._feedback.launched(step, None)

    def _launch_state(
        self, step: ResolvedStep, header: object, departure: Departure, caches: Cache, times: StepTimes
    ) -> None:
        _launch(departure.pending, _states(caches))
        times.launched = time.perf_counter()
        if step.sampled and self._feedback is not None:
            self._feedback.launched(step, None)
        self._outbox.put(header, departure, times)

    def _launch_tokens(
        self,
        step: ResolvedStep,
        asking: Asking,
        tokens: mx.array,
        departure: Departure,
        times: StepTimes,
    ) -> None:
        _launch(tokens, departure.pending)
        times.launched = time.perf_counter()
        if self._feedback is not None:
            self._feedback.launched(step, tokens)
        label = (step, asking) if self._channel is None else records.tokens_record(step, asking)
        self._outbox.put(label, departure, times)

    def _prefill(self, step: ResolvedStep) -> None:
        sampled: list[tuple[Row, mx.array]] = []
        for chunk in step.chunks:
            times = StepTimes(step.number, time.perf_counter())
            row = self._begin(step, chunk)
            if self._shard is not None:
                inputs = self._shared_prompt(step, chunk)
            else:
                inputs = self._prompt(chunk) if self._spec.is_head else self._state(step, chunk, times)
            times.fed = time.perf_counter()
            if not self._spec.makes_logits:
                departure = self._transfer.departure(self._stage(inputs, row.cache))
                times.built = time.perf_counter()
                header = records.state_record(step, self._spec.hands_on, 1, chunk.tokens)
                self._launch_state(step, header, departure, row.cache, times)
            elif chunk.last:
                logits, times = self._last_logits(inputs, row, chunk, times)
                sampled.append((row, logits))
            else:
                self._fill(inputs, row, chunk, times)
                self._transfer.settle()
            for number in chunk.sampled[1:]:
                copy = row.copy(number, chunk.end)
                self._lanes.start(copy)
                if self._spec.makes_logits:
                    sampled.append((copy, logits))
        if sampled and not self._spec.is_tail:
            self._launch_alike(step, mx.concatenate([logits for _, logits in sampled]))
            for row, _ in sampled:
                row.scores = []
        elif sampled:
            self._first_tokens(step, sampled, times)

    def _first_tokens(
        self, step: ResolvedStep, sampled: list[tuple[Row, mx.array]], times: StepTimes
    ) -> None:
        parameters = [row.parameters for row, _ in sampled if row.parameters is not None]
        sampler = Sampler(parameters, [row.position for row in parameters])
        logits = [logits for _, logits in sampled]
        told = [words for row, _ in sampled for words in row.scores]
        tokens, departure = self._sampled(
            sampler, logits[0] if len(logits) == 1 else mx.concatenate(logits), told
        )
        times.built = time.perf_counter()
        scored = (
            len(each.scored) - 1 if row.scores else 0
            for each, (row, _) in zip(parameters, sampled, strict=True)
        )
        asking = asking_of((row.logprobs for row in parameters), scored)
        self._launch_tokens(step, asking, tokens, departure, times)
        for index, (row, _) in enumerate(sampled):
            row.sampler = sampler.extract(index)
            row.scores = []

    def _sampled(
        self, sampler: Sampler, logits: mx.array, scores: Sequence[mx.array] = ()
    ) -> tuple[mx.array, Departure]:
        """Tokens, uint32 [rows], and with what is told beside them on their way out."""
        tokens = sampler(logits)
        told = sampler.report(logits, tokens)
        return tokens, self._transfer.departure([tokens] if told is None else [tokens, told, *scores])

    def _shared_prompt(self, step: ResolvedStep, chunk: Chunk) -> list[mx.array]:
        """A chunk's tokens at any rank, passed on to the next."""
        if self._spec.is_head:
            inputs = self._prompt(chunk)
            tokens = np.array(inputs[0]).tobytes()
        else:
            assert self._intake is not None
            tokens = self._intake.take(Kind.ACTIVATIONS, bytes)
            inputs = [mx.array(np.frombuffer(tokens, np.uint32)[None])]
        if not self._spec.is_tail:
            self._pass_on(records.state_record(step, [TOKENS], 1, chunk.tokens), tokens)
        return inputs

    def _state(self, step: ResolvedStep, chunk: Chunk, times: StepTimes) -> list[mx.array]:
        landing = self._transfer.landing(self._spec.receives, 1, chunk.tokens)
        self._await(landing, step, times)
        return landing.arrays

    def _begin(self, step: ResolvedStep, chunk: Chunk) -> Row:
        """The chunk's row; its first chunk brings its parameters and passes them on."""
        if not chunk.first:
            return self._lanes.prefilling(chunk.row)
        if chunk.prefix and self._prompts is not None:
            self._prompts.reuse(chunk)
        row = Row(chunk.row, self._prefixes.start(chunk) if chunk.prefix else self._stage.make_cache())
        self._lanes.start(row)
        record = self._parameter_record(chunk)
        if self._spec.is_tail:
            row.parameters = self._with_matcher(params.decode(record))
        elif self._shard is not None:
            row.parameters = params.decode(record)
        if record and not self._spec.is_tail:
            times = StepTimes(step.number, time.perf_counter())
            self._outbox.put(records.params_record(step, chunk), SharedDeparture([record]), times)
        return row

    def _with_matcher(self, row: RowParameters) -> RowParameters:
        if not row.grammar or self._grammars is None:
            return row
        return dataclasses.replace(row, matcher=self._grammars.start(row.grammar, row.answered))

    def _parameter_record(self, chunk: Chunk) -> bytes:
        if self._prompts is not None:
            record = self._prompts.parameters(chunk.row)
            if len(record) != chunk.params_bytes:
                raise _bad_chunk(chunk)
            return record
        if not chunk.params_bytes:
            return b""
        assert self._intake is not None
        return self._intake.take(Kind.SAMPLING, bytes)

    def _prompt(self, chunk: Chunk) -> list[mx.array]:
        assert self._prompts is not None
        tokens = self._prompts.prompt(chunk.row)
        if chunk.end > len(tokens) or chunk.last != (chunk.end == len(tokens)):
            raise _bad_chunk(chunk)
        inputs = mx.array(tokens[None, chunk.start : chunk.end])
        if chunk.last:
            self._prompts.prefilled(chunk.row)
        return [inputs]

    def _fill(self, inputs: list[mx.array], row: Row, chunk: Chunk, times: StepTimes) -> StepTimes:
        """Runs tokens into the tail's caches; nobody evaluates their logits, unless the prompt's are asked
        for. The times of what comes next."""
        if row.parameters is not None and row.parameters.scored:
            self._score(inputs, row, row.parameters, chunk)
        else:
            self._stage(inputs, row.cache)
        times.built = times.launched = time.perf_counter()
        self._wait_for(_states(row.cache))
        times.ready = times.sent = time.perf_counter()
        self._outbox.trace.append(times)
        return StepTimes(times.step, times.ready, fed=times.ready)

    def _wait_for(self, *arrays: object) -> None:
        """Launched first: to compile a kernel that was not needed before is no sign of a stuck device."""
        _launch(*arrays)
        with self._outbox.waits.one():
            mx.eval(*arrays)

    def _score(self, inputs: list[mx.array], row: Row, parameters: RowParameters, chunk: Chunk) -> None:
        """Notes what is told of the prompt's tokens; a few at a time, or their logits would fill memory."""
        for at in range(0, inputs[0].shape[1], SCORED_AT_ONCE):
            part = [array[:, at : at + SCORED_AT_ONCE] for array in inputs]
            logits = self._stage(part, row.cache)[0][0]
            following = chunk.start + at + 1
            tokens = parameters.scored[following : following + len(logits)]
            if len(tokens) != len(logits):
                raise _bad_chunk(chunk)
            row.scores.append(scores(logits, tokens, parameters.logprobs or 0))
            self._wait_for(row.scores[-1], _states(row.cache))

    def _last_logits(
        self, inputs: list[mx.array], row: Row, chunk: Chunk, times: StepTimes
    ) -> tuple[mx.array, StepTimes]:
        """Logits of the last token, [1, vocabulary]; the head's product over all the others is never made."""
        scored = row.parameters is not None and row.parameters.scored
        if inputs[0].shape[1] > 1 and (scored or not self._stage.cuts):
            times = self._fill([array[:, :-1] for array in inputs], row, chunk, times)
            inputs = [array[:, -1:] for array in inputs]
        return self._stage.last_logits(inputs, row.cache), times

    # The threads of the links

    def _send(self, label: object, buffers: list[memoryview]) -> None:
        assert self._channel is not None
        assert isinstance(label, RecordHeader)
        self._channel.send(label, *buffers)

    def _deliver_own(self, label: object, buffers: list[memoryview]) -> None:
        assert self._prompts is not None
        assert isinstance(label, tuple)
        step, asking = label
        tokens = np.frombuffer(buffers[0], np.uint32).tolist()
        told = unpack(asking, np.frombuffer(b"".join(buffers[1:]), np.uint32)) if asking else {}
        self._prompts.deliver(step, tokens, told)

    def _unpack(self, record: Incoming, data: memoryview) -> None:
        """Tokens have come round the ring."""
        assert isinstance(self._feedback, RingFeedback)
        assert self._prompts is not None
        words = np.frombuffer(data, np.uint32)
        step, tokens = record.step, words[: record.rows].tolist()
        if step.drafts:
            tokens = self._runs.came(step, tokens)
            step = dataclasses.replace(step, sampled=step.sampled[: len(tokens)])
        self._feedback.arrived(step, tokens)
        told = unpack(record.asking, words[record.rows :]) if record.asking else {}
        self._prompts.deliver(step, tokens, told)


def _launch(*arrays: object) -> None:
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]


def _states(cache: Cache) -> list[object]:
    return [_states(part) if isinstance(part, list) else part.state for part in cache]


def _bad_chunk(chunk: Chunk) -> InvalidInput:
    return InvalidInput(
        f"a chunk of row {chunk.row} does not fit the row that was opened",
        reason="BAD_STEP",
        hint="gateway and head disagree; the epoch must end",
    )
