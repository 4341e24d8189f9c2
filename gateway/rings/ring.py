"""One ring: its scheduler, the requests that it serves, and its control streams, epoch after epoch."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from sealring.edge.inference.answer import EVENT_BYTES, Answer, AnswerWriter
from sealring.edge.metrics import Metrics
from sealring.gateway.rings.control import ControlStreams, Unheard
from sealring.gateway.rings.guests import GuestAnswer, Refused, Sent
from sealring.gateway.rings.idle import IdlePrefills
from sealring.gateway.rings.members import Members, MemberTarget
from sealring.gateway.rings.receipts import Receipts
from sealring.gateway.scheduler.actions import (
    Action,
    AnnounceStep,
    Begin,
    Deliver,
    DiscardRow,
    EndEpoch,
    Fail,
    Finish,
    OpenRow,
    RecallBlocks,
    SignRow,
)
from sealring.gateway.scheduler.facts import RingFacts
from sealring.gateway.scheduler.request import Request
from sealring.gateway.scheduler.scheduler import Load, Scheduler
from sealring.mesh.clock import Clock, awake_clock
from sealring.mesh.errors import (
    EpochEnded,
    FailedPrecondition,
    InvalidInput,
    ResourceExhausted,
    SealringError,
    StageFailed,
    Unavailable,
)
from sealring.mesh.member.proof import Credentials
from sealring.mesh.prompt.images import VISION, without_images
from sealring.mesh.prompt.tools import THINKING, capabilities_of
from sealring.mesh.prompt.validate import MAX_ENVELOPE_BYTES, check_text_envelope
from sealring.mesh.receipt.statement import MAX_EARLIER
from sealring.mesh.roster.rules import links_in_clear
from sealring.mesh.rpc.problem import from_problem
from sealring.mesh.rpc.reach import Backoff
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

log = structlog.get_logger()

PATIENCE_SECONDS = 60.0
"""Seconds that a ring takes new requests after it went down, until the coordinator sets them
(`RingState`)."""

RETRY_SECONDS = 5
"""`retry-after` in seconds for a model that no ring serves."""

LEFT = "LEFT"
"""The reason of an end by the coordinator."""

FREE_UNREAD, MAX_UNREAD, ALL_UNREAD = 64 << 10, 4 << 20, 32 << 20
"""Bytes of unread answers: free for each answer, most for one answer, most for all answers of a ring. A
client in step has none: text is joined, and connections have buffers of their own. 4 MiB are a million tokens
of text, or a thousand with the log-probabilities of 20 others each."""

MOST_ASKED, ALL_ASKED = 2048, MAX_ENVELOPE_BYTES
"""Guests' requests that one ring holds, and their bytes; one alone may have more. A head may have made them
up, and each costs a few times its bytes while it is given to the head."""

YIELD_SECONDS = 2.0
"""The time that a guest leaves to the gateway that scheduled before, so that it attaches first.

A guest waits if one of its prompts was being computed: only that gateway may know that a member had no
memory for the prompt. It attaches with the epoch, or `GOODBYE_SECONDS` after the end of the last one.
"""

_WITHOUT_SCHEDULER = frozenset({"GATEWAY_GONE", "GATEWAY_LEFT", "MEMBER_LEFT"})
"""Reasons of an epoch's end that mean that the scheduling gateway itself has gone."""


@dataclass(frozen=True)
class ServingEpoch:
    """A ring's epoch that serves, by the verified roster and the coordinator."""

    ring: str
    epoch: int
    deployment: str
    members: tuple[MemberTarget, ...]
    max_rows: int
    prefill_chunk: int
    context: int
    share_prefixes: bool
    min_trust: int
    roster_version: int
    speculate: bool
    clear_links: bool


class Ring:
    """Runs the ring's current epoch, if any, and keeps requests over a change of epochs."""

    def __init__(
        self,
        name: str,
        deployment: str,
        *,
        identity: Credentials,
        members: Members,
        queue_limit: int,
        idle_prefill: bool = True,
        metrics: Metrics,
        on_lost: Callable[[Ring], None],
        refused: Refused | None = None,
        clock: Clock = awake_clock,
        formable: Clock = awake_clock,
    ) -> None:
        """`on_lost` may take away what waits, for other rings. These share `refused`. `formable` counts the
        seconds in which the ring could have formed, as far as this gateway knows."""
        self.name = name
        self.deployment = deployment
        self.patience = PATIENCE_SECONDS
        self._identity = identity
        self._members = members
        self.scheduler = Scheduler(queue_limit=queue_limit)
        self.serving: ServingEpoch | None = None
        self._metrics = metrics
        self._clock = clock
        self.answers: dict[str, AnswerWriter] = {}
        self._receipts = Receipts()
        self._sent = Sent()  # while another gateway schedules
        self._idle = IdlePrefills()
        self._idle_prefill = idle_prefill
        self._context = 0  # of the epoch that is attached
        self.capabilities: Sequence[str] = ()
        """Abilities of the model beside answering, as the head reports them; empty before the first epoch."""

        self.vision_not_installed = False
        """Whether the head's machine is all that keeps the model from seeing, likewise."""

        self.unstarted: dict[int, AnswerWriter] = {}  # of rows given to the head, until their first step
        self._event = 0.0
        self._unsent = 0  # bytes for guests that are not on their way
        self._streams: ControlStreams | None = None
        self._formable = formable
        self._down_since = formable()
        self._over = 0  # the last epoch that was used and lost
        self.yields = False  # in the next one
        self._holding = False
        self._on_lost = on_lost
        self._refused = refused or Refused()
        self._secret = os.urandom(32)
        self._steps = metrics.steps.labels(deployment)
        self._queries = metrics.prefix_queries.labels(deployment)
        self._hits = metrics.prefix_hits.labels(deployment)
        self._from_disk = metrics.prefix_from_disk.labels(deployment)
        self._prefilled_idle = metrics.prefilled_idle.labels(deployment)
        self._routed_hits = metrics.routed_hits.labels(deployment)
        self._drafted = metrics.drafted.labels(deployment)
        self._accepted = metrics.accepted.labels(deployment)
        self.task: asyncio.Task[None] | None = None

    @property
    def attached(self) -> bool:
        return self._streams is not None

    @property
    def sees(self) -> bool:
        """Whether the model sees images, by the head's word."""
        return VISION in self.capabilities

    def load(self) -> Load:
        """How busy the ring is, as far as this gateway knows."""
        load = self.scheduler.load()
        if self._idle.running:
            return Load(0, 0, load.kv_usage)
        return Load(load.waiting + len(self._sent), load.running, load.kv_usage)

    def counts(self) -> tuple[int, int]:
        """The requests of this gateway that the ring has begun, and those that wait."""
        if self._idle.running:
            return 0, 0
        begun, waiting = self.scheduler.counts()
        return begun + self._sent.begun, waiting + len(self._sent) - self._sent.begun

    def hold(self, holding: bool) -> None:
        """Begins no waiting request from now on, or begins them again."""
        self._holding = holding
        if holding:
            self._push_aside()
        self.perform(self.scheduler.hold(holding))

    def awaited(self) -> None:
        """The model is being loaded or can be: the ring takes new requests as if it had gone down just
        now."""
        self._down_since = self._formable()

    @property
    def patient(self) -> bool:
        """Whether a new request may still be given to this ring. One that was accepted waits for as long as
        its client does: it goes on when the machines wake that were asleep."""
        return self.attached or self._formable() - self._down_since < self.patience

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
        if self._streams is not None:
            self.end(self._streams, LEFT)

    async def close(self) -> None:
        """Leaves for good; requests must have been taken away or fail."""
        self.leave()
        if self.task is not None:
            await asyncio.wait((self.task,))
        self.fail_all(Unavailable("the ring is gone", hint="try again", reason="RING_GONE"))

    def submit(self, request: Request, answer: AnswerWriter) -> None:
        self._push_aside()
        self.answers[request.id] = answer
        if THINKING in self.capabilities and self._idle_prefill:
            self._idle.begun(request)
        answer.timings.routed = time.perf_counter()
        answer.timings.loaded = answer.timings.routed if self.attached else 0.0
        if self._streams is not None and self._streams.guest:
            self._forward(self._streams, request)
        else:
            self.perform(self.scheduler.submit(request, self._clock()))

    def cancel(self, request_id: str) -> None:
        """Ends a request that may or may not be here."""
        if self.answers.pop(request_id, None) is None:
            return
        self._receipts.drop(request_id)
        if request_id in self._sent:
            self._take_back_forward(request_id)
        else:
            self.perform(self.scheduler.cancel(request_id))

    def take_waiting(self) -> list[tuple[Request, AnswerWriter]]:
        """Gives up the requests that wait, for another ring. Those of guests are forgotten:
        their gateways bring them again, and their ids are of this ring alone."""
        self._push_aside()
        taken = [(request, self.answers.pop(request.id)) for request in self.scheduler.drain()]
        return [(request, answer) for request, answer in taken if ":" not in request.id]

    def tick(self) -> None:
        """Fails requests whose own deadlines have passed, and has an idle ring prefill. Must be called about
        every second."""
        self._formable()  # a clock that counts looks
        self.perform(self.scheduler.expire(self._clock()))
        self._finish_all(self._receipts.late(self._clock()))
        self._idle.forget_but(self.answers)
        streams = self._streams
        schedules = streams is not None and not streams.guest and not streams.saves_power
        idle = schedules and not self._holding and not self.answers
        if idle and (request := self._idle.take()) is not None:
            self.answers[request.id] = Answer()  # which nobody reads
            self.perform(self.scheduler.submit(request, self._clock()))

    def _push_aside(self) -> None:
        """Ends what is prefilled because the ring was idle. What is computed of it stays kept."""
        self.cancel(self._idle.running)
        self._idle.running = ""

    def fail_all(self, error: SealringError) -> None:
        self.perform(self.scheduler.end_epoch(EpochEnded(error.message, hint=error.hint)))
        for _, answer in self.take_waiting():
            answer.fail(error)

    async def run(self, serving: ServingEpoch, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.wait((previous,))
            previous = None  # which holds all that its epoch had
        backoff = Backoff()
        loop = asyncio.get_running_loop()
        yields, self.yields = self.yields, False
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
            self._identity,
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
        self._streams, self._context, self._unsent = streams, serving.context, 0
        self._receipts.begin_epoch(len(serving.members))
        self.capabilities = capabilities_of(attached[0].capabilities) if attached else []
        self.vision_not_installed = bool(attached) and attached[0].vision_not_installed
        self.unstarted.clear()
        for answer in self.answers.values():
            answer.timings.loaded = answer.timings.loaded or time.perf_counter()
        if streams.guest:
            for request in self.scheduler.drain():
                self._forward(streams, request, again=True)
            return
        facts = RingFacts.of(
            attached,
            epoch=serving.epoch,
            max_rows=serving.max_rows,
            prefill_chunk=serving.prefill_chunk,
            speculate=serving.speculate,
            lockstep=serving.clear_links,
        )
        if facts.speculate and not facts.speculates:
            log.warning("ring_cannot_speculate", ring=self.name, stages=facts.stages)
        self.perform(self.scheduler.attach(facts))

    def end(self, streams: ControlStreams, reason: str) -> bool:
        if self._streams is not streams:
            return False
        self._streams = None
        self._down_since = self._formable()
        self._push_aside()
        self._idle.clear()
        used = self.scheduler.used
        if used:
            self._over = streams.epoch
            self._metrics.epochs_ended.labels(self.deployment).inc()
        self._finish_all(self._receipts.give_up("EPOCH_ENDED"))
        # The order matters. The end of the epoch queues its requests and sets `suspect`. Then guests'
        # requests are dropped, except the suspect: `_settle` may have to refuse it. Then forwarded requests
        # are queued here again. Last, other rings may take what waits: nothing that comes later would be
        # moved.
        self.perform(self.scheduler.end_epoch(epoch_ended(reason)))
        for request_id in [each for each in self.answers if ":" in each]:
            if request_id != self.scheduler.suspect:
                self.cancel(request_id)  # the guests bring them again
        worked_on, waiting = self._sent.clear()
        prefilled = any(not request.progress.new_tokens for request in worked_on)
        self.yields |= prefilled and reason not in _WITHOUT_SCHEDULER
        self.perform(self.scheduler.give_back(worked_on, waiting, epoch_ended(reason)))
        self._on_lost(self)
        return used

    def _settle(self, *, out_of_memory: bool) -> None:
        """Follows the end of an epoch once every member has given its reason, or has had
        `GOODBYE_SECONDS`."""
        suspect = self.scheduler.suspect
        if suspect:
            self.perform(self.scheduler.settled(out_of_memory=out_of_memory))
            if ":" in suspect:
                self.cancel(suspect)
            self._on_lost(self)

    def _forward(self, streams: ControlStreams, request: Request, *, again: bool = False) -> None:
        """Sends a request to the gateway that schedules."""
        forward = self._sent.add(request, self._clock(), again=again)
        message = control.ScheduleRequest(forward=forward).SerializeToString()
        streams.send_prompt(message, key=f"forward {forward.number}")
        streams.stir()

    def _take_back_forward(self, request_id: str) -> None:
        """Cancels a request at the gateway that schedules."""
        cancelled = self._sent.cancel(request_id)
        self._take_back(f"forward {cancelled.number}", control.ScheduleRequest(forward=cancelled))

    def _take_back(self, key: str, message: control.ScheduleRequest) -> None:
        """Sends what cancels a prompt, unless that has not begun to leave."""
        if self._streams is not None and not self._streams.withdraw(key):
            self._streams.send_prompt(message.SerializeToString())

    def _take_forwarded(self, forwarded: control.Forwarded) -> None:
        """Takes an event of a request that was forwarded. Raises InvalidInput (BAD_MESSAGE)."""
        request = self._sent.take(forwarded, self._context)
        if request is None:
            return
        answer, event = self.answers[request.id], forwarded.event
        match forwarded.WhichOneof("what"), event.WhichOneof("event"):
            case "problem", _:
                self.answers.pop(request.id).fail(from_problem(forwarded.problem))
            case "event", "started":
                if not request.progress.started:
                    request.progress.started, event.started.request_id = True, request.id
                    answer.started(event.started)
            case "event", "delta":
                delta = event.delta
                parsed = delta.parsed if delta.HasField("parsed") else None
                answer.delta(delta.text, delta.sealed, delta.tokens, delta.logprobs, delta.choice, parsed)
                if answer.unread > FREE_UNREAD:
                    self._bound_unread(request.id, answer)
            case "event", "finished":
                self.answers.pop(request.id).finished(event.finished)

    def _serve_guest(self, forward: control.Forward) -> None:
        """Takes a request of a gateway that does not schedule this ring, or cancels one. Raises InvalidInput
        (HEAD_BEHIND) if the head does not read the answers."""
        if self._unsent > ALL_UNREAD:
            raise InvalidInput("the head does not read the answers to its guests", reason="HEAD_BEHIND")
        asked = f"{forward.guest}:{forward.number}"
        if forward.cancel:
            every = [each for each in self.answers if each.startswith(f"{forward.guest}:")]
            for request_id in [asked] if forward.number else every:
                self.cancel(request_id)
            return
        answer = GuestAnswer(self._send_guest, forward.guest, forward.number, self._refused)
        try:
            request = answer.request(forward, self.deployment, self._context)
        except SealringError as error:
            answer.fail(error)
        else:
            if asked in self.answers:
                return
            held = [each.asked for each in self.answers.values() if each.asked]
            if held and (len(held) >= MOST_ASKED or sum(held) + answer.asked > ALL_ASKED):
                answer.fail(ResourceExhausted("guests have too much waiting", reason="QUEUE_FULL"))
                return
            self.submit(request, answer)

    def _send_guest(self, forwarded: control.Forwarded, written: Callable[[], None]) -> None:
        size, streams = forwarded.ByteSize() + EVENT_BYTES, self._streams
        self._unsent += size

        def on_its_way() -> None:
            written()
            if self._streams is streams:
                self._unsent -= size

        self._send_head(control.ScheduleRequest(forwarded=forwarded), on_its_way)

    def handle(self, response: control.ScheduleResponse) -> None:
        streams = self._streams
        if streams is None:
            return
        kind = response.WhichOneof("message")
        if streams.guest:
            if kind == "forwarded":
                self._take_forwarded(response.forwarded)
            return
        if kind == "pong":
            self.perform(self.scheduler.steps_executed(response.pong.steps))
            return
        if kind == "recalled":
            self.perform(self.scheduler.recalled(response.recalled))
            return
        if kind == "receipt":
            self._take_receipt(response.receipt)
            return
        now = self._clock()
        self._event = time.perf_counter()
        if kind == "forward":
            self._serve_guest(response.forward)
            return
        streams.answered()
        if kind == "done":
            self.perform(self.scheduler.step_done(response.done, now))
        elif kind == "opened":
            opened = response.opened
            if opened.row in self.unstarted:
                self.unstarted[opened.row].timings.answered = self._event
                self.unstarted[opened.row].waits()
            self.perform(self.scheduler.row_opened(opened))
        elif kind == "refused":
            refused = response.refused
            self.unstarted.pop(refused.row, None)
            self.perform(self.scheduler.row_refused(refused.row, from_problem(refused.problem)))
        if self.scheduler.expects_answer:
            streams.expect()

    def _take_receipt(self, part: control.RowReceipt) -> None:
        taken = self._receipts.take(part)
        if taken is None:
            return
        request, choice = taken
        if part.sealed and (answer := self.answers.get(request.id)) is not None:
            answer.delta("", part.sealed, len(request.progress.choices[choice].tokens), choice=choice)
        if (over := self._receipts.complete(request.id)) is not None:
            self._finish_all([over])

    def _finish_all(self, ends: Sequence[tuple[Request, inference.Finished]]) -> None:
        for request, finished in ends:
            if (answer := self.answers.pop(request.id, None)) is not None:
                answer.finished(finished)

    def perform(self, actions: list[Action]) -> None:
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            match action:
                case AnnounceStep(step):
                    self._announce(step)
                case Deliver(pieces):
                    for piece in pieces:
                        answer = self.answers.get(piece[0].id)
                        if answer is not None:  # else it was given up
                            answer.delta(*piece[1:])
                            self._idle.said(piece[0].id, piece[1], piece[6])
                            if answer.unread > FREE_UNREAD:
                                todo.extend(self._bound_unread(piece[0].id, answer))
                case RecallBlocks(number, chain, row):
                    recall = control.Recall(number=number, chain=chain.packed(), row=row)
                    if self._streams is not None:
                        self._streams.send_all(control.ScheduleRequest(recall=recall).SerializeToString())
                case OpenRow():
                    todo.extend(self._open(action))
                case SignRow(row, tokens):
                    self._sign(row, tokens)
                case DiscardRow(row):
                    self.unstarted.pop(row, None)
                    discard = control.ScheduleRequest(discard=control.DiscardRow(row=row))
                    self._take_back(f"row {row}", discard)
                case Begin(request, prompt_tokens):
                    self._begun(request, prompt_tokens)
                case Finish(request, finished):
                    self._finish(request, finished)
                case Fail(request, error):
                    if request.idle:
                        self._idle.running = ""
                    if (failed := self.answers.pop(request.id, None)) is not None:
                        failed.fail(error)
                case EndEpoch(fault):
                    if self._streams is not None:
                        self._streams.fail(fault)

    def _sign(self, row: int, tokens: int) -> None:
        """Has the tail sign for a row. The head signs by itself, once it has ended it."""
        if not tokens:
            self._receipts.unsigned(row)
        elif self._streams is not None and len(self._streams.streams) > 1:
            sign = control.SignRow(row=row, tokens=tokens)
            self._streams.send_tail(control.ScheduleRequest(sign=sign).SerializeToString())

    def _announce(self, step: control.Step) -> None:
        streams = self._streams
        if streams is not None:
            streams.send_all(control.ScheduleRequest(step=step).SerializeToString())
            self._steps.inc()
            if self._idle.running:
                self._prefilled_idle.inc(sum(chunk.end - chunk.start for chunk in step.prefill.chunks))
            for change in step.changes:
                if change.WhichOneof("change") == "restore":
                    self._from_disk.inc(change.restore.tokens)
            for chunk in step.prefill.chunks:
                if chunk.start == 0 or chunk.prefix:
                    self._first_chunk(chunk)
            streams.expect()

    def _first_chunk(self, chunk: control.Chunk) -> None:
        if self._idle.running:  # nothing else runs
            self.unstarted.pop(chunk.row, None)
            return
        self._queries.inc(chunk.prompt_tokens)
        self._hits.inc(chunk.start)
        if chunk.row in self.unstarted:
            answer = self.unstarted.pop(chunk.row)
            answer.timings.announce(self._event)
            answer.computed()

    def _open(self, action: OpenRow) -> list[Action]:
        """Gives a prompt to the head, unless the ring is trusted less than its sender demands: one whose
        links are in clear gets nothing that is sealed, nor for which any trust is demanded. A model that
        cannot see gets no image."""
        request, serving = action.request, self.serving
        floor = request.min_trust
        assert serving is not None  # as long as the scheduler is attached
        if serving.min_trust < floor:
            return self.scheduler.row_refused(action.row, below_floor(floor, serving.min_trust))
        if serving.clear_links and (floor or request.sealed):
            return self.scheduler.row_refused(action.row, links_in_clear(serving.deployment))
        if not self.sees:
            try:
                check_text_envelope(request.envelope.sealed)
                if request.shows:
                    clear, lacks = request.envelope.clear, self.vision_not_installed
                    clear.CopyFrom(without_images(clear, serving.deployment, not_installed=lacks))
            except (InvalidInput, FailedPrecondition) as error:
                return self.scheduler.row_refused(action.row, error)
        if self._streams is not None:
            self._streams.expect()
        answer = self.answers[request.id]
        answer.opened()
        self.unstarted[action.row] = answer
        answer.timings.opened = time.perf_counter()
        envelope, choices = request.envelope, request.choices
        if action.resume is not None:
            envelope, choices = inference.Envelope(clear=envelope.clear), 1
            envelope.clear.resume.CopyFrom(action.resume)
        if request.receipt is not None:
            self._receipts.opened(action.row, request, action.resume)
            self._note_epochs(request, envelope, action.resume)
        opened = control.OpenRow(
            row=action.row,
            request_id=request.id,
            deployment=request.deployment,
            max_tokens=request.max_tokens,
            choices=choices if choices > 1 else 0,
            client=self._client(request.key),
            prefix_scope="all" if serving.share_prefixes else f"key {request.tenant}",
            receipt=request.receipt,
        )
        if self._streams is not None:
            asked = control.ScheduleRequest(open=opened)
            asked.open.envelope.CopyFrom(envelope)  # last, as it would be copied with `opened`, too: 32 MiB
            message = asked.SerializeToString()
            self._streams.send_prompt(message, answer.timings.send, key=f"row {action.row}")
        return []

    def _note_epochs(
        self, request: Request, envelope: inference.Envelope, resume: inference.Resume | None
    ) -> None:
        """Names the epochs that brought the answer so far to the head, and notes this one."""
        serving = self.serving
        assert serving is not None
        for choice in (
            request.progress.choices if resume is None else [request.progress.choices[resume.choice]]
        ):
            if resume is not None:
                begun = choice.epochs or [inference.EarlierEpoch()]  # 0: by another gateway
                begun[-1].tokens = len(resume.tokens)
                choice.epochs = [each for each in begun if each.tokens][-MAX_EARLIER:]
                del envelope.clear.resume.earlier[:]
                envelope.clear.resume.earlier.extend(choice.epochs)
            choice.epochs.append(inference.EarlierEpoch(ring=self.name, epoch=serving.epoch))

    def _client(self, key: str) -> bytes:
        """A pseudonym of the client for the head, which learns only which prompts are of one client."""
        return hashlib.blake2b(key.encode(), key=self._secret, digest_size=16).digest()

    def _send_head(self, message: control.ScheduleRequest, written: Callable[[], None] | None = None) -> None:
        if self._streams is not None:
            self._streams.send_head(message.SerializeToString(), written)

    def _begun(self, request: Request, prompt_tokens: int) -> None:
        serving = self.serving
        self.answers[request.id].started(
            inference.Started(
                request_id=request.id,
                model=request.deployment,
                ring=self.name,
                prompt_tokens=prompt_tokens,
                min_trust=serving.min_trust if serving else 0,
                roster_version=serving.roster_version if serving else 0,
                epoch=serving.epoch if serving else 0,
            )
        )

    def _finish(self, request: Request, finished: inference.Finished) -> None:
        if request.idle:
            self._idle.running = ""
        else:
            self._idle.finished(request, finished)
        self._drafted.inc(finished.drafted_tokens)
        self._accepted.inc(finished.accepted_tokens)
        if request.routing_key and finished.cached_tokens:
            self._routed_hits.inc()
        if request.receipt is not None:
            self._receipts.hold(request, finished, self._clock())
            over = self._receipts.complete(request.id)
            self._finish_all([over] if over is not None else [])
        elif (answer := self.answers.pop(request.id, None)) is not None:
            answer.finished(finished)

    def _bound_unread(self, request_id: str, answer: AnswerWriter) -> list[Action]:
        """Gives up an answer whose reader is too far behind. If only all readers together are, that is the
        answer with most unread: a client that reads pays for no other one."""
        if answer.unread <= MAX_UNREAD:
            if sum(each.unread for each in self.answers.values()) <= ALL_UNREAD:
                return []
            request_id = max(self.answers, key=lambda each: self.answers[each].unread)
            answer = self.answers[request_id]
        log.warning("reader_behind", request_id=request_id, ring=self.name)
        del self.answers[request_id]
        answer.give_up(
            ResourceExhausted(
                "the client is too far behind in reading its answer",
                hint="read faster, or ask for less",
                reason="CLIENT_BEHIND",
            )
        )
        if request_id not in self._sent:
            return self.scheduler.cancel(request_id)
        self._take_back_forward(request_id)
        return []


def _fixed(serving: ServingEpoch) -> tuple[list[str], bool]:
    """The fields that no newer roster may change in an epoch."""
    return [member.id for member in serving.members], serving.clear_links


def below_floor(floor: int, trust: int) -> FailedPrecondition:
    return FailedPrecondition(
        f"the request demands a trust of {floor} and the ring has {trust}",
        hint="lower min_trust, or ask for a model on members of a higher trust level",
        reason="TRUST_BELOW_FLOOR",
        param="min_trust",
        min_trust=trust,
    )


def epoch_ended(reason: str) -> EpochEnded:
    """The error for clients whose answers the end of an epoch cut off. `reason` is that of the end."""
    if reason == StageFailed.out_of_memory:
        return EpochEnded(
            "a member of the ring ran out of memory", hint="send the request again", reason=reason
        )
    if reason == StageFailed.default_reason:
        return EpochEnded(
            "the model failed while it computed the answer",
            hint="the same request may fail again; the cluster's operator finds the cause in its status",
            reason=reason,
        )
    what = "the coordinator ended the ring's epoch" if reason == LEFT else "the ring lost a member"
    return EpochEnded(f"{what} while it answered", hint="send the request again")


def ring_down(message: str) -> Unavailable:
    """The error for requests that found no ring; a member may come back, or the operator place the model
    anew."""
    return Unavailable(message, hint="try again later", reason="RING_DOWN", retry_after=RETRY_SECONDS)
