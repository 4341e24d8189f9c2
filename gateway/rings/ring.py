"""One ring: the life cycle of its epochs, and which requests it takes in each of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from sealring.edge.inference.answer import AnswerWriter
from sealring.edge.metrics import Metrics
from sealring.gateway.rings.control import ControlStreams, Unheard
from sealring.gateway.rings.epoch import LEFT, Abilities, Epoch, ServingEpoch
from sealring.gateway.rings.forwarded import ForwardedRequests
from sealring.gateway.rings.members import Members
from sealring.gateway.rings.own import OwnRequests
from sealring.gateway.rings.requests import Answers
from sealring.gateway.rings.rows import Counters
from sealring.gateway.rings.served import Refused, ServedRequests
from sealring.gateway.scheduler.request import Request
from sealring.gateway.scheduler.scheduler import RingLoad
from sealring.mesh.clock import Clock, awake_clock
from sealring.mesh.errors import EpochEnded, SealringError, Unavailable
from sealring.mesh.rpc.reach import Backoff
from sealring.v1 import control_pb2 as control

log = structlog.get_logger()

PATIENCE_SECONDS = 60.0
"""Seconds that a ring takes new requests after it went down, until the coordinator sets them
(`RingState`)."""

YIELD_SECONDS = 2.0
"""The time that a gateway leaves to another one, so that the other attaches first.

A ring goes on when a gateway's machine stops, if the gateway that schedules it is on a machine of the ring.
So a gateway on the machine of another node waits.

A guest waits if one of its prompts was being computed: only that gateway may know that a member had no
memory for the prompt. It attaches with the epoch, or `GOODBYE_SECONDS` after the end of the last one.
"""


class Patience:
    """How long a ring that is down takes new requests, by a clock that runs while it could form."""

    def __init__(self, formable: Clock) -> None:
        self.seconds = PATIENCE_SECONDS
        self._formable = formable
        self.begin()

    def begin(self) -> None:
        self._since = self._formable()

    def lasts(self) -> bool:
        return self._formable() - self._since < self.seconds


@dataclass(frozen=True)
class Shared:
    """What the rings of a gateway have in common.

    `formable` counts the seconds in which a ring could have formed, as far as this gateway knows.
    """

    members: Members
    metrics: Metrics
    queue_limit: int
    idle_prefill: bool = True
    clock: Clock = awake_clock
    formable: Clock = awake_clock
    refused: Refused = field(default_factory=Refused)


class Ring:
    """Runs the ring's current epoch, if any, and keeps requests over a change of epochs."""

    def __init__(self, name: str, deployment: str, shared: Shared, on_lost: Callable[[Ring], None]) -> None:
        """`on_lost` may take away what waits, for other rings."""
        self.name = name
        self.deployment = deployment
        self.patience = Patience(shared.formable)
        self.serving: ServingEpoch | None = None
        self._members = shared.members
        self._clock = clock = shared.clock
        self._on_lost = on_lost
        self.answers = answers = Answers(name)
        self.own = OwnRequests(
            answers,
            Counters(shared.metrics, deployment),
            clock,
            queue_limit=shared.queue_limit,
            idle_prefill=shared.idle_prefill,
        )
        self._served = ServedRequests(self.own, answers, deployment, shared.refused)
        self._forwarded = ForwardedRequests(self.own, answers, clock)
        self._epoch: Epoch | None = None
        self._over = 0  # the last epoch that was used and lost
        self.abilities = Abilities()  # none before the first epoch
        self.task: asyncio.Task[None] | None = None

    @property
    def attached(self) -> bool:
        return self._epoch is not None

    def load(self) -> RingLoad:
        """How busy the ring is, as far as this gateway knows."""
        load, forwarded = self.own.load(), self._forwarded.counts()
        return RingLoad(load.waiting + sum(forwarded), load.running, load.kv_usage)

    def counts(self) -> tuple[int, int]:
        """The requests of this gateway that the ring has begun, and those that wait."""
        counts = self.own.counts(), self._forwarded.counts()
        return sum(begun for begun, _ in counts), sum(waiting for _, waiting in counts)

    def kept(self) -> tuple[int, int]:
        """Tokens of the prefixes that the ring keeps, and their bytes on all members together."""
        return self.own.scheduler.kept()

    def hold(self, holding: bool) -> None:
        """Begins no waiting request from now on, or begins them again."""
        self.own.hold(holding)

    def awaited(self) -> None:
        """The model is being loaded or can be: the ring takes new requests as if it had gone down just
        now."""
        self.patience.begin()

    @property
    def patient(self) -> bool:
        """Whether a new request may still be given to this ring. One that was accepted waits for as long as
        its client does: it goes on when the machines wake that were asleep."""
        return self.attached or self.patience.lasts()

    def serve(self, serving: ServingEpoch) -> None:
        """Attaches to an epoch, leaving an earlier one. Changes nothing when it is the current one."""
        current = self.serving
        if current is not None and current.epoch != serving.epoch:
            current = None
        if current is not None and _fixed(current) != _fixed(serving):
            # an epoch has the members and links that it began with; others must begin another one
            self.leave()
            return
        self.serving = serving
        if current is not None and self._epoch is not None:
            self._epoch.serving = serving
        running = self.task is not None and not self.task.done()
        if serving.epoch == self._over or (current is not None and running):
            return
        self._leave_session()
        previous, self.task = self.task, None
        if previous is not None:
            previous.cancel()
        self.task = asyncio.get_running_loop().create_task(self.run(serving, previous))

    def leave(self) -> None:
        """Leaves the epoch, which the coordinator has ended; another may come."""
        self._leave_session()
        self.serving = None
        if self.task is not None:
            self.task.cancel()

    def _leave_session(self) -> None:
        """Ends the epoch at once: its task says goodbye to the members, and new requests wait for the
        next."""
        if self._epoch is not None:
            self.end(self._epoch.streams, LEFT)

    async def close(self) -> None:
        """Leaves for good; requests must have been taken away or fail."""
        self.leave()
        if self.task is not None:
            await asyncio.wait((self.task,))
        self.fail_all(Unavailable("the ring is gone", hint="try again", reason="RING_GONE"))

    def submit(self, request: Request, answer: AnswerWriter) -> None:
        answer.timings.routed = time.perf_counter()
        answer.timings.loaded = answer.timings.routed if self.attached else 0.0
        if self._epoch is not None and self._epoch.streams.guest:
            self._forwarded.submit(request, answer)
        else:
            self.own.submit(request, answer)

    def cancel(self, request_id: str) -> None:
        """Ends a request that may or may not be here."""
        if request_id in self.answers:
            (self._forwarded if request_id in self._forwarded else self.own).cancel(request_id)

    def take_waiting(self) -> list[tuple[Request, AnswerWriter]]:
        """Gives up the requests that wait, for another ring. Those of guests are forgotten:
        their gateways bring them again, and their ids are of this ring alone."""
        self.own.push_aside()
        waiting = self.own.scheduler.drain()
        theirs = {request.id for request in waiting if request.id in self._served}
        taken = [(request, self.answers.pop(request.id)) for request in waiting]
        return [(request, answer) for request, answer in taken if request.id not in theirs]

    def tick(self) -> None:
        """Fails requests whose own deadlines have passed, and has an idle ring prefill. Must be called about
        every second."""
        self.patience.lasts()  # by a clock that counts looks
        self.own.tick()

    def fail_all(self, error: SealringError) -> None:
        self.own.perform(self.own.scheduler.end_epoch(EpochEnded(error.message, hint=error.hint)))
        for _, answer in self.take_waiting():
            answer.fail(error)

    async def run(self, serving: ServingEpoch, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.wait((previous,))
            previous = None  # which holds all that its epoch had
        backoff = Backoff()
        loop = asyncio.get_running_loop()
        yields, self._forwarded.yields = serving.elsewhere or self._forwarded.yields, False
        until = self._clock() + YIELD_SECONDS
        while True:
            started = loop.time()
            newest = self.serving or serving  # its members may have other addresses by now
            if await self._attend(newest, yields=yields and self._clock() < until):
                return
            await asyncio.sleep(backoff.after(loop.time() - started))

    async def _attend(self, serving: ServingEpoch, *, yields: bool) -> bool:
        """One attachment to an epoch. Returns whether the epoch is over: members end one whose steps have
        lost their gateway, unless the end is Unheard."""
        streams = ControlStreams(
            serving.ring,
            serving.epoch,
            serving.members,
            self._members,
            clear_links=serving.clear_links,
            yields=yields,
            busy=lambda: bool(self.answers),
        )
        which = {"ring": serving.ring, "epoch": serving.epoch}
        reason, heard = "", True
        try:
            attached = await streams.attach()
            self.begin(serving, streams, attached)
            stages = len(serving.members)
            log.info(
                "ring_attached", **which, stages=stages, min_trust=serving.min_trust, guest=streams.guest
            )
            await streams.run(self.handle)
        except SealringError as error:
            reason, heard = error.reason, not isinstance(error, Unheard)
            member = error.metadata.get("member", "")
            log.warning(
                "ring_lost", **which, reason=reason, member=member, why=error.message, hint=error.hint
            )
        except Exception as error:
            log.error("ring_lost", **which, exc_info=error)
        finally:
            used = self.end(streams, reason)
            self._settle(out_of_memory=streams.out_of_memory)
            streams.cancel()
        return used and heard

    def begin(
        self, serving: ServingEpoch, streams: ControlStreams, attached: Sequence[control.Attached]
    ) -> None:
        self._epoch = epoch = Epoch(serving, streams, attached)
        self.abilities = epoch.abilities
        for answer in self.answers.values():
            answer.timings.loaded = answer.timings.loaded or time.perf_counter()
        for requests in (self._forwarded,) if streams.guest else (self._served, self.own):
            requests.begin(epoch)

    def handle(self, response: control.ScheduleResponse) -> None:
        """Takes a message of a member. Raises InvalidInput where it breaks the protocol."""
        if self._epoch is None:
            return
        if self._epoch.streams.guest:
            self._forwarded.hear(response)
        elif response.HasField("forward"):
            self._served.hear(response)
        else:
            self.own.hear(response)

    def end(self, streams: ControlStreams, reason: str) -> bool:
        """Ends the epoch of these streams, unless it has ended. Returns whether its members had anything to
        do."""
        if self._epoch is None or self._epoch.streams is not streams:
            return False
        self._epoch = None
        self.patience.begin()
        used = self.own.scheduler.used
        if used:
            self._over = streams.epoch
        # The order matters. Own requests are queued again, which sets `suspect`. Then guests' requests are
        # dropped, except the suspect: `_settle` may have to refuse it. Then forwarded requests are queued
        # here again. Last, other rings may take what waits: nothing that comes later would be moved.
        for requests in (self.own, self._served, self._forwarded):
            requests.end(reason)
        self._on_lost(self)
        return used

    def _settle(self, *, out_of_memory: bool) -> None:
        """Follows the end of an epoch once every member has given its reason, or has had
        `GOODBYE_SECONDS`."""
        suspect = self.own.scheduler.suspect
        if suspect:
            self.own.perform(self.own.scheduler.settled(out_of_memory=out_of_memory))
            if suspect in self._served:
                self._served.cancel(suspect)
            self._on_lost(self)


def _fixed(serving: ServingEpoch) -> tuple[list[str], bool]:
    """The fields that no newer roster may change in an epoch."""
    return [member.id for member in serving.members], serving.clear_links
