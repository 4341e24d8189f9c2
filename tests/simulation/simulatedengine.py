"""The double of an engine process: real compositions and accounts, over a model that is a function."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from simulatedchild import SimulatedChild
from simulateddisk import StoredPrefixes
from simulatedfront import SimulatedFront
from simulatedmodel import EMPTY, END, OVERHEAD, SimulatedModel, after, packed, unpacked
from simulatedrows import Parameters, parameters_in
from wires import Served

from sealring.mesh.errors import (
    Conflict,
    DeadlineExceeded,
    EpochEnded,
    FailedPrecondition,
    Internal,
    InvalidInput,
    ModelError,
    ResourceExhausted,
    SealringError,
)
from sealring.mesh.ring import (
    Admission,
    Adopting,
    Chain,
    Chunk,
    Composition,
    Dropping,
    Eviction,
    Keeping,
    Marking,
    Origin,
    ResolvedStep,
    Restoring,
    Settling,
    Unmarking,
)
from sealring.mesh.rpc import to_problem
from sealring.mesh.system.pace import LOADING
from sealring.node.engine import Account, Allowance, Sampled, bring
from sealring.node.engine.drafts import Proposed, Runs
from sealring.node.wire.channel import Kind, RecordHeader
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import trace_pb2

if TYPE_CHECKING:
    from children import Channel, Children

_START_SECONDS = 0.5
_RECORD_SECONDS = 120.0
_PROGRESS = 4


class SimulatedEngine:
    """One engine: what `node/engine/main.py` and `epoch.py` do, one event after the other."""

    def __init__(self, child: SimulatedChild, children: Children, handoff: int) -> None:
        self.child, self.children, self.host = child, children, children.host
        self._wires = children.wires
        self._handoff = socket.socket(fileno=os.dup(handoff))
        self._handoff.setblocking(False)
        self._stage: Stage | None = None
        self._loading = False
        self._epoch: Epoch | None = None
        self._front: SimulatedFront | None = None
        self._kept: dict[Origin, Kept] = {}
        self._ring = ""

    def begin(self) -> None:
        ready = engine.EngineReady(memory_limit=self.children.memory, overhead=OVERHEAD, longest_chunk=256)
        self.child.later(_START_SECONDS, lambda: self.says(ready=ready))

    def gone(self) -> None:
        if self._epoch is not None:
            self._epoch.leave()
        self._handoff.close()

    def vanish(self) -> None:
        if self._epoch is not None:
            self._epoch.served.open = False
        self._handoff.close()

    def says(self, **event: object) -> None:
        """Sends the daemon an event."""
        self.child.says(engine.EngineEvent(**event).SerializeToString())

    @property
    def memory(self) -> int:
        """Bytes that it holds."""
        stage = self._stage
        if stage is None:
            return 0
        held = self._epoch.kv_bytes if self._epoch is not None else 0
        return stage.weight_bytes + held + stage.per_token * sum(one.tokens for one in self._kept)

    @property
    def disk(self) -> StoredPrefixes | None:
        """The open epoch's way to stored prefixes."""
        return self._epoch.disk if self._epoch is not None else None

    # Commands

    def take(self, body: bytes) -> None:
        command = engine.EngineCommand.FromString(body)
        kind = command.WhichOneof("command")
        epoch = self._epoch
        if kind == "step":
            if epoch is not None:
                epoch.announce(command.step)
        elif kind == "open_row":
            self._open_row(command.open_row)
        elif kind == "ping":
            self._pong(command.ping.sequence)
        elif kind == "discard":
            if self._front is not None and epoch is not None:
                self._front.discard(command.discard.row)
        elif kind == "recall":
            if epoch is not None:
                epoch.recall(command.recall)
        elif kind == "use_disk":
            if epoch is not None and command.use_disk.HasField("disk"):
                epoch.use_disk(command.use_disk.disk.key)
        elif kind == "sign":
            if epoch is not None and self.children.signs:
                digests = epoch.sampled.digests(command.sign.row, command.sign.tokens)
                self.says(digests=digests)
        elif kind == "open_epoch":
            self._guarded(command.open_epoch.id, partial(self._open_epoch, command.open_epoch))
        elif kind == "close_epoch":
            self._close_epoch(command.close_epoch.id)
        elif kind == "join":
            refused = EpochEnded("simulated engines form no group", reason=EpochEnded.no_group)
            self._problem(command.join.id, refused)
        elif kind == "load":
            self._guarded(command.load.id, partial(self._load, command.load))
        elif kind == "profile":
            self.child.later(
                0.2, partial(self._guarded, command.profile.id, partial(self._profile, command.profile))
            )
        elif kind == "trace":
            if epoch is None:
                self._problem(command.trace.id, FailedPrecondition("no epoch is open", reason="NO_EPOCH"))
            else:
                taken = engine.TraceTaken(id=command.trace.id, trace=trace_pb2.ProcessTrace())
                self.says(trace=taken)
        elif kind == "shutdown":
            self.child.exit(0)

    def _guarded(self, number: int, work: Callable[[], None]) -> None:
        try:
            work()
        except SealringError as error:
            self._problem(number, error)

    def _problem(self, number: int, error: Exception) -> None:
        self.says(problem=engine.EngineProblem(id=number, problem=to_problem(error)))

    def _pong(self, sequence: int) -> None:
        epoch = self._epoch
        if epoch is not None:
            epoch.check_patience()
        pong = engine.EnginePong(
            sequence=sequence,
            steps=epoch.served.steps if epoch is not None else 0,
            memory=self.memory,
            drafted=epoch.runs.drafted if epoch is not None else 0,
            accepted=epoch.runs.accepted if epoch is not None else 0,
            step_us=round(1e6 * self._stage.model.seconds(1, 1, self._stage.share)) if self._stage else 0,
        )
        self.says(pong=pong)

    def _profile(self, asked: engine.ProfileModel) -> None:
        model = self.children.model(asked.path)
        if model is None or asked.draft or asked.ranks > 1:
            raise ModelError("the simulated machine has no such model", reason="MODEL_CORRUPT")
        profiled = engine.ModelProfiled(id=asked.id)
        if not asked.hi:
            profiled.profile.CopyFrom(model.profile())
        self.says(profiled=profiled)

    def _load(self, asked: engine.LoadStage) -> None:
        model = self.children.model(asked.path)
        if model is None or model.digest != asked.digest:
            raise ModelError("the folder has another model", reason="DIGEST_MISMATCH")
        if asked.ranks > 1 or self._stage is not None:
            raise Conflict("the engine has loaded its stage")
        self._loading = True
        fault = self.children.load
        stage = Stage(model, asked)
        seconds = model.load_seconds * stage.share * fault.factor
        for part in range(1, _PROGRESS):
            done = engine.LoadProgress(id=asked.id, what=LOADING, done=part, total=_PROGRESS)
            self.child.later(seconds * part / _PROGRESS, partial(self.says, progress=done))
        self.child.later(seconds, partial(self._loaded, stage))

    def _loaded(self, stage: Stage) -> None:
        fault = self.children.load
        self._loading = False
        if fault.killed:
            self.child.exit(-signal.SIGKILL)
        elif fault.error is not None:
            self._problem(stage.asked.id, fault.error)
        elif stage.weight_bytes + self.children.memory_used > self.children.memory:
            self._wires.note(f"{self.host} is to load more than its memory holds")
            error = ResourceExhausted("the stage does not fit into memory", reason="OUT_OF_MEMORY")
            self._problem(stage.asked.id, error)
        else:
            self._stage = stage
            if stage.is_head:
                self._front = SimulatedFront(stage.model, stage.asked.context, self)
            caches = hashlib.sha256(stage.asked.digest.encode()).digest() if self.children.disk else b""
            self.says(loaded=stage.message(caches))

    def _open_epoch(self, asked: engine.OpenEngineEpoch) -> None:
        if self._epoch is not None:
            raise Conflict("an epoch is open", reason="EPOCH_OPEN", hint="close it first")
        if self._loading:
            raise Conflict("a stage is being loaded", reason="STAGE_LOADING")
        stage = self._stage
        if stage is None:
            raise FailedPrecondition("no stage is loaded", reason="NO_STAGE", hint="load one first")
        if (stage.is_head, stage.is_tail) != (asked.rank == 0, asked.rank == asked.size - 1):
            raise InvalidInput("the layers do not fit the rank", reason="BAD_RANK")
        channel = None
        if asked.size > 1:
            self._receive_channel(asked.epoch)
            channel = self.children.channel(asked.ring, asked.epoch)
        if asked.ring != self._ring:
            self._kept.clear()
        self._ring = asked.ring
        names = {}
        if self._front is not None:
            names = self._front.begin_epoch(sorted(self._kept), speculate=asked.speculate)
        kept = []
        for origin in sorted(self._kept):
            regular, ends = names.get(origin, (b"", b""))
            marks = sorted(self._kept[origin].marks - {origin.tokens})
            kept.append(control.KeptPrefix(**origin._asdict(), names=regular, ends=ends, marks=marks))
        served = Served(self.host, asked.ring, asked.epoch, asked.rank, asked.size)
        earlier, self._kept = self._kept, {}
        self._epoch = Epoch(self, stage, asked, channel, served, earlier, self._front)
        self._wires.opened(served)
        if channel is not None:
            channel.open(self)
        runs = stage.model.draft_runs if asked.size > 1 else 0
        self.says(epoch_opened=engine.EpochOpened(id=asked.id, kept=kept, draft_runs=runs))

    def _receive_channel(self, epoch: int) -> None:
        """Takes the descriptors of the data channel, which nobody uses. Raises Internal (NO_CHANNEL)."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message, descriptors, _, _ = socket.recv_fds(self._handoff, 64, 4)
                for descriptor in descriptors:
                    os.close(descriptor)
                if message == str(epoch).encode() and len(descriptors) == 4:
                    return
                if not message:
                    break
        raise Internal(f"the data channel of epoch {epoch} did not come", reason="NO_CHANNEL")

    def _open_row(self, asked: engine.OpenEngineRow) -> None:
        if self._front is None or self._epoch is None or self._epoch.over:
            error = FailedPrecondition("this member is not the head of an open epoch", reason="NOT_HEAD")
            self.says(refused=control.RowRefused(row=asked.row, problem=to_problem(error)))
        else:
            self._front.open(asked)

    def _close_epoch(self, number: int) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            self._kept = epoch.leave()
        if self._front is not None:
            self._front.close_rows()
        self.says(epoch_closed=engine.EpochClosed(id=number))

    # Its data channel

    def arrived(self, channel: Channel, header: RecordHeader, payload: bytes) -> None:
        """The carrier has delivered a record."""
        if self._epoch is not None and self._epoch.channel is channel:
            self._epoch.arrived(header, payload)

    def channel_closed(self, channel: Channel) -> None:
        """The carrier is gone."""
        if self._epoch is not None and self._epoch.channel is channel:
            self._epoch.fail(EpochEnded("the data channel was closed"))


@dataclass(frozen=True)
class Stage:
    """A stage that is loaded."""

    model: SimulatedModel
    asked: engine.LoadStage

    @property
    def is_head(self) -> bool:
        return self.asked.lo == 0

    @property
    def is_tail(self) -> bool:
        return self.asked.hi == self.model.layers

    @property
    def share(self) -> float:
        return (self.asked.hi - self.asked.lo) / self.model.layers

    @property
    def weight_bytes(self) -> int:
        return self.model.stage_bytes(self.asked.lo, self.asked.hi)

    @property
    def per_token(self) -> int:
        return (self.asked.hi - self.asked.lo) * self.model.kv_bytes_per_token

    @property
    def per_row(self) -> int:
        return (self.asked.hi - self.asked.lo) * self.model.row_bytes

    @property
    def per_mark(self) -> int:
        return (self.asked.hi - self.asked.lo) * self.model.mark_bytes

    def message(self, caches: bytes) -> engine.StageLoaded:
        return engine.StageLoaded(
            id=self.asked.id,
            weight_bytes=self.weight_bytes,
            kv_bytes_per_token=self.per_token,
            kv_bytes_per_row=self.per_row,
            mark_bytes=self.per_mark,
            prefixes=control.PREFIX_SUPPORT_EXACT if self.per_mark else control.PREFIX_SUPPORT_ANY,
            times=self.model.times(self.share, self.asked.max_rows, self.asked.prefill_chunk),
            caches=caches,
        )


@dataclass
class _Row:
    """A row's cache, and what the tail samples it by."""

    states: list[bytes]
    parameters: Parameters | None = None
    marks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Kept:
    """A prefix's cache. Where caches cannot be cut, a row begins with it at one of its marks."""

    states: list[bytes]
    marks: frozenset[int]


class Epoch:
    """One epoch on one member: steps are announced, wait for their records, and are computed in order."""

    def __init__(
        self,
        owner: SimulatedEngine,
        stage: Stage,
        asked: engine.OpenEngineEpoch,
        channel: Channel | None,
        served: Served,
        earlier: dict[Origin, Kept],
        front: SimulatedFront | None,
    ) -> None:
        self.owner, self.channel, self.served = owner, channel, served
        self.over = False
        self.sampled = Sampled()
        self.runs = Runs()
        self._stage, self._model, self._front = stage, stage.model, front
        self._number, self._speculate = asked.epoch, asked.speculate and asked.size > 1
        self._composition = Composition(
            epoch=asked.epoch, max_rows=asked.max_rows, prefill_chunk=asked.prefill_chunk
        )
        allowance = Allowance(stage.per_token, stage.per_row, asked.kv_budget, stage.per_mark)
        self._budget = asked.kv_budget
        marks = sum(len(kept.marks) for kept in earlier.values())
        self._account = Account(allowance, sum(origin.tokens for origin in earlier), marks)
        self._earlier = earlier
        self._prefixes: dict[int, tuple[Origin, Kept]] = {}
        self._rows: dict[int, _Row] = {}
        self._lanes: dict[int, list[int]] = {}  # rows in the order in which they came, as a batch has them
        self._steps: deque[ResolvedStep] = deque()
        self._begun = self._busy = False
        self._records: deque[tuple[RecordHeader, bytes]] = deque()
        self._last: dict[int, int] = {}  # head: the newest token of each row
        self._awaited: deque[ResolvedStep] = deque()  # head: steps whose tokens have not come round
        self._outstanding: set[int] = set()
        self._since = 0.0
        self.disk: StoredPrefixes | None = None
        self._reads: list[tuple[int, Callable[[], None]]] = []  # behind steps, whose memory they take

    @property
    def kv_bytes(self) -> int:
        """What its caches hold."""
        rows = sum(len(row.states) - 1 for row in self._rows.values())
        kept = sum(origin.tokens for origin in self._earlier)
        kept += sum(origin.tokens for origin, _ in self._prefixes.values())
        kept += self.disk.recalled[0] if self.disk is not None else 0
        return self._stage.per_token * (rows + kept) + self._stage.per_row * len(self._rows)

    def leave(self) -> dict[Origin, Kept]:
        """Ends it; returns the prefixes that are kept."""
        kept = self._earlier | dict(self._prefixes.values())
        self.over = True
        self._rows.clear()
        self._prefixes.clear()
        if self.disk is not None:
            self.disk.end_epoch()
        self._tell()
        self.served.open = False
        if self.channel is not None:
            self.channel.shut()
        return kept

    def fail(self, error: SealringError) -> None:
        """Ends it with a fault."""
        if self.over:
            return
        self.over = True
        if not isinstance(error, EpochEnded | DeadlineExceeded):
            self._prefixes.clear()
            self._earlier = {}
        if isinstance(error, InvalidInput | ResourceExhausted):
            self._broken(f"fails: {error.reason}: {error.message}")
        self._rows.clear()
        self._tell()
        self.owner.says(fault=engine.EngineFault(epoch=self._number, problem=to_problem(error)))

    def _broken(self, what: str) -> None:
        served = self.served
        self.owner.children.wires.note(f"{served.host}, rank {served.rank} of {served.ring}, {what}")

    def _tell(self) -> None:
        self.served.rows, self.served.kv_bytes = len(self._rows), self.kv_bytes

    # Prefixes on disk

    def use_disk(self, key: bytes) -> None:
        """Stores and recalls prefixes from now on."""
        disk, later = self.owner.children.disk, self.owner.child.later
        assert disk is not None
        self.disk = StoredPrefixes(disk, key, later, exact=bool(self._stage.per_mark))

    def recall(self, asked: control.Recall) -> None:
        """Reads blocks of a prompt, or gives up what was read."""
        number, disk = asked.number, self.disk
        if not asked.chain:
            self._account.give_up(number)
            if disk is not None:
                disk.cancel(number)
        elif disk is None or self.over or (self._front is not None and not self._front.recalls(asked)):
            self._recalled(number, 0)
        else:
            chain = Chain.unpack(asked.chain)
            begin = disk.recall(number, chain, partial(self._recalled, number))
            if begin is None:
                return
            try:
                now = self._account.recall(number, chain.tokens, disk.recalled, idle=not self._steps)
            except ResourceExhausted as error:
                self.fail(error)
                return
            if now:
                begin()
            else:  # the memory that it is to have is in use until the announced steps are computed
                self._reads.append((self._steps[-1].number, begin))

    def _recalled(self, number: int, tokens: int) -> None:
        if not self.over:
            self.owner.says(recalled=control.Recalled(number=number, tokens=tokens))

    # Announced steps

    def announce(self, step: control.Step) -> None:
        if self.over:
            return
        try:
            resolved = self._composition.apply(step)
            if (
                resolved.guesses
                or resolved.source > control.DRAFT_SOURCE_LOOKUP
                or (resolved.drafts and not self._speculate)
            ):
                raise InvalidInput("the deployment has no such guesses", reason="BAD_STEP")
            self._account.announced(resolved, self._composition, self.served.steps)
            self._check_budget()
        except SealringError as error:
            self.fail(error)
            return
        if self.channel is not None:
            self.channel.expect(self._incoming(resolved))
        if self._front is not None:
            self._front.announced(chunk.row for chunk in step.prefill.chunks)
        self._steps.append(resolved)
        self._go_on()

    def _check_budget(self) -> None:
        """A gateway reserves what rows will need, with what shorter rows of a lane are padded by."""
        stage, now = self._stage, self._composition
        held = stage.per_token * now.tokens + stage.per_row * now.rows + stage.per_mark * now.marks
        if held > self._budget:
            self._broken(f"is to hold {held} bytes of {self._budget}")

    def _incoming(self, step: ResolvedStep) -> list[RecordHeader]:
        if self._stage.is_head:
            return [_tokens_record(step)] if step.sampled else []
        if step.rows:
            return [_state_record(step, len(step.rows), 1 + step.drafts)]
        headers = []
        for chunk in step.chunks:
            if chunk.params_bytes:
                headers.append(_parameter_record(step, chunk))
            headers.append(_state_record(step, 1, chunk.tokens))
        return headers

    def check_patience(self) -> None:
        """Fails if a record has not come for too long."""
        waits = (bool(self._steps) and not self._busy) or bool(self._awaited)
        if waits and asyncio.get_running_loop().time() - self._since > _RECORD_SECONDS:
            self.fail(DeadlineExceeded("a record did not come", reason="RECORD_LATE"))

    # Computing

    def _go_on(self) -> None:
        while self._steps and not self._busy and not self.over:
            step = self._steps[0]
            if not self._begun:
                self._begun = True
                self._since = asyncio.get_running_loop().time()
                try:
                    self._change(step)
                except SealringError as error:
                    self.fail(error)
                    return
            if not self._ready(step):
                return
            self._busy = True
            source = self.owner.children.wires.random
            rows = len(step.rows) or len(step.chunks)
            tokens = 1 + step.drafts if step.rows else sum(chunk.tokens for chunk in step.chunks)
            seconds = self._model.seconds(rows, tokens, self._stage.share) if rows else 0.0
            seconds *= source.uniform(0.8, 1.2) * self.owner.children.slowness
            self.owner.child.later(seconds, partial(self._compute, step))

    def _ready(self, step: ResolvedStep) -> bool:
        if self._stage.is_head:
            return step.continues or not self._outstanding.intersection(step.rows)
        return len(self._records) >= len(self._incoming(step))

    def _change(self, step: ResolvedStep) -> None:
        for change in step.changes:
            self.sampled.change(change)
            if isinstance(change, Settling):
                self._settle(change)
            elif isinstance(change, Keeping):
                self._keep(change)
            elif isinstance(change, Marking):
                row = self._row(change.row)
                if len(row.states) != change.tokens + 1:
                    self._broken(
                        f"marks row {change.row} at {change.tokens}, which has {len(row.states) - 1}"
                    )
                row.marks |= {change.tokens}
                if self.disk is not None:
                    self.disk.marked(change.row, row.states)
            elif isinstance(change, Unmarking):
                self._unmark(change)
            elif isinstance(change, Adopting):
                self._adopt(change)
            elif isinstance(change, Dropping):
                self._drop(change.prefix)
            elif isinstance(change, Restoring):
                self._restore(change)
            elif isinstance(change, Admission):
                self._lanes.setdefault(change.lane, []).append(change.row)
            elif isinstance(change, Eviction):
                if change.lane is not None and self._lanes[change.lane].pop(change.index) != change.row:
                    self._broken(f"evicts row {change.row} from another row's place")
                self._rows.pop(change.row, None)
                self._last.pop(change.row, None)
                self._outstanding.discard(change.row)
                self.runs.forget(change.row)
                if self.disk is not None:
                    self.disk.forget(change.row)
                if self._front is not None:
                    self._front.forget(change.row)
        if step.number == 1:
            self._earlier = {}

    def _keep(self, change: Keeping) -> None:
        row, tokens, whole = self._row(change.row), change.tokens, change.tokens == change.held
        if len(row.states) <= tokens:
            self._broken(f"keeps {tokens} tokens of row {change.row}, which has fewer")
        marks = frozenset((*change.marks, tokens))
        if self._stage.per_mark:
            needed = marks - {tokens} if whole and not change.cut else marks
            if not needed <= row.marks or (whole and len(row.states) != tokens + 1):
                self._broken(
                    f"cannot cut row {change.row} of {len(row.states) - 1} tokens to {sorted(marks)}"
                )
            row.marks = marks if whole else row.marks
            if self.disk is not None and whole and change.lane is None:
                self.disk.marked(change.row, row.states)
        if self._front is not None:
            self._front.keep(change)
        self._prefixes[change.prefix] = change.origin, Kept(row.states[: tokens + 1], marks)

    def _unmark(self, change: Unmarking) -> None:
        gone = frozenset(change.marks)
        if change.prefix:
            origin, kept = self._prefixes[change.prefix]
            self._prefixes[change.prefix] = origin, replace(kept, marks=kept.marks - gone)
        else:
            row = self._row(change.row)
            row.marks -= gone

    def _adopt(self, change: Adopting) -> None:
        if self._front is not None:
            self._front.adopt(change)
        kept, marks = self._earlier.get(change.origin), frozenset((*change.marks, change.origin.tokens))
        if kept is None or (self._stage.per_mark and not marks <= kept.marks):
            raise InvalidInput(f"prefix {change.prefix} was not kept here", reason="BAD_STEP")
        self._prefixes[change.prefix] = change.origin, replace(kept, marks=marks)

    def _restore(self, change: Restoring) -> None:
        if self.disk is None:
            raise InvalidInput(f"prefix {change.prefix} cannot have been recalled", reason="BAD_STEP")
        if self._front is not None:
            self._front.restore(change)
        kept = Kept(self.disk.restored(change), frozenset({change.tokens}))
        self._prefixes[change.prefix] = change.origin, kept

    def _settle(self, change: Settling) -> None:
        row = self._row(change.row)
        del row.states[len(row.states) - change.surplus :]
        if self._front is not None:
            self.runs.settle(change, ended=self._front.ended(change.row))
            self._outstanding.discard(change.row)

    def _drop(self, prefix: int) -> None:
        if self._front is not None:
            self._front.drop(prefix)
        del self._prefixes[prefix]

    def _row(self, number: int) -> _Row:
        row = self._rows.get(number)
        if row is None:
            self._broken(f"computes row {number}, which is not there")
            raise InvalidInput(f"row {number} is not there", reason="BAD_STEP")
        return row

    def _compute(self, step: ResolvedStep) -> None:
        if self.over:
            return
        fault, self.owner.children.step_error = self.owner.children.step_error, None
        if fault is not None:
            self.fail(fault)
            return
        try:
            tokens = self._decode(step) if step.rows else self._prefill(step)
        except SealringError as error:
            self.fail(error)
            return
        self._busy = self._begun = False
        self._steps.popleft()
        while self._reads and self._reads[0][0] <= step.number:
            self._reads.pop(0)[1]()
        self.owner.children.wires.executed(self.served, step.number, step.digest)
        self._tell()
        if tokens:
            bring(self.sampled.places(step), tokens)
            if self.channel is None:
                self._came(step, tokens)
            else:
                self.channel.send(_tokens_record(step), packed(tokens))
        if self._stage.is_head:
            if not step.sampled and self._front is not None:
                self._front.deliver(step, [])
            elif self.channel is not None:
                self._outstanding.update(row for row in step.sampled if row in self._rows)
                self._awaited.append(step)
        self._go_on()

    def _decode(self, step: ResolvedStep) -> list[int]:
        """Computes a token of each row, and its drafts; the tail returns what follows each of them."""
        tokens = self._inputs(step) if self._stage.is_head else unpacked(self._take(Kind.ACTIVATIONS))
        each = 1 + step.drafts
        if step.lane is None or tuple(self._lanes[step.lane]) != step.rows:
            self._broken(f"computes the rows {step.rows} in another order than they came")
        for at, number in enumerate(step.rows):
            states = self._row(number).states
            for token in tokens[at * each : (at + 1) * each]:
                states.append(after(states[-1], token))
        if not self._stage.is_tail:
            assert self.channel is not None
            self.channel.send(_state_record(step, len(step.rows), each), packed(tokens))
            return []
        return [self._sample(self._row(row), back) for row in step.rows for back in reversed(range(each))]

    def _inputs(self, step: ResolvedStep) -> list[int]:
        """The head's last tokens, and drafts behind them."""
        if step.continues:
            return self.runs.go_on(step)
        last = [self._last.get(row, END) for row in step.rows]
        if not step.drafts:
            return last
        assert self._front is not None
        runs = [
            self.runs.begin(step, row, token, Proposed((), self._front.guesses(row)))
            for row, token in zip(step.rows, last, strict=True)
        ]
        return [token for run in runs for token in run]

    def _prefill(self, step: ResolvedStep) -> list[int]:
        sampled: list[int] = []
        for chunk in step.chunks:
            row, record = self._start(chunk) if chunk.first else (self._row(chunk.row), b"")
            if self._front is not None and self._stage.is_head:
                tokens = self._front.chunk(chunk)
            else:
                tokens = unpacked(self._take(Kind.ACTIVATIONS))
            if len(row.states) != chunk.start + 1:
                self._broken(f"row {chunk.row} has {len(row.states) - 1} tokens before {chunk.start}")
            for token in tokens:
                row.states.append(after(row.states[-1], token))
            if self.disk is not None:
                self.disk.computed(chunk.row, row.states)
            if not self._stage.is_tail:
                assert self.channel is not None
                if chunk.params_bytes:
                    self.channel.send(_parameter_record(step, chunk), record)
                self.channel.send(_state_record(step, 1, chunk.tokens), packed(tokens))
            for copy in chunk.sampled[1:]:
                parameters = row.parameters.copy(copy - chunk.row) if row.parameters is not None else None
                self._rows[copy] = _Row(list(row.states), parameters)
            if self._stage.is_tail:
                sampled += [self._sample(self._row(one)) for one in chunk.sampled]
        return sampled

    def _start(self, chunk: Chunk) -> tuple[_Row, bytes]:
        kept = Kept([EMPTY], frozenset())
        if chunk.prefix:
            if self._front is not None:
                self._front.reuse(chunk)
            kept = self._prefixes[chunk.prefix][1]
            if self._stage.per_mark and chunk.start not in kept.marks:
                self._broken(
                    f"cannot cut prefix {chunk.prefix} to {chunk.start}, but to {sorted(kept.marks)}"
                )
            if chunk.takes:
                self._drop(chunk.prefix)
        if chunk.row in self._rows:
            self._broken(f"begins row {chunk.row} twice")
        marks = frozenset(length for length in kept.marks if length <= chunk.start)
        row = self._rows[chunk.row] = _Row(kept.states[: chunk.start + 1 if chunk.prefix else 1], marks=marks)
        record = self._front.parameters(chunk) if self._front is not None else self._take(Kind.SAMPLING)
        row.parameters = parameters_in(record)
        if self.disk is not None:
            self.disk.began(chunk.row, row.parameters.stored)
        if self._stage.is_tail and row.parameters.receipt:
            self.sampled.begin(chunk.row, chunk.choices, row.parameters.receipt, row.parameters.answered)
        return row, record

    def _sample(self, row: _Row, back: int = 0) -> int:
        """The token behind all that the row holds but the last `back` ones."""
        assert row.parameters is not None
        asked, held = row.parameters, len(row.states) - 1 - back
        position = held - asked.prompt_tokens + 1
        if position >= asked.length:
            return END
        return self._model.sample(row.states[held], asked.choice)

    def _take(self, kind: Kind) -> bytes:
        header, payload = self._records.popleft()
        if header.kind is not kind:
            self._broken(f"takes {header.kind.name} for {kind.name}")
        return payload

    # Records

    def arrived(self, header: RecordHeader, payload: bytes) -> None:
        if self.over:
            return
        self._since = asyncio.get_running_loop().time()
        if not self._stage.is_head:
            self._records.append((header, payload))
            self._go_on()
            return
        step = self._awaited.popleft() if self._awaited else None
        if step is None or step.number != header.step:
            self._broken(f"gets the tokens of step {header.step}")
            return
        self._came(step, unpacked(payload))

    def _came(self, step: ResolvedStep, tokens: Sequence[int]) -> None:
        """The tokens of a step are at the head."""
        refuted = False
        if step.drafts:
            counted = self.runs.came(step, tokens)
            refuted = self.runs.broken(step.rows[0])
            tokens = [tokens[at] for at in counted]
            step = replace(step, sampled=tuple(step.sampled[at] for at in counted))
        for row, token in zip(step.sampled, tokens, strict=True):
            self._outstanding.discard(row)
            if row in self._rows:
                self._last[row] = token
        if self._front is not None:
            self._front.deliver(step, tokens, refuted=refuted)
        self._go_on()


def _parameter_record(step: ResolvedStep, chunk: Chunk) -> RecordHeader:
    size = chunk.params_bytes
    return RecordHeader(Kind.SAMPLING, step.number, step.digest, "uint8", (size,), size)


def _state_record(step: ResolvedStep, rows: int, tokens: int) -> RecordHeader:
    shape = rows, tokens
    return RecordHeader(Kind.ACTIVATIONS, step.number, step.digest, "uint32", shape, 4 * rows * tokens)


def _tokens_record(step: ResolvedStep) -> RecordHeader:
    count = len(step.sampled)
    return RecordHeader(Kind.TOKENS, step.number, step.digest, "uint32", (count,), 4 * count)
