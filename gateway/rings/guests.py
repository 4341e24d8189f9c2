"""Several gateways, one ring: the gateway that attaches to its head first schedules it, later ones are
guests.

A guest's requests go over the head to the gateway that schedules, and the answers come back. The gateway with
the client's connection keeps the request and the tokens so far: neither gateway loses them with the other.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from sealring.edge.inference.answer import EVENT_BYTES
from sealring.edge.inference.timings import Timings
from sealring.gateway.scheduler.queue import due_time
from sealring.gateway.scheduler.request import ChoiceProgress, Request
from sealring.gateway.scheduler.scheduler import MAX_ATTEMPTS
from sealring.mesh.errors import InvalidInput, SealringError, StageFailed, forget_frames
from sealring.mesh.prompt.validate import validate_request
from sealring.mesh.rpc.problem import to_problem
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

_REQUEST_BYTES = 4 << 10
"""Memory of a request beside its content, about."""


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
            progress=[_progress(choice, 0) for choice in progress.choices] if progress.started else [],
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
            if request.progress.started and not forwarded.waits:
                request.progress.deadline = math.inf  # it is being computed
        progress, choices = forwarded.progress, request.choices
        if len(progress) not in (0, choices) or forwarded.event.delta.choice >= choices:
            raise InvalidInput("a forwarded answer has other choices", reason="BAD_MESSAGE")
        for choice, new in zip(request.progress.choices, progress, strict=False):
            _extend(choice, new, min(request.max_tokens or context, context))
        if forwarded.event.HasField("delta"):
            choice = request.progress.choices[forwarded.event.delta.choice]
            choice.pieces += 1
            # a sealed piece does not say which choice it is of: all count as the first one's
            counted = request.progress.choices if request.sealed else (choice,)
            if choice.pieces > sum(len(one.tokens) + (request.receipt is not None) for one in counted):
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


class Refused:
    """The last of the guests' prompts for which a member had no memory.

    The lack of memory ended the epoch, and with it the way to the guest. The guest sends the prompt again, to
    any ring of this gateway, and then it is refused.
    """

    def __init__(self) -> None:
        self._last: tuple[tuple[str, str], SealringError] | None = None

    def remember(self, asked: control.Forward, error: SealringError) -> None:
        self._last = (asked.key, asked.request.request_id), error

    def check(self, asked: control.Forward) -> None:
        """Raises the remembered error of a request, once: a later request with the same id may fit."""
        if self._last is not None and self._last[0] == (asked.key, asked.request.request_id):
            error, self._last = self._last[1], None
            raise error


class GuestAnswer:
    """An `AnswerWriter` that sends the events of a guest's request back to the guest, with their tokens."""

    def __init__(
        self,
        send: Callable[[control.Forwarded, Callable[[], None]], None],
        guest: int,
        number: int,
        refused: Refused,
    ) -> None:
        """`send` calls its second argument once the message is on its way."""
        self.timings = Timings()
        self.unread = self.asked = 0
        self._send, self._refused = send, refused
        self._guest, self._number = guest, number
        self._asked: control.Forward | None = None
        self._request: Request | None = None
        self._counted: list[int] = []  # tokens of each choice that the guest has
        self._held: list[Sequence[inference.TokenLogprob]] = []  # as it has them
        self._computed = False

    def request(self, forward: control.Forward, deployment: str, context: int) -> Request:
        """The request that a guest forwards; its answer so far is as bounded as in `Sent.take`.

        Raises InvalidInput, and the error of a prompt that was `Refused`.
        """
        asked = forward.request
        self.asked = forward.ByteSize() + _REQUEST_BYTES
        validate_request(asked)
        self._refused.check(forward)
        request = Request.of(
            asked,
            f"{self._guest}:{self._number}",  # no client can choose one with a colon
            key=forward.key[:256],
            tenant=forward.tenant[:256],
            deployment=deployment,
        )
        progress, attempts = request.progress, min(asked.attempts, MAX_ATTEMPTS - 1)
        if forward.seen:
            progress.attempts = attempts
        else:  # or clients would take places in a queue that is full
            progress.claimed = attempts
        if asked.model != deployment or len(forward.progress) not in (0, request.choices):
            raise InvalidInput("a forwarded request is not for this ring", reason="BAD_MESSAGE")
        if forward.progress:
            progress.started, progress.due = True, -math.inf  # it has had its turn
            for choice, new in zip(progress.choices, forward.progress, strict=True):
                _extend(choice, new, min(request.max_tokens or context, context))
            progress.earlier_tokens = progress.new_tokens
        self._asked, self._request = forward, request
        self._counted = [len(choice.tokens) for choice in progress.choices]
        self._held = [choice.held for choice in progress.choices]
        return request

    def _say(self, **what: Any) -> None:
        """Sends a message; until it is on its way, its bytes count as unread."""
        message = control.Forwarded(guest=self._guest, number=self._number, **what)
        size = message.ByteSize() + EVENT_BYTES
        self.unread += size

        def written() -> None:
            self.unread -= size

        self._send(message, written)

    def opened(self) -> None:
        self._say()

    def waits(self) -> None:
        if not self._computed:  # other choices of the request may be computed already
            self._say(waits=True)

    def computed(self) -> None:
        self._computed = True
        self._say()

    def started(self, event: inference.Started) -> None:
        self._say(event=inference.GenerateResponse(started=event))

    def delta(
        self,
        text: str,
        sealed: bytes,
        tokens: int,
        logprobs: Sequence[inference.TokenLogprob] = (),
        choice: int = 0,
        parsed: inference.Parsed | None = None,
        held: Sequence[inference.TokenLogprob] = (),
    ) -> None:
        """The guest gets the tokens up to this delta and no others: all tokens of a step are known before its
        first delta, and this gateway may be gone before the next one."""
        if sealed:
            delta = inference.Delta(sealed=sealed, tokens=tokens)
        else:
            delta = inference.Delta(text=text, tokens=tokens, logprobs=logprobs, choice=choice, parsed=parsed)
        assert self._request is not None
        known, sent = self._request.progress.choices[choice], self._counted[choice]
        self._held[choice] = held
        self._counted[choice] = count = len(known.tokens) if sealed else tokens
        progress = [control.Progress(held=one) for one in self._held]
        progress[choice].tokens.extend(known.tokens[sent:count])
        if known.end is not None and count == len(known.tokens):
            progress[choice].end.CopyFrom(known.end)
        self._say(event=inference.GenerateResponse(delta=delta), progress=progress)

    def finished(self, event: inference.Finished) -> None:
        assert self._request is not None
        choices = self._request.progress.choices
        progress = [_progress(choice, sent) for choice, sent in zip(choices, self._counted, strict=True)]
        self._say(event=inference.GenerateResponse(finished=event), progress=progress)
        self._forget()

    def fail(self, error: SealringError) -> None:
        if self._asked is not None and error.reason == StageFailed.out_of_memory:
            self._refused.remember(self._asked, error)
        self._forget()
        forget_frames(error)
        self._say(problem=to_problem(error))

    def _forget(self) -> None:
        """Lets go of the prompt. An answer that the head does not read would keep it, up to 32 MiB."""
        self._asked = self._request = None

    def give_up(self, error: SealringError) -> None:
        self.fail(error)


def _progress(choice: ChoiceProgress, sent: int) -> control.Progress:
    """What a choice has beyond its first `sent` tokens."""
    return control.Progress(tokens=choice.tokens[sent:], held=choice.held, end=choice.end)


def _extend(choice: ChoiceProgress, new: control.Progress, most: int) -> None:
    length = len(choice.tokens) + len(new.tokens)
    if length > most or len(new.held) > length:
        raise InvalidInput("a forwarded answer is longer than it may be", reason="BAD_MESSAGE")
    choice.tokens.extend(array("I", new.tokens))
    choice.held = list(new.held)
    if new.HasField("end"):
        choice.end = new.end
