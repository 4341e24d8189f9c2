"""One epoch of one ring on this member, from PrepareEpoch to its end.

PREPARING -> PREPARED -> FORMING -> UP; each phase may end in ENDED, which is final. Every error goes to
`fault`. Ending is idempotent and leaves no process, descriptor or file behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import structlog

from sealring.mesh.errors import (
    Conflict,
    EpochEnded,
    FailedPrecondition,
    InvalidInput,
    SealringError,
)
from sealring.mesh.ring.limits import JACCL
from sealring.mesh.rpc.problem import to_problem
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.system.pace import STARTING, Reached
from sealring.node.daemon.carrier_process import LinkFigures
from sealring.node.daemon.engine_process import EngineFigures, EngineSink
from sealring.node.daemon.plan import EpochPlan
from sealring.node.daemon.receipts import SignedOnce
from sealring.node.daemon.rotation import KeyTaker, StepGate
from sealring.node.wire.channel import ChannelEnds
from sealring.v1 import control_pb2, engine_pb2, membership_pb2, trace_pb2

log = structlog.get_logger()

FORM_SECONDS = 20.0
GROUP_SECONDS = 20.0
"""Time for the ranks of a tensor ring to find each other, once the links are up."""

_PREPARE_SECONDS = 1900.0
_MOST_BROUGHT = 64

LEAVING = "LEAVING"
"""Reason in the goodbye of a gateway that stops in order."""

GATEWAY_LEFT = "GATEWAY_LEFT"
NOBODY_SCHEDULES = "NOBODY_SCHEDULES"


class Phase(enum.Enum):
    """Phase of an epoch."""

    PREPARING = "preparing"
    PREPARED = "prepared"
    FORMING = "forming"
    UP = "up"
    ENDED = "ended"


class StageEngine(Protocol):
    """An engine with this member's stage loaded."""

    computes_on: str

    @property
    def figures(self) -> EngineFigures: ...

    @property
    def loaded(self) -> engine_pb2.StageLoaded | None: ...

    async def open_epoch(
        self, command: engine_pb2.OpenEngineEpoch, descriptors: tuple[int, ...], sink: EngineSink
    ) -> engine_pb2.EpochOpened: ...

    async def join_group(self, command: engine_pb2.JoinGroup, seconds: float) -> None: ...

    async def close_epoch(self) -> None: ...

    async def stop(self) -> None: ...

    def use_disk(self, command: engine_pb2.UseDisk) -> None: ...

    def seal_rows(self, key: bytes) -> None: ...

    def brought(self, number: int) -> None: ...

    def send_work(self, command: bytes) -> None: ...

    async def drained(self) -> None: ...

    async def trace(self, since: int) -> trace_pb2.ProcessTrace: ...

    def kill(self) -> None: ...


class RingCarrier(KeyTaker, Protocol):
    """A carrier process."""

    def give(self, start: engine_pb2.StartCarrier) -> None: ...

    @property
    def taken(self) -> engine_pb2.CarrierUp: ...

    async def form(self, seconds: float) -> None: ...

    async def trace(self, since: int) -> trace_pb2.ProcessTrace: ...

    async def look(self) -> LinkFigures: ...

    async def stop(self) -> None: ...


@dataclass
class LinkSecrets:
    """Results of the handshakes on both links, for the carrier and for the report to the coordinator.

    A repeated handshake renews one link; the fields of the other link are empty then.
    """

    outgoing_keys: bytes = b""
    incoming_keys: bytes = b""
    outgoing_pass: bytes = b""
    incoming_pass: bytes = b""
    next_address: str = ""
    infos: list[membership_pb2.LinkInfo] = field(default_factory=list)
    row_key: bytes = b""
    """As `SessionKeys.row_key`, for the engine; at head and tail, if the epoch's plan `seals_rows`."""

    def renewed(self, newer: LinkSecrets) -> LinkSecrets:
        """A copy of these secrets in which the fields that `newer` has replace the own ones."""
        return LinkSecrets(
            outgoing_keys=newer.outgoing_keys or self.outgoing_keys,
            incoming_keys=newer.incoming_keys or self.incoming_keys,
            outgoing_pass=newer.outgoing_pass or self.outgoing_pass,
            incoming_pass=newer.incoming_pass or self.incoming_pass,
            next_address=newer.next_address or self.next_address,
            infos=self.infos,
            row_key=newer.row_key or self.row_key,
        )

    def start(self) -> engine_pb2.StartCarrier:
        """The secrets as the carrier's start command."""
        return engine_pb2.StartCarrier(
            next_address=self.next_address,
            outgoing_keys=self.outgoing_keys,
            incoming_keys=self.incoming_keys,
            outgoing_pass=self.outgoing_pass,
            incoming_pass=self.incoming_pass,
        )


MAX_GUESTS = 16


class AttachedGateway(Protocol):
    """A gateway's control stream: that of the scheduling gateway or, at the head, of a guest."""

    guest: int
    """The guest's number, from 1 on; 0 for the scheduling gateway."""

    @property
    def id(self) -> str: ...

    @property
    def used(self) -> bool:
        """Whether it has sent the engine any work."""

    @property
    def goodbye(self) -> str:
        """The reason of its goodbye; empty while it has sent none."""

    def row_event(self, event: bytes) -> None: ...

    def row_digests(self, digests: engine_pb2.RowDigests) -> None: ...

    def epoch_over(self, problem: membership_pb2.Problem) -> None: ...

    def say_goodbye(self, reason: str) -> None: ...

    def guest_left(self, guest: int) -> None: ...

    def take_back(self, guest: int, number: int) -> None: ...

    @property
    def behind(self) -> bool: ...

    def pass_on(self, **message: Any) -> None: ...


class Workshop(Protocol):
    """Makes the parts of an epoch; a seat (`seat.py`) in production."""

    async def engine(self, plan: EpochPlan, progress: Callable[[Reached], None]) -> StageEngine: ...

    def channel(self) -> ChannelEnds: ...

    async def carrier(
        self, plan: EpochPlan, channel: tuple[int, ...], on_fault: Callable[[SealringError], None]
    ) -> RingCarrier: ...

    async def prefix_disk(
        self, plan: EpochPlan, caches: Sequence[bytes], former: Sequence[membership_pb2.FormerRing]
    ) -> engine_pb2.PrefixDisk | None:
        """The folder in which the epoch's engine stores prefixes; None if it keeps them in memory alone.

        `caches` says with what each rank computes them, `former` is of rings of before.
        """

    async def bring(
        self, plan: EpochPlan, disk: engine_pb2.PrefixDisk, asked: engine_pb2.BringBlocks
    ) -> None:
        """Stores what other members have of a recall's blocks."""

    def group_address(self) -> str:
        """An address at which the engine may listen for its group. The port was free a moment ago."""

    def rdma_devices(self, plan: EpochPlan) -> list[str]:
        """The RDMA device to each rank, for a group over jaccl. Raises EpochEnded (NO_GROUP)."""

    async def handshakes(self, plan: EpochPlan, again: Callable[[LinkSecrets], None]) -> LinkSecrets:
        """Shakes hands on both links.

        Until `settled`, a neighbour that missed the end of its handshake may repeat it; `again` receives the
        new secrets.
        """

    def settled(self, plan: EpochPlan) -> None:
        """Stops answering handshakes: all members are prepared."""

    async def rotate(self, plan: EpochPlan, gate: StepGate, carrier: KeyTaker) -> None:
        """Renews the links' keys until it is cancelled."""

    def release(self, plan: EpochPlan) -> None:
        """Removes the epoch's files."""

    def report(self, message: membership_pb2.MemberMessage) -> None: ...


class MemberEpoch:
    """The state machine. All methods but `closed` return at once; use it from one event loop."""

    def __init__(self, plan: EpochPlan, workshop: Workshop, *, after: MemberEpoch | None = None) -> None:
        """Takes no engine or carrier until `after`, the ended epoch before this one, is cleaned up."""
        self.plan = plan
        self._after = after
        self.phase = Phase.PREPARING
        self.reached = Reached(STARTING)
        self.gate = StepGate()
        self.signed_once = SignedOnce()
        self.gateway: AttachedGateway | None = None
        self.guests: dict[int, AttachedGateway] = {}
        self._guests = 0  # since the epoch started: each has a number of its own
        self.engine: StageEngine | None = None
        self.kept: Sequence[control_pb2.KeptPrefix] = ()
        self.recalls = False
        self.draft_runs = self.draft_bytes = 0
        self.drafts_together = False
        self.links: list[membership_pb2.LinkInfo] = []
        self._row_key = b""
        self._devices: Sequence[str] = ()
        self._group_address = ""
        self._group_addresses: Sequence[str] = ()
        self._caches: Sequence[bytes] = ()
        self._former: Sequence[membership_pb2.FormerRing] = ()
        self._disk: engine_pb2.PrefixDisk | None = None
        self._bringing: set[asyncio.Task[None]] = set()
        self._workshop = workshop
        self._carrier: RingCarrier | None = None
        self._engine_open = False
        self._joining = False
        self._keys_given = False
        self._repeated: list[LinkSecrets] = []
        self._channel: ChannelEnds | None = None
        self._work: asyncio.Task[None] | None = None
        self._rotation: asyncio.Task[None] | None = None
        self._cleanup: asyncio.Task[None] | None = None
        self._log = log.bind(ring=plan.ring, epoch=plan.epoch)

    def prepare(self) -> None:
        """Starts phase one, which ends with a report of EpochPrepared or EpochFault."""
        self._begin(self._prepare, _PREPARE_SECONDS)

    def commit(
        self,
        group_addresses: Sequence[str] = (),
        caches: Sequence[bytes] = (),
        former: Sequence[membership_pb2.FormerRing] = (),
    ) -> None:
        """Starts phase two, which ends with a report of EpochUp or EpochFault.

        `caches` says with what each rank computes its caches, `former` is of rings of before,
        `group_addresses` where each rank of a tensor ring is to be found.
        """
        if self.phase is Phase.PREPARED:
            self.phase = Phase.FORMING
            self._group_addresses, self._caches, self._former = group_addresses, caches, former
            self._workshop.settled(self.plan)
            self._begin(self._form, FORM_SECONDS + GROUP_SECONDS * bool(self.plan.backend) + 5.0)
        elif self.phase is Phase.PREPARING:
            self.fault(FailedPrecondition("the epoch was committed before it was prepared"))

    def attach(self, gateway: AttachedGateway, *, yields: bool = False) -> None:
        """Attaches the scheduling gateway or, at the head while another one schedules, a guest. A gateway
        that `yields` can only be a guest.

        Raises FailedPrecondition (EPOCH_NOT_SERVING, NOBODY_SCHEDULES), Conflict (GATEWAY_ATTACHED).
        """
        if self.phase is not Phase.UP:
            raise FailedPrecondition(
                "the epoch does not serve", hint="attach to the current epoch", reason="EPOCH_NOT_SERVING"
            )
        if self.gateway is None and yields:
            raise FailedPrecondition(
                "no other gateway schedules this ring yet", hint="attach again", reason=NOBODY_SCHEDULES
            )
        if self.gateway is None:
            self.gateway = gateway
        elif self.plan.rank or len(self.guests) >= MAX_GUESTS:
            raise Conflict(
                "another gateway schedules this ring", hint="one at a time", reason="GATEWAY_ATTACHED"
            )
        else:
            self._guests += 1
            gateway.guest = self._guests
            self.guests[gateway.guest] = gateway

    def detach(self, gateway: AttachedGateway) -> None:
        """Removes a gateway whose stream has ended. The epoch ends if it has sent steps: their order is lost.

        Otherwise the first guest that attaches again schedules next.
        """
        if self.guests.pop(gateway.guest, None) is not None and self.gateway is not None:
            self.gateway.guest_left(gateway.guest)
        if self.gateway is not gateway:
            return
        self.gateway = None
        if gateway.used:
            self.fault(_gateway_over(gateway.goodbye))
        for guest in self._take_guests():
            guest.say_goodbye(NOBODY_SCHEDULES)

    def dismiss(self, allowed: Collection[str], reason: str) -> None:
        """Says goodbye to guests whose ids are not in `allowed`."""
        for guest in self.guests.values():
            if guest.id not in allowed:
                guest.say_goodbye(reason)

    def _take_guests(self) -> list[AttachedGateway]:
        guests, self.guests = self.guests, {}
        return list(guests.values())

    async def look(self) -> LinkFigures:
        """Figures of the links. Raises EpochEnded."""
        return await self._carrier.look() if self._carrier is not None else LinkFigures()

    def row_event(self, event: bytes) -> None:
        """Passes an engine's event on to the gateway."""
        if self.gateway is not None and self.phase is Phase.UP:
            self.gateway.row_event(event)

    def row_digests(self, digests: engine_pb2.RowDigests) -> None:
        """Has what an engine says of a row that has ended signed for the gateway."""
        if self.gateway is not None and self.phase is Phase.UP:
            self.gateway.row_digests(digests)

    def engine_fault(self, error: SealringError) -> None:
        """Ends the epoch on an engine's fault. MLX may end a process whose group does not form."""
        self.fault(_no_group(self.plan.backend, error) if self._joining else error)

    def fault(self, error: BaseException) -> None:
        """Ends the epoch and reports `error` to coordinator and gateway. Does nothing once it has ended."""
        if self.phase is Phase.ENDED:
            return
        if not isinstance(error, SealringError):
            self._log.error("epoch_error", exc_info=error)
        problem = to_problem(error)
        level = logging.INFO if problem.reason == GATEWAY_LEFT else logging.WARNING
        self._log.log(level, "epoch fault", phase=self.phase.value, reason=problem.reason)
        self._workshop.report(
            membership_pb2.MemberMessage(
                fault=membership_pb2.EpochFault(ring=self.plan.ring, epoch=self.plan.epoch, problem=problem)
            )
        )
        self._end(problem)

    async def trace(self, since: int) -> list[trace_pb2.ProcessTrace]:
        """Activities of engine and carrier since `since`, nanoseconds on the machine's monotonic clock.

        Raises FailedPrecondition (EPOCH_NOT_SERVING), EpochEnded, DeadlineExceeded.
        """
        if self.phase is not Phase.UP or self.engine is None:
            raise FailedPrecondition(
                "this node does not serve that epoch", reason="EPOCH_NOT_SERVING", hint="try again"
            )
        asked = [self.engine.trace(since)]
        if self._carrier is not None:
            asked.append(self._carrier.trace(since))
        return list(await asyncio.gather(*asked))

    def end(self, reason: str) -> None:
        """Ends the epoch for the coordinator; only the gateway is informed."""
        if self.phase is Phase.ENDED:
            return
        self._log.info("epoch_ended", phase=self.phase.value, reason=reason)
        self._end(
            to_problem(
                EpochEnded(
                    "the coordinator ended the epoch", hint="the ring is formed anew", reason="EPOCH_ENDED"
                )
            )
        )

    async def closed(self) -> None:
        """Waits until an ended epoch is cleaned up."""
        if self._cleanup is not None:
            await asyncio.shield(self._cleanup)

    def _begin(self, work: Callable[[], Awaitable[None]], seconds: float) -> None:
        self._work = asyncio.get_running_loop().create_task(self._guard(work, seconds))

    async def _guard(self, work: Callable[[], Awaitable[None]], seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await work()
        except BaseExceptionGroup as group:
            self.fault(_first_error(group))
        except TimeoutError:
            self.fault(EpochEnded("the epoch was not formed in time", reason="EPOCH_TIMEOUT"))
        except Exception as error:
            self.fault(error)

    async def _prepare(self) -> None:
        plan = self.plan
        self._devices = self._workshop.rdma_devices(plan) if plan.backend == JACCL else []
        async with asyncio.TaskGroup() as group:
            group.create_task(self._get_parts())
            if plan.size > 1:  # neighbours need not wait for the clean-up of the epoch before
                handshakes = group.create_task(self._workshop.handshakes(plan, self._give_again))
        await self._open_engine()
        if plan.size > 1:
            self.links = self._give_keys(handshakes.result())
        self.phase = Phase.PREPARED
        suites = [one.suite for one in self.links]
        self._log.info("epoch_prepared", rank=plan.rank, size=plan.size, suites=suites)
        loaded = self.engine.loaded if self.engine is not None else None
        prepared = membership_pb2.EpochPrepared(ring=plan.ring, epoch=plan.epoch, links=self.links)
        prepared.computes_on = self.engine.computes_on if self.engine is not None else ""
        times = loaded.times if loaded is not None else []
        for one in times:
            if one.tokens == 1:
                prepared.times.add(rows=one.rows, microseconds=one.microseconds, context=one.context)
        chunks = [one for one in times if one.tokens > 1 and one.rows == 1]
        if longest := max(chunks, key=lambda one: one.tokens, default=None):
            prepared.chunk_tokens, prepared.chunk_us = longest.tokens, longest.microseconds
        prepared.metal = loaded is not None and loaded.metal
        prepared.caches = loaded.caches if loaded is not None else b""
        if plan.backend:
            prepared.group_address = self._group_address = self._workshop.group_address()
        self._workshop.report(membership_pb2.MemberMessage(prepared=prepared))

    async def _form(self) -> None:
        key, self._row_key = self._row_key, b""
        if key and self.engine is not None:
            self.engine.seal_rows(key)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._use_disk())
            if self._carrier is not None:
                group.create_task(self._carrier.form(FORM_SECONDS))
        if self.plan.backend:
            await self._join_group()
        self.phase = Phase.UP
        self._log.info("epoch_up")
        if self._carrier is not None:
            rotation = self._guard(partial(self._workshop.rotate, self.plan, self.gate, self._carrier), None)
            self._rotation = asyncio.get_running_loop().create_task(rotation)
            for link in self.links:
                if link.from_rank == self.plan.rank:
                    taken = self._carrier.taken
                    link.address, link.round_trip_us = taken.way.address, taken.round_trip_us
                    link.bytes_per_second = taken.bytes_per_second
                    self._log.info("link_taken", to=link.to_rank, rate=link.bytes_per_second)
        up = membership_pb2.EpochUp(ring=self.plan.ring, epoch=self.plan.epoch, links=self.links)
        self._workshop.report(membership_pb2.MemberMessage(up=up))

    async def _use_disk(self) -> None:
        """Has the engine store prefixes, if all members do."""
        engine = self.engine
        assert engine is not None
        own = engine.loaded.caches if engine.loaded is not None else b""
        agreed = own in self._caches
        disk = None
        if agreed:
            disk = await self._workshop.prefix_disk(self.plan, self._caches, self._former)
        self._disk, self.recalls = disk, disk is not None
        engine.use_disk(engine_pb2.UseDisk(disk=disk))

    def bring(self, asked: engine_pb2.BringBlocks) -> None:
        """The engine waits for what other members have of a recall's blocks; beyond `_MOST_BROUGHT` it gets
        nothing."""
        if len(self._bringing) >= _MOST_BROUGHT:
            if self.engine is not None:
                self.engine.brought(asked.number)
            return
        task = asyncio.get_running_loop().create_task(self._bring(asked))
        self._bringing.add(task)
        task.add_done_callback(self._bringing.discard)

    async def _bring(self, asked: engine_pb2.BringBlocks) -> None:
        try:
            if self._disk is not None:
                await self._workshop.bring(self.plan, self._disk, asked)
        finally:
            with contextlib.suppress(EpochEnded):
                if self.engine is not None and self.phase is Phase.UP:
                    self.engine.brought(asked.number)

    async def _join_group(self) -> None:
        """Raises EpochEnded (NO_GROUP)."""
        plan, engine = self.plan, self.engine
        assert engine is not None
        addresses = self._group_addresses
        if len(addresses) != plan.size or addresses[plan.rank] != self._group_address:
            raise InvalidInput("the commit does not name every rank's address", reason="BAD_EPOCH")
        for address in addresses:
            parse_address(address)
        join = engine_pb2.JoinGroup(
            backend=plan.backend, rank=plan.rank, addresses=addresses, rdma_devices=self._devices
        )
        self._joining = True
        try:
            await engine.join_group(join, GROUP_SECONDS)
        except SealringError as error:
            raise _no_group(plan.backend, error) from error
        finally:
            self._joining = False

    async def _get_parts(self) -> None:
        after, self._after = self._after, None
        if after is not None:
            await after.closed()
        self._progress(Reached(STARTING))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._get_engine())
            if self.plan.size > 1:
                group.create_task(self._get_carrier())

    async def _get_engine(self) -> None:
        self.engine = await self._workshop.engine(self.plan, self._progress)

    async def _get_carrier(self) -> None:
        self._channel = self._workshop.channel()
        self._carrier = await self._workshop.carrier(self.plan, self._channel.carrier, self.fault)

    async def _open_engine(self) -> None:
        plan = self.plan
        assert self.engine is not None
        self._engine_open = True
        command = engine_pb2.OpenEngineEpoch(
            epoch=plan.epoch,
            rank=plan.rank,
            size=plan.size,
            prefill_chunk=plan.prefill_chunk,
            max_rows=plan.max_rows,
            kv_budget=plan.kv_budget,
            ring=plan.ring,
            speculate=plan.speculate,
            sealed=plan.seals_rows,
        )
        descriptors = self._channel.engine if self._channel else ()
        opened = await self.engine.open_epoch(command, descriptors, self)
        self.kept = opened.kept
        self.draft_runs, self.draft_bytes = opened.draft_runs, opened.draft_bytes
        self.drafts_together = opened.drafts_together
        self._close_channel()

    def _give_keys(self, secrets: LinkSecrets) -> list[membership_pb2.LinkInfo]:
        assert self._carrier is not None
        while self._repeated:
            secrets = secrets.renewed(self._repeated.pop(0))
        self._keys_given, self._row_key = True, secrets.row_key
        start = secrets.start()
        start.rank, start.size = self.plan.rank, self.plan.size
        start.form_timeout_ms = int(FORM_SECONDS * 1000)
        self._carrier.give(start)
        return secrets.infos

    def _give_again(self, secrets: LinkSecrets) -> None:
        """Uses the newer keys of a link whose neighbour has repeated its handshake."""
        if not self._keys_given:
            self._repeated.append(secrets)
        elif self.phase is Phase.PREPARED and self._carrier is not None:
            self._carrier.give(secrets.start())
            self._row_key = secrets.row_key or self._row_key

    def _progress(self, reached: Reached) -> None:
        self.reached = reached
        if self.phase is Phase.PREPARING:
            progress = membership_pb2.EpochProgress(
                ring=self.plan.ring, epoch=self.plan.epoch, fraction=reached.share, **vars(reached)
            )
            self._workshop.report(membership_pb2.MemberMessage(progress=progress))

    def _end(self, problem: membership_pb2.Problem) -> None:
        self.phase = Phase.ENDED
        for task in (self._work, self._rotation, *self._bringing):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        gateway, self.gateway = self.gateway, None
        for each in (gateway, *self._take_guests()):
            if each is not None:
                each.epoch_over(problem)
        self._cleanup = asyncio.get_running_loop().create_task(self._clean_up())

    async def _clean_up(self) -> None:
        """Releases all parts in reverse order; a part that fails does not keep the others."""
        for task in (self._work, self._rotation):
            if task is not None:
                await asyncio.wait((task,))
        try:
            async with contextlib.AsyncExitStack() as parts:
                parts.callback(self._workshop.release, self.plan)
                parts.push_async_callback(self._close_engine)
                parts.callback(self._close_channel)
                parts.push_async_callback(self._stop_carrier)  # first, because the engine may wait for it
        except Exception as error:
            self._log.error("epoch_clean_up_failed", exc_info=error)

    async def _stop_carrier(self) -> None:
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            await carrier.stop()

    async def _close_engine(self) -> None:
        """Ends the engine's epoch. An engine that cannot end it is killed, as it cannot start another."""
        engine, self.engine = self.engine, None
        if engine is None or not self._engine_open:
            return
        if (
            self.plan.backend
        ):  # a process cannot leave its group, nor a collective sum in which others are missing
            engine.kill()
            await engine.stop()
            return
        try:
            await engine.close_epoch()
        except SealringError as error:  # it has ended, or does not answer
            self._log.warning("engine_epoch_not_closed", why=error.message)
            engine.kill()
        except Exception as error:
            self._log.warning("engine_epoch_not_closed", exc_info=error)
            engine.kill()

    def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.close()


def _gateway_over(goodbye: str) -> EpochEnded:
    """The end of an epoch whose gateway is gone, by the reason of its goodbye."""
    hint = "the ring is formed anew; weights stay loaded"
    if goodbye == LEAVING:
        return EpochEnded("the gateway left", hint=hint, reason=GATEWAY_LEFT)
    if goodbye:
        return EpochEnded(f"the gateway ended the epoch: {goodbye}", hint=hint, reason="GATEWAY_ENDED")
    return EpochEnded("the gateway's control stream ended", hint=hint, reason="GATEWAY_GONE")


def _no_group(backend: str, error: SealringError) -> EpochEnded:
    """The end of an epoch whose engine could not join its group."""
    if isinstance(error, EpochEnded) and error.reason == EpochEnded.no_group:
        return error
    return EpochEnded(
        f"MLX's {backend} group did not come up: {error.message}",
        hint="--or-pipeline serves without it",
        reason=EpochEnded.no_group,
    )


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a task group, unwrapped."""
    inner = group.exceptions[0]
    return _first_error(inner) if isinstance(inner, BaseExceptionGroup) else inner
