"""One sealed request and its reply, without I/O.

Text, token counts, finish reason and usage are read from sealed chunks, because the gateway can forge
everything else. A gateway can cut a reply off; that is an error, and never taken for the reply's end.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from math import ceil

from google.protobuf.message import DecodeError

from sealring.client.choice import RingLoads, choose_ring
from sealring.client.question import Question
from sealring.client.receipts import SealedReceipts, unsigned
from sealring.client.types import (
    Choice,
    Completion,
    Delta,
    FinishReason,
    Ring,
    TokenLogprob,
    ToolCall,
    Usage,
)
from sealring.mesh.clock import SKEW_SECONDS, Clock, monotonic_clock, wall_clock
from sealring.mesh.errors import DeadlineExceeded, EnvelopeError, PermissionDenied, SealringError, Unavailable
from sealring.mesh.names import split_pin
from sealring.mesh.prompt.images import has_images, without_images
from sealring.mesh.prompt.sealed import (
    MAX_LIFETIME_SECONDS,
    REQUEST_ID_BYTES,
    ReplyOpener,
    RequestInfo,
    seal_request,
)
from sealring.mesh.receipt.statement import MAX_EARLIER
from sealring.mesh.roster.model import Roster
from sealring.v1 import inference_pb2 as inference

MAX_ATTEMPTS = 4
GATEWAY_SECONDS = 30.0
"""How long a question that no gateway has taken waits for any: longer than one takes to start again."""

_FIRST_BACKOFF, _LAST_BACKOFF = 0.2, 1.0
GONE = frozenset({"UNAVAILABLE", "STOPPING", "NO_ROSTER", "ROSTER_EXPIRED", "ROSTER_ROLLBACK"})
"""Reasons why a gateway is of no use just now; another one may be."""

_FULL = frozenset({"QUEUE_FULL", "RATE_LIMITED", "TOO_MANY_AT_ONCE", "TOO_MANY_BYTES"})
"""Reasons why a gateway takes no request of a key just now. An answer that has begun waits."""

_DIGITS = 4
"""The most digits of a number that a gateway counts."""

_NO_RING = frozenset({"RING_GONE", "RING_DOWN"})
_RETRIED: dict[str, type[SealringError]] = {
    **dict.fromkeys((*_NO_RING, "EPOCH_ENDED"), Unavailable),
    "ENVELOPE_REPLAYED": PermissionDenied,  # a gateway lost its way to the head, and brought it once more
}

_STALE = "SEALED_BY_OTHER_ROSTER"
"""The head is another one than when it was sealed, maybe long ago: a request in a queue has ended no ring."""

_REASONS: dict[int, FinishReason] = {
    inference.FINISH_REASON_STOP: "stop",
    inference.FINISH_REASON_LENGTH: "length",
}


@dataclasses.dataclass(slots=True, repr=False)
class Answered:
    """One of the answers to a question as far as it has come, over all attempts."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    held: list[inference.TokenLogprob] = dataclasses.field(default_factory=list)
    tokens: int = 0
    pieces: list[Delta] = dataclasses.field(default_factory=list)
    reason: FinishReason | None = None
    receipt: inference.Receipt | None = None
    earlier: list[inference.EarlierEpoch] = dataclasses.field(default_factory=list)
    """Epochs of earlier attempts that brought some of the tokens."""

    @property
    def given(self) -> int:
        """How many of the tokens earlier attempts brought."""
        return self.earlier[-1].tokens if self.earlier else 0

    def told(self) -> Choice:
        assert self.reason is not None  # it is set before `completion` is asked for
        return Choice(
            "".join(piece.text for piece in self.pieces),
            self.reason,
            self.tokens,
            tuple(one for piece in self.pieces for one in piece.logprobs),
            "".join(piece.reasoning for piece in self.pieces),
            tuple(call for piece in self.pieces for call in piece.tool_calls),
        )


class Attempt:
    """One envelope, sealed for the head of one ring, and the stream that answers it.

    The first one asks for all answers. One that goes on after a fault asks for the rest of one answer.
    """

    def __init__(
        self,
        question: Question,
        roster: Roster,
        ring: Ring,
        lifetime: float,
        answers: Sequence[Answered] | None = None,
        attempts: int = 0,
        signed: inference.GetRosterResponse | None = None,
    ) -> None:
        """`answers` are all of the question as far as they have come, `attempts` GenerateRequest's. `signed`
        is the roster as the gateway gave it.

        Raises InvalidInput (BAD_SEALING_KEY, REQUEST_TOO_LARGE).
        """
        self.ring = ring
        self.delivered = False
        self.prompt_tokens = 0
        """The number that the head reports; 0 before its first piece."""

        self._question = question
        self._started = self._finished = False
        self._answers = answers or [Answered() for _ in range(question.request.choices)]
        self._usage: Usage | None = None
        self._epoch = 0
        signed = signed or inference.GetRosterResponse()
        self._receipts = SealedReceipts(question, roster, signed, ring.id)
        prompt, self._asked = self._asked_for()
        self.lifetime = min(ceil(lifetime), MAX_LIFETIME_SECONDS)
        self.sealed_at = wall_clock()
        self.request, self._opener = self._sealed(prompt, roster, attempts)

    def _asked_for(self) -> tuple[inference.Prompt, range]:
        """The prompt to seal, and the numbers of the answers that it asks for: all, or the rest of the first
        that has not ended, once tokens of any have come."""
        if not any(answer.token_ids for answer in self._answers):
            return self._question.prompt, range(len(self._answers))
        choice, one = next(
            (number, answer) for number, answer in enumerate(self._answers) if answer.reason is None
        )
        prompt = inference.Prompt()
        prompt.CopyFrom(self._question.prompt)
        prompt.resume.CopyFrom(
            inference.Resume(
                tokens=one.token_ids, held=one.held, choice=choice, earlier=one.earlier[-MAX_EARLIER:]
            )
        )
        return prompt, range(choice, choice + 1)

    def _sealed(
        self, prompt: inference.Prompt, roster: Roster, attempts: int
    ) -> tuple[inference.GenerateRequest, ReplyOpener]:
        """The request, with the prompt sealed for the ring's head, and what opens the reply to it."""
        question, ring = self._question, self.ring
        expires = int(self.sealed_at + self.lifetime)
        info = RequestInfo(ring.deployment, secrets.token_bytes(REQUEST_ID_BYTES), expires, roster.hash)
        body = inference.SealedPrompt(
            prompt=prompt,
            max_tokens=question.request.max_tokens,
            min_trust=question.request.min_trust,
            prefix_salt=question.prefix_salt,
            choices=len(self._asked),
            receipt_nonce=question.receipt_nonce,
        )
        head = roster.member(ring.members[0].id)
        sealed, opener = seal_request(head.sealing_key, info, body.SerializeToString())
        sealed_for = inference.SealedFor(
            ring=ring.id, request_id=info.request_id, expires=expires, roster_hash=roster.hash
        )
        request = inference.GenerateRequest()
        request.CopyFrom(question.request)
        request.MergeFrom(
            inference.GenerateRequest(
                model=ring.deployment,
                request_id=info.request_id.hex(),
                envelope=inference.Envelope(sealed=sealed, sealed_for=sealed_for),
                choices=len(self._asked),
                attempts=attempts,
                receipt=inference.ReceiptRequest(),
                tell_prefill=True,
            )
        )
        return request, opener

    def take(self, response: inference.GenerateResponse) -> Delta | None:
        """The next event of the stream; what it brought to show, if anything.

        Raises EnvelopeError (PLAINTEXT_REPLY, REPLY_OUT_OF_ORDER, REPLY_CUT_OFF, ENVELOPE_REFUSED,
        REPLY_ENDED, CHUNK_TOO_LARGE): the stream must be given up then.
        """
        kind = response.WhichOneof("event")
        if kind == "prefilling" and not self.delivered:
            return None
        if self._finished or (kind == "started") is self._started:
            raise _out_of_order()
        if kind == "started":
            self._take_start(response.started)
        elif kind == "delta":
            return self._take_delta(response.delta)
        elif kind == "finished":
            self._take_end(response.finished)
        else:
            raise _out_of_order()
        return None

    @property
    def complete(self) -> bool:
        """Whether all answers have ended. Their receipts may be missing."""
        return all(answer.reason is not None for answer in self._answers)

    def completion(self) -> Completion | None:
        """The whole answer, once the stream is over; None where there are others to go on with.

        Raises EnvelopeError (REPLY_CUT_OFF).
        """
        if self._usage is None:
            raise _cut_off()
        if not self.complete:
            return None
        choices = tuple(answer.told() for answer in self._answers)
        return Completion(
            text=choices[0].text,
            finish_reason=choices[0].finish_reason,
            usage=self._usage,
            model=self.ring.deployment,
            request_id=self.request.request_id,
            ring=self.ring,
            logprobs=choices[0].logprobs,
            choices=choices,
            reasoning=choices[0].reasoning,
            tool_calls=choices[0].tool_calls,
            receipts=tuple(answer.receipt or unsigned(one) for one, answer in enumerate(self._answers)),
        )

    def gave_up(self) -> None:
        """The attempt has failed: another one names the epoch that brought what has come."""
        for answer in self._answers:
            if len(answer.token_ids) > answer.given:
                answer.earlier.append(
                    inference.EarlierEpoch(ring=self.ring.id, epoch=self._epoch, tokens=len(answer.token_ids))
                )

    def _take_start(self, started: inference.Started) -> None:
        if started.ring != self.ring.id:
            raise _out_of_order()
        self._started, self._epoch = True, started.epoch

    def _take_delta(self, outer: inference.Delta) -> Delta | None:
        if outer.WhichOneof("content") != "sealed":
            raise EnvelopeError(
                "a sealed request was answered in clear",
                hint="the gateway does not keep to the protocol: do not use it",
                reason="PLAINTEXT_REPLY",
            )
        chunk, last = self._opener.open(outer.sealed)
        self.delivered = True
        try:
            delta = inference.SealedDelta.FromString(chunk)
        except DecodeError:
            raise _out_of_order() from None
        if delta.choice >= len(self._asked):
            raise _out_of_order()
        number = self._asked[delta.choice]
        choice = self._answers[number]
        if delta.HasField("receipt"):
            if choice.reason is None or number in self._receipts:
                raise _out_of_order()
            self._receipts.take(number, delta.receipt)
            if last != all(each in self._receipts for each in self._asked):
                raise _out_of_order()
            return None
        if choice.reason is not None or delta.tokens < choice.tokens:
            raise _out_of_order()
        self.prompt_tokens = self.prompt_tokens or delta.prompt_tokens
        before = choice.tokens
        choice.tokens, choice.reason = delta.tokens, _REASONS.get(delta.finish)
        if delta.tokens > before:
            choice.token_ids.append(delta.token)
        choice.held = list(delta.held)
        complete = all(self._answers[each].reason is not None for each in self._asked)
        if last and not complete:
            raise _out_of_order()
        if complete:  # receipts may follow, of a head that signs them
            self._usage = self._used(delta.prompt_tokens)
        told = Delta(
            delta.text,
            delta.tokens,
            tuple(map(TokenLogprob.from_message, delta.logprobs)),
            number,
            delta.parsed.reasoning,
            tuple(ToolCall(call.name, call.arguments, call.id) for call in delta.parsed.tool_calls),
            delta.parsed.stop,
            tuple(delta.parsed.vector),
        )
        said = told.text or told.reasoning or told.tool_calls or told.vector
        if not (said or told.logprobs or told.stop):
            return None
        choice.pieces.append(told)
        return told

    def _take_end(self, finished: inference.Finished) -> None:
        self._finished = True
        usage = self._usage or self._ended_by_gateway(finished)
        cached = min(finished.cached_tokens, usage.prompt_tokens)
        accepted = min(finished.accepted_tokens, usage.completion_tokens)
        drafted = max(finished.drafted_tokens, accepted)
        self._usage = dataclasses.replace(
            usage, cached_tokens=cached, drafted_tokens=drafted, accepted_tokens=accepted
        )
        tails = {each.choice: each.tail for each in finished.receipts if each.HasField("tail")}
        for place, number in enumerate(self._asked):
            answer = self._answers[number]
            if answer.reason is not None:
                answer.receipt = self._receipts.checked(
                    number,
                    tails.get(place),
                    answer.pieces,
                    answer.given,
                    answer.token_ids[answer.given :],
                    answer.reason,
                    answer.tokens,
                )

    def _ended_by_gateway(self, finished: inference.Finished) -> Usage:
        """The gateway may end a reply itself only where memory sets the limit: with max_tokens 0."""
        one = inference.FinishedChoice(reason=finished.reason, completion_tokens=finished.completion_tokens)
        ends = list(finished.choices) or [one]
        if self._question.request.max_tokens or len(ends) != len(self._asked):
            raise _cut_off()
        for choice, end in zip((self._answers[number] for number in self._asked), ends, strict=True):
            if choice.reason is not None:
                continue
            if end.reason != inference.FINISH_REASON_LENGTH:
                raise _cut_off()
            choice.reason, choice.tokens = "length", max(choice.tokens, end.completion_tokens)
        return self._used(finished.prompt_tokens)

    def _used(self, prompt_tokens: int) -> Usage:
        return Usage(prompt_tokens, sum(answer.tokens for answer in self._answers))


class Attempts:
    """All attempts at one question: each is a fresh envelope by a freshly verified roster, which asks for
    what is missing (docs/decisions/0019-answers-go-on.md)."""

    def __init__(
        self,
        question: Question,
        *,
        met: bool = False,
        on_ring: Callable[[Ring], None] = lambda ring: None,
        clock: Clock = monotonic_clock,
    ) -> None:
        """`met`: a gateway has answered this client before, so that one is waited for from the start. Whoever
        has only an address learns at once that nobody is there."""
        self._question = question
        self._on_ring = on_ring
        self._clock = clock
        self._deadline = clock() + question.timeout
        self._avoid: set[str] = set()
        self._answers = [Answered() for _ in range(question.request.choices)]
        self._count = 0  # attempts in a row that brought nothing
        self._failed = 0  # of these, and of those that did not get as far as a ring
        self._told = 0  # of these, as the gateways count them
        self._met = met
        self._taken = False
        self._gone_since: float | None = None
        self._last: SealringError | None = None
        self._counted: tuple[RingLoads, str] | None = None

    @property
    def seconds_left(self) -> float:
        """Raises DeadlineExceeded when the time that the user gave is over."""
        left = self._deadline - self._clock()
        if left <= 0:
            last = f"; before that: {self._last.message} ({self._last.reason})" if self._last else ""
            raise DeadlineExceeded(
                f"the answer took longer than {self._question.timeout:g} s{last}", hint="allow more time"
            )
        return left

    @property
    def retrying(self) -> bool:
        """Whether an attempt has failed, so that the roster has to be fetched anew."""
        return self._failed > 0

    def next(
        self,
        roster: Roster,
        loads: RingLoads,
        model: str = "",
        signed: inference.GetRosterResponse | None = None,
    ) -> Attempt:
        """The next envelope, for a ring of the question's model, whose name in the roster is `model` if the
        question has another one; `ended` must follow. `signed` is the roster as the gateway gave it.

        A model that cannot see, by the word of the gateway, gets no image. Raises NotFound,
        FailedPrecondition (TRUST_BELOW_FLOOR, MODEL_DIFFERS, VISION_NOT_INSTALLED), InvalidInput
        (MODEL_CANNOT_SEE, and others).
        """
        question, shows = self._question, has_images(self._question.prompt)
        name, digest = split_pin(question.request.model)
        model = model or name
        chosen = choose_ring(
            roster,
            model,
            question.request.min_trust,
            loads,
            question.routing_key,
            self._avoid,
            digest,
            shows=shows,
        )
        if shows and loads.sees(chosen.id) is False:
            lacks = loads.lacks_vision(chosen.id)
            told = without_images(question.prompt, chosen.deployment, not_installed=lacks)
            question = dataclasses.replace(question, prompt=told)
        ring = Ring.from_roster(chosen, roster)
        self._on_ring(ring)
        attempt = Attempt(question, roster, ring, self.seconds_left, self._answers, self._told, signed)
        loads.sent(ring.id)
        self._met = True
        self._counted = loads, ring.id
        return attempt

    def ended(self) -> None:
        """The attempt is over, however it ended."""
        if self._counted is not None:
            loads, ring = self._counted
            loads.ended(ring)
            self._counted = None

    def loading(self) -> None:
        """A gateway is asked to load the model: it counts as having taken the question, which waits there as
        it would in a queue."""
        self._taken = True

    def pause_after(self, error: SealringError, attempt: Attempt | None = None) -> float:
        """Seconds to wait before the next attempt. Raises `error` where there must not be another one.

        Without an `attempt` there was no gateway to make one with. A question that a gateway has taken waits
        for as long as its user does: gateways and rings come back, and the answer goes on.
        """
        if attempt is not None:
            attempt.gave_up()
            self._gone_since = None
            if attempt.delivered:
                self._count, self._failed = 0, 0
        self._failed += 1
        self._last = error
        self._taken |= attempt is not None and error.reason not in _NO_RING
        stale = error.reason == _STALE or _outlived(error, attempt)
        begun = any(answer.tokens for answer in self._answers)
        waits = (
            stale or (self._taken and error.reason in GONE | _NO_RING) or (begun and error.reason in _FULL)
        )
        self._count += not waits
        if attempt is not None:
            self._tell(error, attempt)
        if waits:
            again = True
        elif self._met and error.reason in GONE:
            now = self._clock()
            self._gone_since = now if self._gone_since is None else self._gone_since
            again = now - self._gone_since < GATEWAY_SECONDS
        else:
            passes = isinstance(error, _RETRIED.get(error.reason, ()))
            again = passes and self._count < MAX_ATTEMPTS
        if not again:
            raise error
        if attempt is not None and error.reason in _NO_RING:
            self._avoid.add(attempt.ring.id)
        return float(min(_FIRST_BACKOFF * 2 ** min(self._failed - 1, 9), _LAST_BACKOFF, self.seconds_left))

    def _tell(self, error: SealringError, attempt: Attempt) -> None:
        """What the next envelope says of the attempts before it; nothing of one that was refused as new."""
        told = error.metadata.get("attempts", "")
        if told.isdecimal() and len(told) < _DIGITS:
            self._told = int(told)
        elif attempt.delivered:
            self._told = 1
        if self._taken or "retry_after" not in error.metadata:
            self._told = max(1, self._told)


def _outlived(error: SealringError, attempt: Attempt | None) -> bool:
    """Whether a request waited for as long as its envelope lived. Where it did not, a clock is wrong."""
    if attempt is None or error.reason != "ENVELOPE_EXPIRED":
        return False
    return wall_clock() - attempt.sealed_at >= max(attempt.lifetime - SKEW_SECONDS, attempt.lifetime / 2)


def _out_of_order() -> EnvelopeError:
    return EnvelopeError("the sealed reply holds an unexpected message", reason="REPLY_OUT_OF_ORDER")


def _cut_off() -> EnvelopeError:
    return EnvelopeError(
        "the sealed reply was cut off before its end", hint="ask again", reason="REPLY_CUT_OFF"
    )
