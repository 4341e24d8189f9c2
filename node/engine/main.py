"""The engine process: holds one stage and executes the steps that its daemon passes on.

`python -m sealring.node.engine.main --control-fd N --handoff-fd M`. Frames of EngineCommand come in on N
and frames of EngineEvent go out; M brings the descriptors of a data channel. Three threads: the main one
computes, one reads commands, and at the head the front turns text to tokens; an epoch adds those of
`node/engine/threads.py`. Nothing outlives the daemon: the end of the control socket ends the process at once.
"""

from __future__ import annotations

import gc

from sealring.mesh.system.start import defer_asyncio, hide_rich

if __name__ == "__main__":
    hide_rich()  # before structlog
    defer_asyncio()
    gc.disable()  # imports make hardly any garbage, and collections take a tenth of their time

import argparse
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

import structlog

from sealring.mesh.errors import Conflict, FailedPrecondition, Internal, InvalidInput, ResourceExhausted
from sealring.mesh.ring.composition import Composition
from sealring.mesh.ring.prefix_names import Chain, names_key
from sealring.mesh.rpc.problem import to_problem
from sealring.mesh.system import logging
from sealring.mesh.system.start import forbid_core_files
from sealring.node.engine import device, metal, nvidia
from sealring.node.engine.allowance import Allowance
from sealring.node.engine.epoch import StageEpoch
from sealring.node.engine.folder import Loaded, draft_message, load, profile_message, ranges_message
from sealring.node.engine.group import form
from sealring.node.engine.row_seal import RowSeal
from sealring.node.engine.seats import seat_of
from sealring.node.engine.staging import Shard
from sealring.node.engine.text.answers import refusal
from sealring.node.engine.text.book import StoredNames
from sealring.node.wire.channel import EngineChannel
from sealring.node.wire.frames import ENGINE_FORM, FrameSocket
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine

if TYPE_CHECKING:
    from sealring.node.engine.disk import Disk

log = structlog.get_logger()

_HANDOFF_SECONDS = 5.0
_SWITCH_SECONDS = 0.00005
"""Time for which a thread may keep the interpreter from another. Python's own 5 ms are a whole decode step,
and a result or a record passes several threads on its way."""


_HINTS = {"device_stuck": "the GPU does not finish a step; if it happens again, restart the machine"}


def _nothing() -> None: ...


def hung(loaded: Loaded, epoch: StageEpoch | None) -> str | None:
    """The reason why a thread will never go on: a prompt or the device; None while all go on."""
    if loaded.front is not None and loaded.front.reader.stuck:
        return "prompt_unreadable"
    if epoch is not None and epoch.device_seconds() > loaded.patience:
        return "device_stuck"
    return None


def compute(
    tasks: SimpleQueue[Callable[[], None]],
    *,
    idle: Callable[[], None],
    after: float,
    work: Callable[[], bool] = lambda: False,
) -> NoReturn:
    """Does tasks for ever. While there is none it does what `work` does, as long as that has something to do,
    and calls `idle` once when there was none for `after` seconds since the last."""
    worked = False
    while True:
        while tasks.empty() and work():
            pass
        try:
            task = tasks.get(timeout=after if worked else None)
        except Empty:
            worked = False
            idle()
        else:
            task()
            worked = True


class Engine:
    """One process's stage and epoch. Commands are read in one thread and computed in order in another."""

    def __init__(
        self, frames: FrameSocket, handoff: socket.socket | None, loaded: Loaded | None = None
    ) -> None:
        self._frames = frames
        self._handoff = handoff
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._loaded = loaded
        self._epoch: StageEpoch | None = None
        self._seal: RowSeal | None = None  # the epoch's
        self._loads = 0  # asked for and not yet done; changed by the reading thread and the compute thread
        self._loads_lock = threading.Lock()
        self._profiling = threading.Lock()
        self._handlers: dict[str, Callable[[Any], None]] = {
            "step": self._step,
            "open_row": self._open_row,
            "ping": self._ping,
            "trace": self._start_trace,
            "recall": self._recall,
            "brought": self._brought,
            "discard": self._discard,
            "sign": self._sign,
            "open_epoch": self._start_epoch,
            "close_epoch": self._close_epoch,
            "use_disk": self._use_disk,
            "seal_rows": self._seal_rows,
            "join": self._queue_join,
            "load": self._queue_load,
            "profile": self._start_profile,
            "shutdown": lambda _: os._exit(0),
        }

    def run(self) -> NoReturn:
        """Computes until the process ends."""
        metal.prepare()
        nvidia.prepare()
        device.prepare()
        limits = engine.EngineReady(
            memory_limit=device.usable_memory(),
            overhead=device.overhead(),
            longest_chunk=device.longest_chunk(),
            computes_on=device.computes_on(),
        )
        self._emit(engine.EngineEvent(ready=limits))
        threading.Thread(target=self._read, name="commands", daemon=True).start()
        device.compute_in_batches()  # this thread, not those beside it
        compute(self._tasks, idle=device.give_back, after=device.idle_seconds(), work=self._work)

    def _work(self) -> bool:
        return self._epoch is not None and self._epoch.work()

    def _emit(self, event: engine.EngineEvent) -> None:
        try:
            self._frames.send(event)
        except OSError:
            os._exit(0)

    # The thread that reads commands

    def _read(self) -> None:
        try:
            while (command := self._frames.receive(engine.EngineCommand)) is not None:
                self.dispatch(command)
        except OSError:
            pass
        except BaseException as error:
            log.error("engine_exited", exc_info=error)
            os._exit(1)
        os._exit(0)

    def dispatch(self, command: engine.EngineCommand) -> None:
        """Takes a command of the daemon; the answer is an event."""
        kind = command.WhichOneof("command")
        if kind is not None:
            self._handlers[kind](getattr(command, kind))

    def _step(self, step: control.Step) -> None:
        epoch = self._epoch
        if epoch is None:
            return
        resolved = epoch.announce(step)
        if resolved is not None:
            self._tasks.put(partial(epoch.execute, resolved))

    def _open_row(self, command: engine.OpenEngineRow) -> None:
        front = self._loaded.front if self._loaded is not None else None
        if self._epoch is None or self._epoch.over or front is None:
            error = FailedPrecondition("this member is not the head of an open epoch", reason="NOT_HEAD")
            self._emit(refusal(command.row, error))
            return
        front.reader.open(command)

    def _discard(self, discard: control.DiscardRow) -> None:
        if self._epoch is None or self._loaded is None or self._loaded.front is None:
            return
        self._loaded.front.discard(discard.row)

    def _sign(self, sign: control.SignRow) -> None:
        if self._epoch is not None:
            self._emit(engine.EngineEvent(digests=self._epoch.digests(sign)))

    def _recall(self, recall: control.Recall) -> None:
        """Reads blocks of a prompt from disk, or gives up what was read."""
        epoch, loaded = self._epoch, self._loaded
        if epoch is None or loaded is None:
            return
        front, disk = loaded.front, loaded.prefixes.disk
        try:
            if not recall.chain:
                epoch.give_up_recall(recall.number)
                if front is not None:
                    front.book.cancel_recall(recall.number)
                if disk is not None:
                    disk.cancel(recall.number)
            elif disk is None or (front is not None and not front.book.recalls(recall)):
                self._recalled(epoch, recall.number, 0)
            else:
                self._read_blocks(epoch, disk, recall)
        except (InvalidInput, ResourceExhausted) as error:
            epoch.fail(error)

    def _read_blocks(self, epoch: StageEpoch, disk: Disk, recall: control.Recall) -> None:
        chain = Chain.unpack(recall.chain)
        begin = disk.recall(recall.number, chain, partial(self._recalled, epoch, recall.number))
        if begin is None:
            return
        if epoch.recall(recall.number, chain.tokens, disk.recalled):
            begin()
        else:  # the memory that it is to have is in use until the announced steps are computed
            self._tasks.put(begin)

    def _recalled(self, epoch: StageEpoch, number: int, tokens: int) -> None:
        if not epoch.over:
            self._emit(engine.EngineEvent(recalled=control.Recalled(number=number, tokens=tokens)))

    def _ping(self, ping: control.Ping) -> None:
        epoch = self._epoch
        if self._loaded is not None and (hangs := hung(self._loaded, epoch)) is not None:
            log.error("engine_hangs", thread=hangs, hint=_HINTS.get(hangs))
            os._exit(1)  # nothing else ends threads that wait for a device
        drafted, accepted = epoch.drafts if epoch is not None else (0, 0)
        pong = engine.EnginePong(
            sequence=ping.sequence,
            steps=epoch.steps if epoch is not None else 0,
            memory=device.active_memory(),
            step_us=epoch.step_us() if epoch is not None else 0,
            drafted=drafted,
            accepted=accepted,
            stored=self._stored(),
        )
        self._emit(engine.EngineEvent(pong=pong))

    def _stored(self) -> engine.StoredFigures | None:
        disk = self._loaded.prefixes.disk if self._loaded is not None else None
        return None if disk is None else disk.figures()

    def _guarded(self, number: int, work: Callable[[], None]) -> None:
        """Runs one command's work and answers a failure with a problem."""
        try:
            work()
        except Exception as error:
            log.warning("engine_command_failed", exc_info=error)
            self._emit(engine.EngineEvent(problem=engine.EngineProblem(id=number, problem=to_problem(error))))

    def _queue_load(self, command: engine.LoadStage) -> None:
        with self._loads_lock:
            self._loads += 1
        self._tasks.put(partial(self._guarded, command.id, partial(self._load, command)))

    def _queue_join(self, command: engine.JoinGroup) -> None:
        self._tasks.put(partial(self._guarded, command.id, partial(self._join, command)))

    def _start_epoch(self, command: engine.OpenEngineEpoch) -> None:
        self._guarded(command.id, partial(self._open_epoch, command))

    def _open_epoch(self, command: engine.OpenEngineEpoch) -> None:
        loaded = self._stage_for(command)
        besides = loaded.sources.memory + (loaded.tower.weight_bytes if loaded.tower is not None else 0)
        device.wire(loaded.weight_bytes + command.kv_budget + besides)
        channel = EngineChannel(*self._receive_channel(command.epoch)) if command.size > 1 else None
        origins = loaded.prefixes.turn_over(command.ring)
        sources = loaded.sources if command.speculate else None
        if loaded.sources.tail is not None:
            loaded.sources.tail.turn_over(origins)
        front = loaded.front
        runs = loaded.draft_runs(command.size)
        draft_bytes = loaded.draft_bytes(runs) if command.speculate else 0
        names = {}
        if front is not None:
            names = front.begin_epoch(
                origins,
                sources=sources.at_head if sources is not None else (),
                tail_reads=sources is not None
                and sources.ahead > 0
                and (command.sealed or command.size == 2),
                sealed=command.sealed,
                longest=command.prefill_chunk,
            )
        spec = loaded.stage.spec
        self._seal = (
            RowSeal(seals=spec.is_head) if command.sealed and (spec.is_head or spec.is_tail) else None
        )
        self._epoch = StageEpoch(
            command.epoch,
            Composition(epoch=command.epoch, max_rows=command.max_rows, prefill_chunk=command.prefill_chunk),
            loaded.stage,
            partial(
                seat_of,
                loaded.stage,
                channel=channel,
                prompts=front.book if front is not None else None,
                grammars=loaded.grammars,
                sources=sources,
                tower=loaded.tower,
                borders=loaded.borders,
            ),
            allowance=Allowance(*loaded.kv_bytes, max(0, command.kv_budget - draft_bytes), loaded.mark_bytes),
            prefixes=loaded.prefixes,
            sources=sources,
            runs=runs,
            seal=self._seal,
            times=loaded.times,
            on_fault=partial(self._fault, command.epoch),
        )
        kept = []
        for origin, marks in origins.items():
            regular, ends = names.get(origin, (b"", b""))
            kept.append(control.KeptPrefix(**origin._asdict(), names=regular, ends=ends, marks=marks))
        opened = engine.EpochOpened(id=command.id, kept=kept, draft_runs=runs, draft_bytes=draft_bytes)
        opened.drafts_together = loaded.stage.drafts_together
        self._emit(engine.EngineEvent(epoch_opened=opened))

    def _seal_rows(self, command: engine.SealRows) -> None:
        if self._seal is not None:
            self._seal.take(command.key)

    def _use_disk(self, command: engine.UseDisk) -> None:
        """Stores prefixes of the open epoch there, and recalls them, from now on."""
        loaded = self._loaded
        if self._epoch is None or loaded is None:
            return
        disk = loaded.open_disk(command.disk if command.HasField("disk") else None, self._bring)
        if loaded.front is not None and disk is not None:
            loaded.front.book.use_disk(StoredNames(names_key(command.disk.names), disk.held))

    def _bring(self, asked: engine.BringBlocks) -> None:
        self._emit(engine.EngineEvent(bring=asked))

    def _brought(self, command: engine.BlocksBrought) -> None:
        """Other members' blocks are on this disk, as far as they come."""
        disk = self._loaded.prefixes.disk if self._loaded is not None else None
        if disk is not None:
            disk.brought(command.number)

    def _stage_for(self, command: engine.OpenEngineEpoch) -> Loaded:
        if self._epoch is not None:
            raise Conflict("an epoch is open", reason="EPOCH_OPEN", hint="close it first")
        loaded = self._loaded
        if self._loads:
            raise Conflict("a stage is being loaded", reason="STAGE_LOADING", hint="wait until it is")
        if loaded is None:
            raise FailedPrecondition("no stage is loaded", reason="NO_STAGE", hint="load one first")
        spec = loaded.stage.spec
        if spec.is_head != (command.rank == 0) or spec.is_tail != (command.rank == command.size - 1):
            raise InvalidInput(
                f"layers {spec.lo} to {spec.hi} of {spec.layers} at rank {command.rank} of {command.size}",
                reason="BAD_RANK",
            )
        return loaded

    def _receive_channel(self, epoch: int) -> tuple[int, int, int, int]:
        """The descriptors sent for this epoch; those of epochs that never opened are closed."""
        with contextlib.suppress(TimeoutError):
            while self._handoff is not None:
                message, descriptors, _, _ = socket.recv_fds(self._handoff, 64, 4)
                if len(descriptors) == 4 and message == str(epoch).encode():
                    return descriptors[0], descriptors[1], descriptors[2], descriptors[3]
                for descriptor in descriptors:
                    os.close(descriptor)
                if not message:
                    break
        raise Internal(
            f"the data channel of epoch {epoch} did not come",
            hint="the node's daemon is too busy or has ended; the next epoch gets another",
            reason="NO_CHANNEL",
        )

    def _close_epoch(self, command: engine.CloseEngineEpoch) -> None:
        epoch, self._epoch, self._seal = self._epoch, None, None
        if epoch is not None:
            epoch.end()
        if self._loaded is not None and self._loaded.front is not None:
            self._loaded.front.close_rows()
        self._tasks.put(partial(self._closed, command.id, epoch))

    def _start_profile(self, command: engine.ProfileModel) -> None:
        work = partial(self._guarded, command.id, partial(self._profile, command))
        threading.Thread(target=work, name="profile", daemon=True).start()

    def _start_trace(self, command: engine.TakeTrace) -> None:
        work = partial(self._guarded, command.id, partial(self._trace, command, self._epoch))
        threading.Thread(target=work, name="trace", daemon=True).start()

    # Threads of their own

    def _trace(self, command: engine.TakeTrace, epoch: StageEpoch | None) -> None:
        if epoch is None:
            raise FailedPrecondition("no epoch is open", reason="NO_EPOCH")
        taken = engine.TraceTaken(id=command.id, trace=epoch.spans(command.since))
        self._emit(engine.EngineEvent(trace=taken))

    def _profile(self, command: engine.ProfileModel) -> None:
        profiled = engine.ModelProfiled(id=command.id)
        with self._profiling:
            if command.hi:
                profiled.ranges.extend(ranges_message(command.path, command.lo, command.hi))
            elif command.draft:
                profiled.profile.CopyFrom(draft_message(command.path, command.draft))
            else:
                profiled.profile.CopyFrom(profile_message(command.path, command.ranks, command.adapter))
        self._emit(engine.EngineEvent(profiled=profiled))

    def _fault(self, epoch: int, error: BaseException) -> None:
        log.error("epoch_failed", epoch=epoch, exc_info=error)
        self._emit(engine.EngineEvent(fault=engine.EngineFault(epoch=epoch, problem=to_problem(error))))

    # The compute thread

    def _join(self, command: engine.JoinGroup) -> None:
        stage = self._loaded.stage if self._loaded is not None else None
        if not isinstance(stage, Shard):
            raise FailedPrecondition("no part of every layer is loaded", reason="NO_STAGE")
        stage.join(form(command))
        self._emit(engine.EngineEvent(joined=engine.GroupJoined(id=command.id)))

    def _load(self, command: engine.LoadStage) -> None:
        try:
            self._replace_stage(command)
        finally:
            with self._loads_lock:
                self._loads -= 1
        assert self._loaded is not None
        self._emit(engine.EngineEvent(loaded=self._loaded.message(command.id)))

    def _replace_stage(self, command: engine.LoadStage) -> None:
        if self._epoch is not None:
            raise Conflict("an epoch is open", reason="EPOCH_OPEN", hint="close it before loading")
        if self._loaded is not None and self._loaded.serves(command):
            self._loaded.command = command
            return
        if self._loaded is not None:
            self._loaded.free()
            self._loaded = None
        self._loaded = load(command, self._emit, partial(self._tasks.put, _nothing))

    def _closed(self, number: int, epoch: StageEpoch | None) -> None:
        if epoch is not None:
            epoch.close()
        self._emit(engine.EngineEvent(epoch_closed=engine.EpochClosed(id=number)))


def main() -> NoReturn:
    """Runs the engine on the descriptors that the command line names."""
    forbid_core_files()
    gc.freeze()
    gc.enable()
    parser = argparse.ArgumentParser(
        prog="python -m sealring.node.engine.main", description="started by the node daemon"
    )
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--handoff-fd", type=int)
    parser.add_argument("--form", choices=[ENGINE_FORM], required=True, help="of the messages")
    parser.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    arguments = parser.parse_args()
    if arguments.cpu:
        device.compute_on_cpu()
    logging.configure("engine")
    logging.end_with_any_thread()
    sys.setswitchinterval(_SWITCH_SECONDS)
    frames = FrameSocket(socket.socket(fileno=arguments.control_fd))
    handoff = None
    if arguments.handoff_fd is not None:
        handoff = socket.socket(fileno=arguments.handoff_fd)
        handoff.settimeout(_HANDOFF_SECONDS)
    Engine(frames, handoff).run()


if __name__ == "__main__":
    main()
