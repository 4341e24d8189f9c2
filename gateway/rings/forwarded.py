"""Requests of this gateway's clients while another gateway schedules the ring.

They go over the head to the gateway that schedules, and the answers come back. The gateway with the client's
connection keeps the request and the tokens so far: neither gateway loses them with the other.
"""

from __future__ import annotations

import math
from array import array

from sealring.edge.inference.answer import AnswerWriter
from sealring.gateway.rings.epoch import Epoch
from sealring.gateway.rings.own import OwnRequests
from sealring.gateway.rings.requests import Answers
from sealring.gateway.scheduler.queue import due_time
from sealring.gateway.scheduler.request import ChoiceProgress, Request
from sealring.mesh.clock import Clock
from sealring.mesh.errors import InvalidInput
from sealring.mesh.rpc.problem import from_problem
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

_WITHOUT_SCHEDULER = frozenset({"GATEWAY_GONE", "GATEWAY_LEFT", "MEMBER_LEFT"})
"""Reasons of an epoch's end that mean that the scheduling gateway itself has gone."""


class Sent:
    """Requests that a guest has forwarded and that are not over."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._numbers: dict[str, int] = {}
        self._worked_on: set[int] = set()
        self._last = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._numbers

    @property
    def begun(self) -> int:
        """The number of requests that a member computes."""
        return len(self._worked_on)

    def add(self, request: Request, now: float, *, again: bool = False) -> control.Forward:
        """The request as it goes out `now`, with what is left of its deadline; `again` after a fault."""
        due_time(request, now)
        progress = request.progress
        left = progress.deadline - now
        self._last += 1
        self._requests[self._last] = request
        self._numbers[request.id] = self._last
        return control.Forward(
            number=self._last,
            request=inference.GenerateRequest(
                request_id=request.id,
                model=request.deployment,
                envelope=request.envelope,
                max_tokens=request.max_tokens,
                min_trust=request.min_trust,
                priority=request.priority,
                deadline_ms=max(1, round(left * 1e3)) if math.isfinite(left) else 0,
                choices=request.choices,
                attempts=max(int(again or progress.claimed > 0), progress.attempts),
                receipt=request.receipt,
            ),
            key=request.key,
            tenant=request.tenant,
            progress=[progress_from(choice, 0) for choice in progress.choices] if progress.started else [],
            seen=again or progress.attempts > 0,
        )

    def cancel(self, request_id: str) -> control.Forward:
        """Forgets a request that nobody waits for any more."""
        return control.Forward(number=self._remove(request_id), cancel=True)

    def take(self, forwarded: control.Forwarded, context: int) -> Request | None:
        """The request that an event is of, after its new tokens are added; None if the request is over.

        Answers longer than asked for, or than the context, are refused. Raises InvalidInput (BAD_MESSAGE).
        """
        request = self._requests.get(forwarded.number)
        if request is None:
            return None
        kind = forwarded.WhichOneof("what")
        if kind is None:
            (self._worked_on.discard if forwarded.waits else self._worked_on.add)(forwarded.number)
            if forwarded.waits:
                request.progress.pause()
            elif request.progress.started:
                request.progress.deadline, request.progress.begun = math.inf, True  # it is being computed
        progress, choices = forwarded.progress, request.choices
        if len(progress) not in (0, choices) or forwarded.event.delta.choice >= choices:
            raise InvalidInput("a forwarded answer has other choices", reason="BAD_MESSAGE")
        for choice, new in zip(request.progress.choices, progress, strict=False):
            extend(choice, new, min(request.max_tokens or context, context))
        if forwarded.event.HasField("delta"):
            choice = request.progress.choices[forwarded.event.delta.choice]
            choice.pieces += 1
            # a gateway of protocol 12 does not say which choice a sealed piece is of: all count together
            counted = request.progress.choices if request.sealed else (choice,)
            most = sum(len(one.tokens) + (request.receipt is not None) for one in counted)
            if sum(one.pieces for one in counted) > most:
                raise InvalidInput("a forwarded answer has more pieces than tokens", reason="BAD_MESSAGE")
            choice.spend(forwarded.event.ByteSize(), sealed=request.sealed, logprobs=request.logprobs)
        if kind == "problem" or forwarded.event.HasField("finished"):
            self._remove(request.id)
        return request

    def clear(self) -> tuple[list[Request], list[Request]]:
        """Forgets all, and returns them: those that a member computed, and those that waited."""
        worked_on = [request for number, request in self._requests.items() if number in self._worked_on]
        waiting = [request for number, request in self._requests.items() if number not in self._worked_on]
        self._requests, self._numbers, self._worked_on = {}, {}, set()
        return worked_on, waiting

    def _remove(self, request_id: str) -> int:
        number = self._numbers.pop(request_id)
        del self._requests[number]
        self._worked_on.discard(number)
        return number


class ForwardedRequests:
    """`Requests` that another gateway schedules, while this one is a guest of the ring."""

    def __init__(self, own: OwnRequests, answers: Answers, clock: Clock) -> None:
        """Between two epochs the requests wait with those of `own`."""
        self._own = own
        self._answers = answers
        self._clock = clock
        self._sent = Sent()
        self._epoch: Epoch | None = None
        self.yields = False
        """Whether the other gateway should attach to the next epoch first: only it knows whether a prompt of
        this one ran a member out of memory."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sent

    def counts(self) -> tuple[int, int]:
        """The requests that a member computes, and those that wait."""
        return self._sent.begun, len(self._sent) - self._sent.begun

    def begin(self, epoch: Epoch) -> None:
        self._epoch = epoch
        for request in self._own.scheduler.drain():
            self._forward(request, again=True)

    def submit(self, request: Request, answer: AnswerWriter) -> None:
        self._answers[request.id] = answer
        self._forward(request)

    def hear(self, response: control.ScheduleResponse) -> None:
        """Takes an event of a request. Raises InvalidInput (BAD_MESSAGE)."""
        epoch, forwarded = self._epoch, response.forwarded
        if epoch is None or not response.HasField("forwarded"):
            return
        if (request := self._sent.take(forwarded, epoch.serving.context)) is None:
            return
        answer, event = self._answers[request.id], forwarded.event
        answer.timings.ring += forwarded.ring_ms / 1000
        match forwarded.WhichOneof("what"), event.WhichOneof("event"):
            case "problem", _:
                self._answers.pop(request.id).fail(from_problem(forwarded.problem))
            case "event", "prefilling":
                answer.prefilled(event.prefilling.done, event.prefilling.prompt_tokens)
            case "event", "started" if not request.progress.started:
                request.progress.started, event.started.request_id = True, request.id
                request.progress.prompt_tokens = event.started.prompt_tokens
                answer.started(event.started)
            case "event", "delta":
                answer.delta(event.delta)
                if behind := self._answers.give_up_behind(request.id):
                    self.cancel(behind)
            case "event", "finished":
                request.progress.cached = event.finished.cached_tokens
                self._answers.pop(request.id).finished(event.finished)

    def cancel(self, request_id: str) -> None:
        self._answers.pop(request_id, None)
        cancelled = self._sent.cancel(request_id)
        if self._epoch is not None:
            self._epoch.take_back(f"forward {cancelled.number}", control.ScheduleRequest(forward=cancelled))

    def end(self, reason: str) -> None:
        self._epoch = None
        worked_on, waiting = self._sent.clear()
        prefilled = any(not request.progress.new_tokens for request in worked_on)
        self.yields |= prefilled and reason not in _WITHOUT_SCHEDULER
        self._own.give_back(worked_on, waiting, reason)

    def _forward(self, request: Request, *, again: bool = False) -> None:
        assert self._epoch is not None
        forward = self._sent.add(request, self._clock(), again=again)
        message = control.ScheduleRequest(forward=forward).SerializeToString()
        self._epoch.streams.send_prompt(message, key=f"forward {forward.number}")
        self._epoch.streams.stir()


def progress_from(choice: ChoiceProgress, sent: int) -> control.Progress:
    """What a choice has beyond its first `sent` tokens."""
    return control.Progress(tokens=choice.tokens[sent:], held=choice.held, end=choice.end)


def extend(choice: ChoiceProgress, new: control.Progress, most: int) -> None:
    length = len(choice.tokens) + len(new.tokens)
    if length > most or len(new.held) > length:
        raise InvalidInput("a forwarded answer is longer than it may be", reason="BAD_MESSAGE")
    choice.tokens.extend(array("I", new.tokens))
    choice.held = list(new.held)
    if new.HasField("end"):
        choice.end = new.end
