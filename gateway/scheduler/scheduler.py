"""The scheduler of one ring: a pure state machine. Events in, actions out; no clocks and no I/O.

A request waits in a fair queue, is given to the head (which tokenizes it), waits for KV memory on every
member, is prefilled, decoded and evicted. Keys take turns at every one of these.

`max_tokens` 0 means as many as the context holds. Such a request reserves its prompt and `EXTENSION` tokens,
and further ones as it gets near; rows that want more come before rows that want to start. Where the ring has
no more, it ends with FINISH_REASON_LENGTH. A request with a limit has all of its memory from the start.

When an epoch ends, its requests go back to the front of the queue, and the next one goes on with their
answers (docs/decisions/0019-answers-go-on.md). Sealed ones of which the client has seen anything fail with
EPOCH_ENDED: it asks for the rest itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sealring.gateway.scheduler.actions import (
    Action,
    AnnounceStep,
    Begin,
    Deliver,
    DiscardRow,
    EndEpoch,
    Fail,
    Finish,
    Pause,
    Piece,
    SignRow,
)
from sealring.gateway.scheduler.admission import EXTENSION, EpochRows, alone
from sealring.gateway.scheduler.board import PlanError
from sealring.gateway.scheduler.drafting import acceptance_rates
from sealring.gateway.scheduler.facts import RingFacts
from sealring.gateway.scheduler.planner import Announced, StepPlanner
from sealring.gateway.scheduler.queue import FairQueue, Pace, retry_after
from sealring.gateway.scheduler.request import TOKEN_BYTES, Request, Row
from sealring.mesh.errors import (
    DeadlineExceeded,
    EpochEnded,
    FailedPrecondition,
    InvalidInput,
    ResourceExhausted,
    SealringError,
    StageFailed,
)
from sealring.mesh.ring.prefix_names import split
from sealring.mesh.ring.unbroken import around, unbroken
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

MAX_ATTEMPTS = 8
"""Epochs in a row that may end while they compute a request and bring no more of it than a prefill does: the
request may be what ends them. Faults hit the same prompts fewer times in a row: an epoch that brings more
starts the count again, and by now the coordinator pauses for ten seconds before the next."""

LONGEST_WAIT = 240.0
"""Longest wait in seconds of a request without a deadline. Common HTTP clients give up after five minutes
without an answer; the last minute is for the prompt itself."""


@dataclass(frozen=True, slots=True)
class RingLoad:
    """How busy a ring is: requests waiting and running, and the reserved part of its KV memory."""

    waiting: int
    running: int
    kv_usage: float


class _Epoch:
    """State that ends with an epoch."""

    def __init__(self, ring: RingFacts, queue: FairQueue, pace: Pace) -> None:
        self.ring = ring
        self.planner = StepPlanner(ring)
        self.admission = EpochRows(ring, self.planner, queue, pace)


class Scheduler:
    """Every method is one event and returns what has to be done, in order. Not thread safe.

    `now` is a monotonic time in seconds: of steps, to see what prefill costs the rows that run, and of
    requests that are begun, to estimate how long a new one would wait.
    """

    def __init__(self, *, queue_limit: int) -> None:
        self._queue = FairQueue(queue_limit)
        self._pace = Pace()
        self._now = 0.0  # of the last event that has it; one comes about every second
        self._epoch: _Epoch | None = None
        self._actions: list[Action] = []
        self._suspect: Row | None = None
        self._holding = False

    @property
    def planner(self) -> StepPlanner | None:
        """The steps of the current epoch, to look at."""
        return self._epoch.planner if self._epoch else None

    @property
    def used(self) -> bool:
        """Whether the epoch's members have been given anything to do."""
        return self._epoch is not None and self._epoch.admission.last_row > 0

    @property
    def expects_answer(self) -> bool:
        """Whether the ring owes an answer, to a step that is announced or to a row given to the head."""
        epoch = self._epoch
        if epoch is None:
            return False
        return epoch.planner.under_way > 0 or any(row.opening for row in epoch.admission.opened.values())

    def counts(self) -> tuple[int, int]:
        """The requests that were begun and are not over, and those that wait for their begin."""
        resuming = len(self._queue.resuming)
        begun = len(self._epoch.admission.requests) if self._epoch else 0
        return begun + resuming, len(self._queue) - resuming

    def hold(self, holding: bool) -> list[Action]:
        """Begins no waiting request from now on, or begins them again. Those that were begun go on."""
        self._holding = holding
        return self._pump()

    def load(self) -> RingLoad:
        if self._epoch is None:
            return RingLoad(len(self._queue), 0, 0.0)
        admission = self._epoch.admission
        opened = len({row.request.id for row in admission.opened.values()})
        running = len(admission.requests) - opened
        return RingLoad(len(self._queue) + opened, running, self._epoch.planner.ledger.usage())

    def kept(self) -> tuple[int, int]:
        """Tokens of the prefixes that the ring keeps, and their bytes on all members together."""
        if self._epoch is None:
            return 0, 0
        planner = self._epoch.planner
        return planner.prefixes.counted.tokens, sum(planner.prefixes.kept_bytes())

    @property
    def suspect(self) -> str:
        """The request that may have needed more memory than a member had, until that is `settled`; or empty.

        It waits meanwhile and is not drained: it would end the epoch of another ring as well.
        """
        row = self._suspect
        return row.request.id if row is not None and row.request.id in self._queue else ""

    def attach(self, ring: RingFacts) -> list[Action]:
        """A new epoch has begun; the one before must have been ended, and what it ended with settled."""
        self._suspect = None
        self._epoch = _Epoch(ring, self._queue, self._pace)
        return self._pump()

    def submit(self, request: Request, now: float) -> list[Action]:
        """Queues a request, or fails it where it is new: the queue is full, or it would wait for too long."""
        self._now = now
        if self._ends(request):
            return self._take()
        if (too_long := self._too_long(request)) is not None:
            self._actions.append(Fail(request, too_long))
            return self._take()
        if self._queue.full and not request.progress.resumes:
            displaced = self._queue.displace(request)
            self._actions.append(Fail(displaced or request, self._queue_full()))
            if displaced is None:
                return self._take()
        self._queue.push(request, now)
        return self._pump()

    def expire(self, now: float) -> list[Action]:
        """Fails the requests that were to be begun by now and are not. To be called about every second."""
        self._now = now
        for request in self._queue.expired(now):
            self._actions.append(Fail(request, _too_late(request)))
        for row in self._epoch.admission.unstarted if self._epoch else ():
            if row.request.progress.deadline <= now and not row.closed:
                self._fail(row, _too_late(row.request))
        if self._epoch is not None:
            self._actions.extend(self._epoch.planner.recalls.expire(now))
        return self._pump()

    def row_opened(self, opened: control.RowOpened) -> list[Action]:
        """The head has tokenized a row. Raises InvalidInput (BAD_STEP, BAD_PREFIXES) for what cannot be: the
        epoch must end."""
        epoch = self._running_epoch()
        row = epoch.admission.opened.get(opened.row)
        if row is None or not row.opening:
            return self._take()
        prompt_tokens, max_tokens, answered = opened.prompt_tokens, opened.max_tokens, opened.answered
        if prompt_tokens - answered < 1 or max_tokens < 1:
            raise InvalidInput(f"the head opened row {row.number} without room", reason="BAD_STEP")
        if answered != len(row.progress.tokens) and not row.request.sealed:
            raise InvalidInput(f"the head goes on with row {row.number} from elsewhere", reason="BAD_STEP")
        row.unbroken = unbroken(opened.unbroken, prompt_tokens)
        names = split(opened.prefixes, prompt_tokens, ends=opened.ends)
        row.names = tuple(pair for pair in names if around(row.unbroken, pair[0])[0] == pair[0])
        row.prompt_tokens, row.answered, row.ceiling = prompt_tokens, answered, max_tokens
        row.request.progress.prompt_tokens = prompt_tokens - answered
        row.earlier = answered - len(row.progress.tokens)
        row.params_bytes, row.drafts = opened.params_bytes, opened.drafts
        row.limit = max_tokens if row.request.max_tokens else min(max_tokens, EXTENSION)
        capacity, longest = epoch.planner.ledger.capacity, epoch.ring.prefill_chunk
        if not row.request.max_tokens and prompt_tokens < capacity:
            row.limit = min(row.limit, capacity - prompt_tokens)
            while row.limit > 1 and not epoch.admission.can_hold(row):
                row.limit //= 2
        for copy in row.copies:
            copy.prompt_tokens = prompt_tokens
            copy.limit, copy.ceiling, copy.drafts = row.limit, row.ceiling, row.drafts
            copy.earlier = row.earlier
        if longest < max((end - begin for begin, end in row.unbroken), default=0):
            self._fail(row, _image_too_large(row, longest))
        elif not epoch.admission.can_hold(row):
            fewer = (count for count in range(len(row.copies), 0, -1) if epoch.admission.can_hold(row, count))
            self._fail(row, _too_large(row, capacity, next(fewer, 0)))
        elif row.request.idle and not epoch.planner.prefixes.pays(row):
            self._fail(
                row, FailedPrecondition("an idle ring has nothing to gain", reason="NOTHING_TO_PREFILL")
            )
        elif not row.request.progress.started:
            row.request.progress.started = True
            self._actions.append(Begin(row.request, prompt_tokens - answered))
        epoch.planner.recalls.opened(row, opened.stored)
        return self._pump()

    def recalled(self, recalled: control.Recalled) -> list[Action]:
        """A member has read blocks from its disk. Raises InvalidInput (BAD_STEP) for more than it was asked
        for: the epoch must end."""
        self._actions.extend(self._running_epoch().planner.recalls.answered(recalled))
        return self._pump()

    def row_refused(self, number: int, error: SealringError) -> list[Action]:
        """The head refuses a row: its prompt is too long, or its envelope does not open. Or the head gives up
        a row whose answer cannot follow its grammar."""
        epoch = self._running_epoch()
        if (row := epoch.admission.rows.get(number)) is not None:
            self._close_all(row.request.id, unknown=number)
            self._actions.append(Fail(row.request, error))
        return self._pump()

    def step_done(self, done: control.StepDone, now: float) -> list[Action]:
        """A step has come round, or with `more` some of its outputs have. Raises InvalidInput (BAD_STEP) when
        they cannot have: the epoch must end."""
        epoch, self._now = self._running_epoch(), now
        if done.more:
            if not done.outputs:
                raise InvalidInput(f"step {done.step} brought a part of nothing", reason="BAD_STEP")
            due = epoch.planner.due(done.step)
            due.bring(done.outputs)
            self._outputs(epoch.admission.rows, done, due)
            return self._take()
        if done.outputs:
            epoch.planner.due(done.step).bring(done.outputs)
        step = epoch.planner.done(done.step, now, rates=acceptance_rates(done.rates), refuted=done.refuted)
        if step is None:
            return self._take()
        self._outputs(epoch.admission.rows, done, step)
        epoch.planner.tokens_out(step)
        return self._pump()

    def steps_executed(self, number: int) -> list[Action]:
        """The head has executed all steps up to this one; their tokens may still be on the way."""
        self._running_epoch().planner.executed(number)
        return self._pump()

    def cancel(self, request_id: str) -> list[Action]:
        """Forgets a request that nobody waits for; no further action comes for it."""
        if request_id in self._queue:
            self._queue.remove(request_id)
        elif self._epoch is not None and request_id in self._epoch.admission.requests:
            self._close_all(request_id)
        return self._pump()

    def end_epoch(self, error: EpochEnded) -> list[Action]:
        """Ends the epoch and queues its requests again. `settled` follows once its reason is known."""
        ended = self._epoch.admission.requests if self._epoch else {}
        self._epoch = None
        self._pace.rest()
        self._suspect = _suspect([row for rows in ended.values() for row in rows])
        for rows in ended.values():
            computed = any(row.begun or row.opening for row in rows)
            rows[0].request.progress.end_epoch(computed=computed)
        self._go_on((rows[0].request for rows in ended.values()), error)
        return self._take()

    def settled(self, *, out_of_memory: bool) -> list[Action]:
        """Clears the suspect once the reason of the last epoch's end is known: it fails if that was a lack of
        memory, and waits like the others otherwise."""
        row, self._suspect = self._suspect, None
        if out_of_memory and row is not None and row.request.id in self._queue:
            self._queue.remove(row.request.id)
            self._actions.append(Fail(row.request, _out_of_memory(row)))
        return self._take()

    def give_back(
        self, worked_on: Sequence[Request], waiting: Sequence[Request], error: EpochEnded
    ) -> list[Action]:
        """Takes back the requests of another scheduler whose epoch is over: those that a member computed, and
        those that waited."""
        for request in reversed(waiting):
            if not self._ends(request):
                self._queue.push_front(request)
        for request in worked_on:
            request.progress.end_epoch(computed=True)
        self._go_on(worked_on, error)
        return self._take()

    def _go_on(self, requests: Iterable[Request], error: EpochEnded) -> None:
        """Requests wait in front again, in their order, behind those that are begun alone."""
        alone_first = sorted(requests, key=alone, reverse=True)
        for request in reversed(alone_first):
            if self._ends(request):
                continue
            if request.progress.all_attempts >= MAX_ATTEMPTS:
                self._actions.append(Fail(request, _given_up(request, error)))
            elif request.sealed and request.progress.earlier_tokens:
                self._actions.append(Fail(request, error))
            else:
                self._queue.push_front(request)

    def drain(self) -> list[Request]:
        """Takes all waiting requests away but the suspect, for another ring to serve."""
        requests, suspect = self._queue.drain(), self._suspect
        if suspect is not None and suspect.request in requests:
            requests.remove(suspect.request)
            self._queue.push_front(suspect.request)
        return requests

    def _outputs(self, rows: dict[int, Row], done: control.StepDone, step: Announced) -> None:
        """Raises InvalidInput (BAD_STEP) for an output that the step does not owe, or that cannot be."""
        owed = step.owed
        pieces: list[Piece] = []
        self._actions.append(Deliver(pieces))
        large = done.ByteSize() > TOKEN_BYTES
        for output in done.outputs:  # each field that is read here counts: they are most of a step's time
            number = output.row
            left = owed.get(number, 0)
            if not left:
                raise InvalidInput(f"step {step.number} owes no token of row {number}", reason="BAD_STEP")
            owed[number] = left - 1
            row = rows.get(number)
            if row is None:
                continue
            delta, progress = output.delta, row.progress
            tokens = delta.tokens
            if tokens != len(progress.tokens) + 1 + row.earlier:
                raise InvalidInput(f"the head counts {tokens} tokens of row {row.number}", reason="BAD_STEP")
            if finish := output.finish:  # it may raise: an answer is not resumed behind its last token
                self._running_epoch().planner.finished(row, tokens - row.answered, output)
            progress.tokens.append(output.token)
            if large:
                self._spend(row, output)
            held: Sequence[inference.TokenLogprob] = ()
            if row.request.logprobs:
                progress.held = held = output.held
            if delta.text or delta.sealed or delta.HasField("parsed") or delta.logprobs:
                if delta.choice != row.choice:
                    delta.choice = row.choice
                pieces.append((row.request, delta, held))
            if finish:
                self._sign(row, tokens)
                self._finish(row, finish, tokens)
            elif tokens - row.answered >= row.limit:
                self._sign(row, 0)
                self._finish(row, inference.FINISH_REASON_LENGTH, tokens)

    def _spend(self, row: Row, output: control.RowOutput) -> None:
        """Raises InvalidInput (BAD_STEP) for a size that cannot be."""
        held = sum(one.ByteSize() for one in output.held)
        size, request = output.ByteSize(), row.request
        row.progress.spend(size, sealed=request.sealed, logprobs=request.logprobs, held=held)

    def _sign(self, row: Row, tokens: int) -> None:
        """Has a row signed for, as `SignRow` says."""
        if row.request.receipt is not None:
            self._actions.append(SignRow(row.number, tokens))

    def _finish(self, row: Row, reason: inference.FinishReason.ValueType, tokens: int) -> None:
        request = row.request
        row.progress.end = inference.FinishedChoice(reason=reason, completion_tokens=tokens)
        self._close(row)
        if self._ends(request):
            del self._current().admission.requests[request.id]

    def _ends(self, request: Request) -> bool:
        """Ends a request of which all has come; another scheduler may have gone before it said so."""
        if request.progress.over:
            self._actions.append(Finish(request, _finished(request)))
        return request.progress.over

    def _fail(self, row: Row, error: SealringError) -> None:
        self._close_all(row.request.id)
        self._actions.append(Fail(row.request, error))

    def _close_all(self, request_id: str, *, unknown: int = 0) -> None:
        """Ends what has not ended of a request. Of rows that were never stepped only the head knows, and of
        an `unknown` one not even that."""
        for row in self._current().admission.requests.pop(request_id):
            if not row.begun and row.number != unknown:
                self._actions.append(DiscardRow(row.number))
            for each in row.group:
                if not each.closed:
                    self._close(each)

    def _give_way(self, request: Request) -> None:
        """A request waits again. The client of a sealed one has its tokens, and asks for the rest."""
        self._close_all(request.id)
        if request.sealed:
            gave_way = "the answer gives way to another key's request"
            self._actions.append(Fail(request, EpochEnded(gave_way, hint="ask for the rest of it")))
            return
        request.progress.pause()
        self._actions.append(Pause(request))
        self._queue.push(request, self._now)

    def _close(self, row: Row) -> None:
        self._actions.extend(self._current().admission.close(row))

    def _pump(self) -> list[Action]:
        if self._epoch is not None:
            try:
                self._go(self._epoch)
            except PlanError as error:
                self._actions.append(EndEpoch(error))
        return self._take()

    def _go(self, epoch: _Epoch) -> None:
        """Raises PlanError."""
        epoch.planner.board.check()
        opened, giving_way, waiting, pressed = epoch.admission.go(self._now, holding=self._holding)
        self._actions.extend(opened)
        for request in giving_way:
            self._give_way(request)
        for step in epoch.planner.steps(waiting, pressed=pressed):
            self._actions.append(AnnounceStep(step))
        self._actions.extend(epoch.planner.recalls.take_due())
        epoch.planner.board.check()  # also where nothing is announced

    def _take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _current(self) -> _Epoch:
        """The epoch, as long as it has rows."""
        assert self._epoch is not None
        return self._epoch

    def _running_epoch(self) -> _Epoch:
        """The epoch of which a member has answered. Raises PlanError."""
        epoch = self._epoch
        if epoch is None:
            raise InvalidInput("no epoch is running", reason="BAD_STEP")
        epoch.planner.board.check()
        return epoch

    def _queue_full(self) -> ResourceExhausted:
        waiting = len(self._queue)
        half = self._pace.wait(waiting, self._now) / 2
        return _refusal(f"{waiting} requests are waiting already", half)

    def _too_long(self, request: Request) -> ResourceExhausted | None:
        """Why a new request is not let wait; None for one that goes on after a fault, or on another ring."""
        if request.progress.due is not None or request.progress.all_attempts:
            return None
        taken = Counter[str]()
        if (epoch := self._epoch) is not None:
            taken.update(row.request.key for row in epoch.admission.unstarted)
        before = self._queue.ahead(request, self._now, taken)
        wait, limit = self._pace.wait(before, self._now), min(request.patience, LONGEST_WAIT)
        if wait <= limit:
            return None
        why = f"{before} requests come before this one, which would take about {wait:.0f} s"
        return _refusal(why, wait - limit, ", or with a later deadline" * (limit < LONGEST_WAIT))


def _refusal(why: str, seconds: float, also: str = "") -> ResourceExhausted:
    return ResourceExhausted(
        why, reason="QUEUE_FULL", hint=f"try again later{also}", retry_after=retry_after(seconds)
    )


def _finished(request: Request) -> inference.Finished:
    progress = request.progress
    ends = [choice.end for choice in progress.choices if choice.end is not None]
    return inference.Finished(
        reason=ends[0].reason,
        prompt_tokens=progress.prompt_tokens,
        completion_tokens=sum(end.completion_tokens for end in ends),
        cached_tokens=progress.cached,
        drafted_tokens=progress.drafted,
        accepted_tokens=progress.accepted,
        choices=ends if request.choices > 1 else (),
    )


def _given_up(request: Request, error: EpochEnded) -> FailedPrecondition:
    return FailedPrecondition(
        f"the ring's epoch ended {request.progress.all_attempts} times in a row while it worked on this "
        f"request, and brought no more than a token of it each time; the last time {error.message}",
        hint="the request may be what ends it: do not send it again before the operator has found the cause",
        reason="REQUEST_GIVEN_UP",
    )


def _too_late(request: Request) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the request was not begun within {request.patience:g} s",
        reason="DEADLINE_PASSED",
        hint="try again later, or with a later deadline",
        param="deadline_ms",
    )


def _suspect(rows: Sequence[Row]) -> Row | None:
    """The row whose prompt was being computed, which alone needs memory at once; of several the longest."""
    # the earlier tokens of a sealed answer are known to its client alone: none are counted here
    without_token = [
        row
        for row in rows
        if row.begun and len(row.progress.tokens) == (0 if row.request.sealed else row.answered)
    ]
    return max(without_token, key=lambda row: row.prompt_tokens - row.reused, default=None)


def _out_of_memory(row: Row) -> InvalidInput:
    return InvalidInput(
        f"a member of the ring ran out of memory while it computed this prompt of {row.prompt_tokens} tokens",
        hint="send a shorter prompt; the cluster's operator sees in its status which member it was",
        reason=StageFailed.out_of_memory,
        param="messages",
    )


def _image_too_large(row: Row, longest: int) -> InvalidInput:
    tokens = max(end - begin for begin, end in row.unbroken)
    return InvalidInput(
        f"an image of this prompt has {tokens} tokens, and this ring computes {longest} at a time",
        reason="IMAGE_TOO_LARGE",
        hint="send a smaller image, or ask the operator for a longer --prefill-chunk",
        param="messages",
    )


def _too_large(row: Row, capacity: int, answers: int) -> InvalidInput:
    """`answers` of the request would fit at once."""
    param = "max_tokens" if row.prompt_tokens < capacity else "messages"
    wrong = f"prompt and max_tokens need memory for {row.reserved} tokens and this ring holds {capacity}"
    hint = "send a shorter prompt or a lower max_tokens"
    if answers:
        param, hint = "n", f"ask for {answers} at most"
        wrong = (
            f"{len(row.group)} answers are asked for and this ring computes {answers} of this length at once"
        )
    return InvalidInput(
        wrong,
        reason="TOO_LARGE_FOR_RING",
        hint=hint,
        param=param,
        prompt_tokens=row.prompt_tokens,
        max_tokens=row.limit,
        capacity_tokens=capacity,
    )
