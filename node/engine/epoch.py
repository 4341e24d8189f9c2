"""Executes the steps of one epoch on one member.

`announce` runs in the thread that reads commands: it resolves a step and announces the records that it
brings. `execute` runs in the compute thread. `end` may be called by any thread and wakes all that wait. What
differs by the member's role is in its seat (`node/engine/seats`).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
import structlog

from sealring.mesh.errors import (
    DeadlineExceeded,
    EpochEnded,
    InvalidInput,
    ResourceExhausted,
    SealringError,
    StageFailed,
)
from sealring.mesh.ring.composition import (
    Admission,
    Adopting,
    Change,
    Chunk,
    Composition,
    Dropping,
    Eviction,
    Keeping,
    Marking,
    ResolvedStep,
    Restoring,
    Settling,
    Unmarking,
)
from sealring.mesh.system.logging import name_with_mlx_message
from sealring.node.engine import caches
from sealring.node.engine.allowance import Account, Allowance
from sealring.node.engine.caches import Cache
from sealring.node.engine.caches.undo import UndoLog
from sealring.node.engine.drafts.sources import Sources
from sealring.node.engine.lanes import Lane, Lanes, Row
from sealring.node.engine.params import grids_in
from sealring.node.engine.prefixes import Prefixes
from sealring.node.engine.row_seal import RowSeal
from sealring.node.engine.seats import Seat
from sealring.node.engine.seats.results import StageCall, behind, launch, states
from sealring.node.engine.seats.sources import Input, no_drafts
from sealring.node.engine.staging import ShardSpec, Stage
from sealring.node.engine.staging.doubled import Prefill
from sealring.node.engine.staging.mrope import Positions
from sealring.node.engine.threads import LAUNCHES, StepTimes, step_us
from sealring.node.engine.trace import engine_trace
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import trace_pb2

log = structlog.get_logger()

MAX_STEPS_AHEAD = 1024
"""Steps that may be announced and not computed yet; a gateway announces two for each lane."""

_SETTLE_EVERY = 64
"""Decode steps of a lane after which its caches are evaluated whole, also parts that no output needs."""

_JOIN_SECONDS = 2.0

_NO_MEMORY = re.compile(
    r"unable to allocate|attempting to allocate|out ?of ?memory|insufficient memory|::malloc", re.I
)
"""MLX's words for a lack of memory; it has one kind of error for everything. On a CPU the process ends
instead."""

_GPU_RESET = re.compile(r"kIOGPUCommandBufferCallbackError(?!OutOfMemory)(\w{1,40})")
"""Metal's word for work that it broke off: Timeout, Hang, PageFault, ImpactingInteractivity, or
InnocentVictim of another program's."""


class Part(Protocol):
    """What a member keeps for rows beside their caches."""

    def change(self, change: Change) -> None:
        """Follows a change of a step, before the caches do. Raises InvalidInput (BAD_STEP)."""


class StageEpoch:
    """One life of a ring, on one member: its rows, its lanes and its place on the links.

    `seat` takes the member's seat, with a function to call when the epoch cannot go on (`fail`). Without
    `sources` of drafts the deployment does not speculate: steps with drafts are refused, because drafts
    reveal what repeats. `runs` is the number of runs of drafts that the stage can take back, as
    `caches.undo.runs_of` says. `seal` is that of the head or the tail, where one seals parameters of rows for
    the other. `times` are those of the stage's steps. `on_fault` is called once, by any thread, when the
    epoch cannot go on, and never after `end`.
    """

    def __init__(
        self,
        number: int,
        composition: Composition,
        stage: Stage,
        seat: Callable[[Callable[[BaseException], None]], Seat],
        *,
        allowance: Allowance,
        prefixes: Prefixes,
        sources: Sources | None = None,
        runs: int = 0,
        seal: RowSeal | None = None,
        times: Sequence[control.StepTime] = (),
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self.number = number
        self.steps = 0
        self.is_head = stage.spec.is_head
        self._stage = stage
        self._on_fault = on_fault
        self._account = Account(allowance, *prefixes.earlier)
        self._sources = sources
        self._runs = runs
        self._seal = seal
        self._composition = composition
        decoding = [one for one in times if one.tokens == 1 and not one.context]
        by_rows = tuple(sorted((one.rows, one.microseconds) for one in decoding))
        self._lanes = Lanes(by_rows, lambda: self._account.spare)
        self._prefixes = prefixes
        self._behind: dict[int, tuple[int, Cache]] = {}
        """With doubled layers, of rows in lanes: tokens of the prompt, and the caches that decode nothing."""
        self._failed = False
        self._over = False
        self._over_lock = threading.Lock()
        self._waits_for_ranks = isinstance(stage.spec, ShardSpec)
        taken = seat(self.fail)
        self._source, self._exit, self._results = taken.source, taken.exit, taken.results
        self._sampled, self._channel, self._transfer = taken.sampled, taken.channel, taken.transfer
        self._prompts = taken.prompts
        self._parts: list[Part] = [self._source, self._sampled]
        if sources is not None and sources.tail is not None:
            self._parts.append(sources.tail)

    @property
    def over(self) -> bool:
        """Whether the epoch has ended or failed."""
        return self._over

    @property
    def trace(self) -> list[StepTimes]:
        """The times of the last steps, oldest first; a prompt's are by chunk."""
        while True:
            try:
                return list(self._exit.trace)
            except RuntimeError:  # one was added meanwhile
                continue

    def step_us(self) -> int:
        """As `threads.step_us`, of the steps until now. Any thread."""
        return step_us(self.trace)

    def device_seconds(self) -> float:
        """Seconds for which the device has answered no thread that waits for it; one thread may call this.

        0 at a rank of a tensor ring, whose sums wait for other machines.
        """
        return 0.0 if self._waits_for_ranks else self._exit.waits.seconds()

    def spans(self, since: int) -> trace_pb2.ProcessTrace:
        """The activities since then, nanoseconds on the machine's monotonic clock. Any thread."""
        disk = self._prefixes.disk
        trace = engine_trace(self.trace, self._source.copied, since, disk.logs if disk is not None else {})
        if disk is not None:
            trace.recalled, trace.stored = disk.since(since)
        if self._source.runs is not None:
            trace.drafted, trace.accepted, trace.modelled = self._source.runs.since(since)
        return trace

    @property
    def drafts(self) -> tuple[int, int]:
        """At the head: drafts until now, and the accepted ones among them. Any thread."""
        runs = self._source.runs
        return (0, 0) if runs is None else (runs.drafted, runs.accepted)

    # The thread that reads commands

    def announce(self, step: control.Step) -> ResolvedStep | None:
        """Resolves the next step and announces its records. None when the epoch is over, or now fails."""
        if self._over:
            return None
        try:
            resolved = self._composition.apply(step)
            taps = resolved.taps or any(chunk.taps for chunk in resolved.chunks)
            if resolved.drafts or step.decode.asks or resolved.guesses or taps:
                self._check_drafts(resolved, taps=taps)
            self._account.announced(resolved, self._composition, self.steps)
            self._check_ahead(resolved.number)
            self._source.announce(resolved)
        except Exception as error:
            self.fail(error)
            return None
        return resolved

    def recall(self, number: int, tokens: int, there: tuple[int, int]) -> bool:
        """As `Account.recall`: counts a prefix that is to be read from disk, for a step to restore."""
        idle = self.steps == self._composition.last_step
        return self._account.recall(number, tokens, there, idle=idle)

    def digests(self, sign: control.SignRow) -> engine.RowDigests:
        """The hash that the tail signs for a row that has ended."""
        return self._sampled.digests(sign.row, sign.tokens)

    def give_up_recall(self, number: int) -> None:
        self._account.give_up(number)

    def _check_drafts(self, step: ResolvedStep, *, taps: bool) -> None:
        """Checks the gateway, which is not trusted: drafts reveal how far an answer repeats its prompt."""
        if self._sources is None:
            raise InvalidInput(
                "the gateway wants tokens guessed, and the deployment does not",
                reason="BAD_STEP",
                hint="deploy it with --speculate; a gateway that is not ours may be asking",
            )
        if not self._source.guesses:
            raise no_drafts()
        if taps and self._sources.ahead != control.DRAFT_SOURCE_HIDDEN:
            raise InvalidInput("no drafter of the deployment reads hidden states", reason="BAD_STEP")
        if step.guesses and step.source != self._sources.ahead:
            raise InvalidInput("the deployment has no such source that guesses ahead", reason="BAD_STEP")
        together = step.drafts and len(step.rows) > 1
        if not self._runs or (together and not self._stage.drafts_together):
            several = "several rows" if together else "rows"
            raise InvalidInput(
                f"the gateway wants drafts, and caches of {several} of {self._stage.spec.model_type} cannot "
                "be taken back",
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
        """Ends the epoch with a fault."""
        if not isinstance(error, EpochEnded | DeadlineExceeded):  # those come from a link
            self._failed = True
        if self._stop():
            self._on_fault(error if isinstance(error, SealringError) else self._stage_failed(error))

    def end(self) -> None:
        """Ends the epoch without a fault and wakes every thread that waits in it. Idempotent."""
        self._stop()
        if self._channel is not None:
            self._channel.shut()

    def _stage_failed(self, error: BaseException) -> StageFailed:
        """The error in other words: a model's code may quote what it computes. MLX's words stay."""
        spec = self._stage.spec
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
                f"the code of {spec.model_type} failed {where} ({name_with_mlx_message(error)})",
                hint="the engine's log says where; if `sealring model check` fails too, it cannot be served",
            )
        failed.__cause__ = error
        return failed

    def _stop(self) -> bool:
        with self._over_lock:
            if self._over:
                return False
            self._over = True
        self._exit.end()
        self._source.end()
        return True

    # The compute thread

    def close(self) -> None:
        """Ends the epoch and frees its memory."""
        self.end()
        copied = self._exit.join(_JOIN_SECONDS)
        self._source.join(_JOIN_SECONDS)
        if self._channel is not None:
            self._channel.close()
        self.drop()
        if copied:
            self._transfer.close()
        else:  # the exit's thread reads memory that `close` would free
            log.warning("transfer_left_open")

    def drop(self) -> None:
        """Frees all rows. Kept prefixes stay, unless computing has failed."""
        self._lanes.clear()
        self._behind.clear()
        if self._sources is not None:
            self._sources.drop(failed=self._failed)
        if self._failed:
            self._prefixes.distrust()
        self._prefixes.end_epoch()
        if self._failed and not self._waits_for_ranks:  # sums wait for other ranks, maybe for ever
            self._forget_errors()
        mx.clear_cache()

    def _forget_errors(self) -> None:
        """Waits until the device is idle and MLX has raised the errors of all launches.

        Each failed launch leaves an error. MLX raises it once, at the next wait for the stream, which would
        be in the first step of the next epoch.
        """
        for _ in range(LAUNCHES + 1):
            try:
                with self._exit.waits.one():
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
                self._prompts.deliver(step, [], {})  # no token would tell the gateway to go on
        except BaseException as error:
            self.fail(error)
            self.drop()

    def work(self) -> bool:
        """Does something that can wait, while there is no step to compute; False if there is nothing."""
        return not self._over and self._source.work()

    def _change(self, step: ResolvedStep) -> None:
        for change in step.changes:
            for part in self._parts:
                part.change(change)
        settled: dict[int, list[Settling]] = {}
        for change in step.changes:
            if isinstance(change, Settling):
                settled.setdefault(change.lane, []).append(change)
        for changes in settled.values():
            if again := self._lanes.settle(changes, self._stage):
                launch(behind(states(again)))  # while the step's input is on its way
        kept = self._keep_and_drop(step)
        for change in step.changes:
            if isinstance(change, Admission) and isinstance(prefill := self._stage.prefill, Prefill):
                row = self._lanes.prefilling(change.row)
                row.cache, rest = prefill.parted(row.cache)
                self._behind[change.row] = row.tokens, rest
        self._lanes.apply(change for change in step.changes if isinstance(change, Admission | Eviction))
        for cache in kept:  # now: an evicted row's arrays go as they are copied, layer by layer
            launch(states(cache))
        for change in step.changes:
            if isinstance(change, Eviction):
                self._prefixes.forget(change.row)
                self._behind.pop(change.row, None)

    def _keep_and_drop(self, step: ResolvedStep) -> list[Cache]:
        """Returns copies that are still to be made."""
        kept = []
        for change in step.changes:
            if isinstance(change, Keeping):
                kept.append(self._prefixes.keep(change, self._cache_of(change)))
            elif isinstance(change, Marking):
                row = self._lanes.prefilling(change.row).cache
                launch(self._prefixes.mark(change, row))
            elif isinstance(change, Unmarking):
                self._prefixes.unmark(change)
            elif isinstance(change, Restoring):
                launch(states(self._prefixes.restore(change, self._stage.prefill.make_cache)))
            elif isinstance(change, Adopting):
                self._prefixes.adopt(change)
            elif isinstance(change, Dropping):
                self._prefixes.drop(change.prefix)
        return kept

    def _cache_of(self, keeping: Keeping) -> Cache:
        """Raises InvalidInput (BAD_STEP) for tokens that doubled layers before a border have not computed."""
        cache, prefill = self._lanes.cache_of(keeping), self._stage.prefill
        if keeping.lane is None or not isinstance(prefill, Prefill):
            return cache
        tokens, rest = self._behind[keeping.row]
        if keeping.tokens > tokens:
            raise InvalidInput(
                f"prefix {keeping.prefix} has an answer, and prompts are computed with other layers",
                reason="BAD_STEP",
                hint="a gateway that is not ours may be asking; this member said so when it attached",
            )
        return prefill.joined(cache, rest)

    def _decode(self, step: ResolvedStep) -> None:
        times = StepTimes(step.number, time.perf_counter(), decode=True)
        lane = self._lane(step)
        self._results.watch(step)
        call, outputs = self._call(step, lane, self._source.decode(step), times)
        self._results.decode(call, lane, outputs)
        lane.age += 1
        if lane.age % _SETTLE_EVERY == 0:
            launch(states(lane.cache))

    def _verify(self, step: ResolvedStep) -> None:
        times = StepTimes(step.number, time.perf_counter(), decode=True)
        lane, given = self._lane(step), self._source.verify(step)
        lane.note(self._runs, lane.spread(given.arrays))
        self._results.watch(step)
        call, outputs = self._call(step, lane, given, times)
        if isinstance(lane.undo, UndoLog):
            lane.undo.end()
        self._results.verify(call, lane, outputs)

    def _lane(self, step: ResolvedStep) -> Lane:
        assert step.lane is not None
        return self._lanes.check(step.lane, step.rows)

    def _call(
        self, step: ResolvedStep, lane: Lane, given: Input, times: StepTimes
    ) -> tuple[StageCall, list[mx.array]]:
        call = self._begun(step, given, times)
        return call, lane.gathered(self._stage(lane.spread(given.arrays), lane.cache, lane.positions))

    def _begun(self, step: ResolvedStep, given: Input, times: StepTimes) -> StageCall:
        """A call whose graph can be built: while its input is on the way, unless the stage evaluates arrays
        then."""
        stage = self._stage.prefill if step.chunks else self._stage
        call = StageCall(step, stage, given, times)
        if stage.awaits_input:
            call.wait()
        return call

    def _prefill(self, step: ResolvedStep) -> None:
        prompts: list[tuple[Row, mx.array]] = []
        computed: list[tuple[Chunk, list[Row]]] = []
        for chunk in step.chunks:
            times = StepTimes(step.number, time.perf_counter())
            row = self._begin(step, chunk)
            call = self._begun(step, self._source.chunk(step, chunk), times)
            logits = self._results.chunk(call, row, chunk)
            row.tokens = chunk.end
            rows = [row, *(row.copy(number) for number in chunk.sampled[1:])]
            computed.append((chunk, rows))
            if logits is not None:
                prompts += [(each, logits) for each in rows]
        if prompts:
            self._results.first_tokens(step, prompts, call.times)
        for chunk, (row, *_) in computed:
            self._results.hand_over(step, chunk, row)
        for chunk, (row, *copies) in computed:
            self._source.take_over(chunk, row.cache)
            self._prefixes.computed(chunk, row.cache)
            for copy in copies:
                copy.cache = caches.first_tokens(row.cache, chunk.end)
                self._lanes.start(copy)

    def _begin(self, step: ResolvedStep, chunk: Chunk) -> Row:
        """The chunk's row; its first chunk brings its parameters."""
        if not chunk.first:
            return self._lanes.prefilling(chunk.row)
        record = self._source.begin(chunk)
        if self._seal is not None:
            record = self._seal.cross(step, chunk, record)
        row = Row(
            chunk.row, self._prefixes.start(chunk) if chunk.prefix else self._stage.prefill.make_cache()
        )
        if chunk.takes:
            self._prefixes.drop(chunk.prefix)
        self._lanes.start(row)
        if grids := grids_in(record):
            row.positions = Positions.of(grids)
        self._results.begin(step, chunk, row, record)
        self._prefixes.began(chunk.row, record)
        return row
