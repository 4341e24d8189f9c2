"""Requests of guests: of gateways that do not schedule the ring. Its head passes them on.

The answers go back over the head. The guest keeps its request and has it scheduled again after the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from sealring.edge.inference.answer import EVENT_BYTES
from sealring.edge.inference.timings import Timings
from sealring.gateway.rings import requests
from sealring.gateway.rings.epoch import Epoch
from sealring.gateway.rings.forwarded import extend, progress_from
from sealring.gateway.rings.own import OwnRequests
from sealring.gateway.rings.requests import Answers
from sealring.gateway.scheduler.request import Request
from sealring.gateway.scheduler.scheduler import MAX_ATTEMPTS
from sealring.mesh.errors import InvalidInput, ResourceExhausted, SealringError, StageFailed, forget_frames
from sealring.mesh.prompt.validate import MAX_ENVELOPE_BYTES, validate_request
from sealring.mesh.rpc.problem import to_problem
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

MOST_ASKED, ALL_ASKED = 2048, MAX_ENVELOPE_BYTES
"""Guests' requests that one ring holds, and their bytes; one alone may have more. A head may have made them
up, and each costs a few times its bytes while it is given to the head."""

_REQUEST_BYTES = 4 << 10
"""Memory of a request beside its content, about."""

_Send = Callable[[control.Forwarded, Callable[[], None]], None]


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

    def __init__(self, send: _Send, guest: int, number: int, refused: Refused) -> None:
        """`send` calls its second argument once the message is on its way."""
        self.timings = Timings()
        self.unread = 0
        self.asked = 0
        """Bytes of the request."""

        self._send, self._refused = send, refused
        self.guest, self.number = guest, number
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
            f"{self.guest}:{self.number}",  # no client can choose one with a colon
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
                extend(choice, new, min(request.max_tokens or context, context))
            progress.earlier_tokens = progress.new_tokens
        self._asked, self._request = forward, request
        self._counted = [len(choice.tokens) for choice in progress.choices]
        self._held = [choice.held for choice in progress.choices]
        return request

    def _say(self, **what: Any) -> None:
        """Sends a message; until it is on its way, its bytes count as unread."""
        message = control.Forwarded(guest=self.guest, number=self.number, **what)
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

    def paused(self) -> None:
        self._computed = False
        self.waits()

    def prefilled(self, done: int, prompt_tokens: int) -> None:
        told = inference.Prefilling(done=done, prompt_tokens=prompt_tokens)
        self._say(event=inference.GenerateResponse(prefilling=told))

    def started(self, event: inference.Started) -> None:
        self._say(event=inference.GenerateResponse(started=event))

    def delta(self, delta: inference.Delta, held: Sequence[inference.TokenLogprob] = ()) -> None:
        """The guest gets the tokens up to this delta and no others: all tokens of a step are known before its
        first delta, and this gateway may be gone before the next one."""
        assert self._request is not None
        choice = delta.choice
        known, sent = self._request.progress.choices[choice], self._counted[choice]
        self._held[choice] = held
        self._counted[choice] = count = len(known.tokens) if delta.sealed else delta.tokens
        progress = [control.Progress(held=one) for one in self._held]
        progress[choice].tokens.extend(known.tokens[sent:count])
        if known.end is not None and count == len(known.tokens):
            progress[choice].end.CopyFrom(known.end)
        self._say(event=inference.GenerateResponse(delta=delta), progress=progress)

    def finished(self, event: inference.Finished) -> None:
        assert self._request is not None
        choices = self._request.progress.choices
        progress = [progress_from(choice, sent) for choice, sent in zip(choices, self._counted, strict=True)]
        self._say(event=inference.GenerateResponse(finished=event), progress=progress, ring_ms=self._ring_ms)
        self._forget()

    def fail(self, error: SealringError) -> None:
        if self._asked is not None and error.reason == StageFailed.out_of_memory:
            self._refused.remember(self._asked, error)
        self._forget()
        forget_frames(error)
        self._say(problem=to_problem(error), ring_ms=self._ring_ms)

    @property
    def _ring_ms(self) -> int:
        return round(self.timings.ring * 1000)

    def _forget(self) -> None:
        """Lets go of the prompt. An answer that the head does not read would keep it, up to 32 MiB."""
        self._asked = self._request = None

    give_up = fail


class ServedRequests:
    """`Requests` of guests, which `own` schedules among those of this gateway's clients."""

    def __init__(self, own: OwnRequests, answers: Answers, deployment: str, refused: Refused) -> None:
        self._own = own
        self._answers = answers
        self._deployment = deployment
        self._refused = refused
        self._unsent = 0  # bytes for guests that are not on their way

    def __contains__(self, request_id: str) -> bool:
        return isinstance(self._answers.get(request_id), GuestAnswer)

    def begin(self, epoch: Epoch) -> None:
        self._unsent = 0

    def hear(self, response: control.ScheduleResponse) -> None:
        """Takes a request of a guest, or cancels one, or all of it. Raises InvalidInput (HEAD_BEHIND) if the
        head does not read the answers."""
        rows, forward = self._own.rows, response.forward
        if rows is None:
            return
        if self._unsent > requests.ALL_UNREAD:
            raise InvalidInput("the head does not read the answers to its guests", reason="HEAD_BEHIND")
        if forward.cancel:
            for request_id, each in self._theirs():
                if each.guest == forward.guest and forward.number in (0, each.number):
                    self.cancel(request_id)
            return
        answer = GuestAnswer(self._send, forward.guest, forward.number, self._refused)
        try:
            request = answer.request(forward, self._deployment, rows.epoch.serving.context)
        except SealringError as error:
            answer.fail(error)
            return
        if request.id in self._answers:
            return
        held = [each.asked for _, each in self._theirs()]
        if held and (len(held) >= MOST_ASKED or sum(held) + answer.asked > ALL_ASKED):
            answer.fail(ResourceExhausted("guests have too much waiting", reason="QUEUE_FULL"))
        else:
            self._own.submit(request, answer)

    def cancel(self, request_id: str) -> None:
        self._own.cancel(request_id)

    def end(self, reason: str) -> None:
        """The guests bring their requests again. The suspect stays until it is `settled`."""
        for request_id, _ in self._theirs():
            if request_id != self._own.scheduler.suspect:
                self.cancel(request_id)

    def _theirs(self) -> list[tuple[str, GuestAnswer]]:
        return [(name, each) for name, each in self._answers.items() if isinstance(each, GuestAnswer)]

    def _send(self, forwarded: control.Forwarded, written: Callable[[], None]) -> None:
        rows = self._own.rows
        if rows is None:  # the epoch is over
            return
        size = forwarded.ByteSize() + EVENT_BYTES
        self._unsent += size

        def on_its_way() -> None:
            written()
            if self._own.rows is rows:
                self._unsent -= size

        message = control.ScheduleRequest(forwarded=forwarded).SerializeToString()
        rows.epoch.streams.send_head(message, on_its_way)
