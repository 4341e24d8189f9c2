"""Any mangling of an honest reply: what is shown is a prefix of it, and whole only when it was whole."""

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.client.attempt import GATEWAY_SECONDS, MAX_ATTEMPTS, Attempt, Attempts
from sealring.client.choice import RingLoads
from sealring.client.question import Question, text_prompt
from sealring.client.types import Ring, Usage
from sealring.mesh.errors import (
    DeadlineExceeded,
    EnvelopeError,
    EpochEnded,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
)
from sealring.mesh.prompt.sealed import MAX_LIFETIME_SECONDS, ReplayGuard, RequestInfo
from sealring.mesh.trust.levels import TrustLevel
from sealring.testing import PaperCluster
from sealring.testing.gateway import PIECES, answer
from sealring.v1 import inference_pb2 as inference

CLUSTER = PaperCluster(clock=lambda: 1_800_000_000)
RING = Ring.from_roster(CLUSTER.roster.rings[0], CLUSTER.roster)


def question(**changes: Any) -> Question:
    request = inference.GenerateRequest(model="demo", max_tokens=50, choices=1)
    own: dict[str, Any] = {"prompt": text_prompt("hello"), "timeout": 60.0, "prefix_salt": b"salt"}
    for name, value in changes.items():
        if name in inference.GenerateRequest.DESCRIPTOR.fields_by_name:
            setattr(request, name, value)
        else:
            own[name] = value
    return Question(request=request, **own)


def attempt_and_answer(**changes: Any) -> tuple[Attempt, list[inference.GenerateResponse]]:
    attempt = Attempt(question(**changes), CLUSTER.roster, RING, 60.0)
    to = attempt.request.envelope.sealed_for
    info = RequestInfo("demo", to.request_id, to.expires, to.roster_hash)
    opened = CLUSTER.keys["demo-0"].open_request(attempt.request.envelope.sealed, info, ReplayGuard())
    return attempt, answer("demo-0", opened.reply)


edits = st.lists(
    st.one_of(
        st.tuples(st.just("drop"), st.integers(0, 7), st.just(0)),
        st.tuples(st.just("swap"), st.integers(0, 7), st.integers(0, 7)),
        st.tuples(st.just("copy"), st.integers(0, 7), st.integers(0, 7)),
        st.tuples(st.just("flip"), st.integers(0, 7), st.integers(0, 1000)),
        st.tuples(st.just("cut"), st.integers(0, 7), st.integers(0, 300)),
        st.tuples(st.just("clear"), st.integers(0, 7), st.just(0)),
    ),
    max_size=4,
)


def mangle(events: list[inference.GenerateResponse], edits: list[tuple[str, int, int]]) -> list[bytes]:
    for kind, first, second in edits:
        if not events:
            break
        first, other = first % len(events), second % len(events)
        if kind == "drop":
            events.pop(first)
        elif kind == "swap":
            events[first], events[other] = events[other], events[first]
        elif kind == "copy":
            copied = inference.GenerateResponse()
            copied.CopyFrom(events[first])
            events.insert(other, copied)
        elif events[first].delta.sealed:
            sealed = bytearray(events[first].delta.sealed)
            if kind == "flip":
                sealed[second % len(sealed)] ^= 1 << second % 8
                events[first].delta.sealed = bytes(sealed)
            elif kind == "cut":
                events[first].delta.sealed = bytes(sealed[:second])
            else:
                events[first].delta.text = "forged"
    return [event.SerializeToString() for event in events]


@settings(max_examples=300, deadline=None)
@given(edits, st.sampled_from([0, 50]))
def test_what_is_shown_is_a_prefix_and_the_end_is_the_heads(
    edits: list[tuple[str, int, int]], max_tokens: int
) -> None:
    attempt, events = attempt_and_answer(max_tokens=max_tokens)
    honest = [event.SerializeToString() for event in events]
    mangled = mangle(events, edits)
    text, whole = "", "".join(PIECES)
    try:
        for data in mangled:
            delta = attempt.take(inference.GenerateResponse.FromString(data))
            text += delta.text if delta is not None else ""
        done = attempt.completion()
    except EnvelopeError:
        assert mangled != honest
    else:
        assert done.text == text
        if done.finish_reason == "stop":
            assert (text, done.usage.prompt_tokens) == (whole, 7)
            assert mangled[:7] == honest[:7]
        else:
            assert max_tokens == 0
    assert whole.startswith(text)


def test_an_envelope_expires_with_the_question() -> None:
    before = int(time.time())
    attempt, _ = attempt_and_answer()
    assert attempt.request.attempts == 0
    assert before + 60 <= attempt.request.envelope.sealed_for.expires <= time.time() + 60


def test_a_head_that_contradicts_itself_is_not_believed() -> None:
    for fields in ({"tokens": 0, "text": "x"}, {"tokens": 9, "receipt": inference.HeadReceipt()}):
        attempt = Attempt(question(), CLUSTER.roster, RING, 60.0)
        to = attempt.request.envelope.sealed_for
        info = RequestInfo("demo", to.request_id, to.expires, to.roster_hash)
        sealer = (
            CLUSTER.keys["demo-0"].open_request(attempt.request.envelope.sealed, info, ReplayGuard()).reply
        )
        started = inference.GenerateResponse(started=inference.Started(ring="demo-0"))
        assert attempt.take(started) is None
        first = inference.SealedDelta(text="a", tokens=1).SerializeToString()
        second = inference.SealedDelta(**fields).SerializeToString()
        for body, believed in ((first, True), (second, False)):
            event = inference.GenerateResponse(delta=inference.Delta(sealed=sealer.seal(body)))
            if believed:
                assert attempt.take(event)
            else:
                with pytest.raises(EnvelopeError):
                    attempt.take(event)


def test_attempts_end_with_the_time_and_with_their_number() -> None:
    now = [0.0]
    attempts = Attempts(question(timeout=5.0), clock=lambda: now[0])
    attempt = attempts.next(CLUSTER.roster, RingLoads())
    assert attempts.pause_after(EpochEnded("gone"), attempt) == 0.2
    assert attempts.retrying
    assert attempts.pause_after(EpochEnded("gone"), attempt) == 0.4
    now[0] = 5.0
    with pytest.raises(DeadlineExceeded):
        attempts.pause_after(EpochEnded("gone"), attempt)
    with pytest.raises(Unavailable):
        attempts.pause_after(EpochEnded("gone"), attempt)


def test_log_probabilities_come_out_of_the_sealed_chunk_only() -> None:
    attempt = Attempt(question(), CLUSTER.roster, RING, 60.0)
    to = attempt.request.envelope.sealed_for
    info = RequestInfo("demo", to.request_id, to.expires, to.roster_hash)
    sealer = CLUSTER.keys["demo-0"].open_request(attempt.request.envelope.sealed, info, ReplayGuard()).reply
    attempt.take(inference.GenerateResponse(started=inference.Started(ring="demo-0")))
    inner = inference.TokenLogprob(
        id=3,
        spelling=b"\xe2",
        logprob=-0.5,
        top=[inference.TopLogprob(id=4, spelling=b"x", logprob=-1)],
    )
    forged = [inference.TokenLogprob(id=9, spelling=b"forged")]
    body = inference.SealedDelta(text="", tokens=1, logprobs=[inner]).SerializeToString()
    outer = inference.Delta(sealed=sealer.seal(body), logprobs=forged)
    delta = attempt.take(inference.GenerateResponse(delta=outer))
    assert delta is not None
    (one,) = delta.logprobs
    assert (delta.text, one.id, one.spelling, one.token, one.logprob) == ("", 3, b"\xe2", "\ufffd", -0.5)
    assert [(each.id, each.token, each.logprob) for each in one.top] == [(4, "x", -1.0)]
    last = inference.SealedDelta(tokens=1, finish=inference.FINISH_REASON_STOP, prompt_tokens=2)
    outer = inference.Delta(sealed=sealer.seal(last.SerializeToString(), last=True), logprobs=forged)
    assert attempt.take(inference.GenerateResponse(delta=outer)) is None
    assert attempt.completion().logprobs == delta.logprobs


@pytest.mark.parametrize(
    "parts",
    [
        {"text": "x"},
        {"logprobs": [inference.TokenLogprob(id=3)]},
        {"parsed": inference.Parsed(reasoning="hm")},
        {"parsed": inference.Parsed(tool_calls=[inference.ToolCall(name="look")])},
        {"parsed": inference.Parsed(stop="END")},
    ],
)
def test_a_chunk_that_says_anything_is_shown_and_one_that_only_counts_is_not(parts: dict[str, Any]) -> None:
    attempt, seal = sealed_attempt()
    assert attempt.take(seal({"tokens": 1}, last=False)) is None
    assert attempt.take(seal({"tokens": 2, **parts}, last=False)) is not None


STOP = inference.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("bodies", "last"),
    [
        ([{"choice": 2, "text": "x", "tokens": 1}], False),
        ([{"choice": 1, "finish": STOP}, {"choice": 1, "text": "x", "tokens": 1}], False),
        ([{"choice": 1, "finish": STOP}], True),
        ([{"choice": 1, "finish": STOP}, {"choice": 1, "receipt": {}}, {"choice": 1, "receipt": {}}], False),
        ([{"choice": 1, "finish": STOP}, {"choice": 1, "receipt": {}}], True),
        ([{"choice": 1, "receipt": {}}], False),
    ],
)
def test_choices_that_contradict_themselves_are_not_believed(
    bodies: list[dict[str, Any]], last: bool
) -> None:
    """Too many or too few, going on after their end, or with receipts that nobody waits for."""
    attempt, seal = sealed_attempt(choices=2)
    *before, worst = bodies
    for body in before:
        attempt.take(seal(body, last=False))
    with pytest.raises(EnvelopeError):
        attempt.take(seal(worst, last=last))


def test_an_answer_without_the_chunk_of_its_receipt_is_whole_and_not_signed() -> None:
    """A head that dies once it has ended its answer takes nothing away."""
    attempt, seal = sealed_attempt()
    attempt.take(seal({"text": "b", "tokens": 2, "finish": STOP}, last=False))
    attempt.take(inference.GenerateResponse(finished=inference.Finished(reason=STOP)))
    whole = attempt.completion()
    assert whole is not None
    assert (whole.text, [one.head.missing for one in whole.receipts]) == ("b", ["NOT_SIGNED"])


def test_an_answer_that_nobody_signed_says_so() -> None:
    attempt, seal = sealed_attempt()
    attempt.take(seal({"text": "b", "tokens": 2, "finish": STOP}, last=False))
    attempt.take(seal({"receipt": {"missing": "ENCLAVE_FAILED"}}, last=True))
    attempt.take(inference.GenerateResponse(finished=inference.Finished(reason=STOP)))
    whole = attempt.completion()
    assert whole is not None
    assert [one.head.missing for one in whole.receipts] == ["ENCLAVE_FAILED"]


def test_all_choices_must_have_ended() -> None:
    attempt, seal = sealed_attempt(choices=2)
    attempt.take(seal({"choice": 1, "text": "b", "tokens": 2, "finish": STOP}, last=False))
    with pytest.raises(EnvelopeError):
        attempt.take(inference.GenerateResponse(finished=inference.Finished(reason=STOP)))
    attempt, seal = sealed_attempt(choices=2)
    attempt.take(seal({"choice": 1, "text": "b", "tokens": 2, "finish": STOP}, last=False))
    attempt.take(seal({"text": "a", "tokens": 3, "finish": STOP, "prompt_tokens": 4}, last=True))
    said = inference.Finished(reason=STOP, cached_tokens=9, drafted_tokens=8, accepted_tokens=7)
    attempt.take(inference.GenerateResponse(finished=said))
    completion = attempt.completion()
    assert [(choice.text, choice.completion_tokens) for choice in completion.choices] == [("a", 3), ("b", 2)]
    assert completion.usage == Usage(4, 5, 4, drafted_tokens=8, accepted_tokens=5)  # no more than there are


def test_memory_ends_only_the_choices_that_have_not_ended_themselves() -> None:
    length = inference.FINISH_REASON_LENGTH

    def ended(first: int, second: int, **changes: Any) -> Attempt:
        attempt, seal = sealed_attempt(choices=2, **changes)
        attempt.take(seal({"choice": 1, "text": "b", "tokens": 2, "finish": STOP}, last=False))
        attempt.take(seal({"text": "a", "tokens": 3}, last=False))
        finished = inference.Finished(reason=length, prompt_tokens=4)
        finished.choices.add(reason=first, completion_tokens=3)
        finished.choices.add(reason=second, completion_tokens=9)
        attempt.take(inference.GenerateResponse(finished=finished))
        return attempt

    for reason in (STOP, length):
        completion = ended(length, reason, max_tokens=0).completion()
        assert [(each.finish_reason, each.completion_tokens) for each in completion.choices] == [
            ("length", 3),
            ("stop", 2),
        ]
        assert completion.usage == Usage(4, 5)
    with pytest.raises(EnvelopeError):
        ended(STOP, STOP, max_tokens=0)
    with pytest.raises(EnvelopeError):
        ended(length, STOP, max_tokens=50)


def test_the_end_of_one_answer_may_be_told_without_a_list_and_no_other_number_of_ends_is_believed() -> None:
    length = inference.FINISH_REASON_LENGTH
    end = inference.FinishedChoice(reason=length, completion_tokens=9)
    for choices, ends in ((1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 3)):
        attempt, seal = sealed_attempt(choices=choices, max_tokens=0)
        attempt.take(seal({"text": "a", "tokens": 3}, last=False))
        finished = inference.Finished(
            reason=length, completion_tokens=7, prompt_tokens=4, choices=[end] * ends
        )
        event = inference.GenerateResponse(finished=finished)
        if choices == 1 and ends < 2:
            attempt.take(event)
            assert attempt.completion().usage == Usage(4, 9 if ends else 7)
        else:
            with pytest.raises(EnvelopeError) as caught:
                attempt.take(event)
            assert caught.value.reason == "REPLY_CUT_OFF"


def test_nothing_comes_before_the_start_or_after_the_end() -> None:
    started = inference.GenerateResponse(started=inference.Started(ring="demo-0"))
    finished = inference.GenerateResponse(finished=inference.Finished(reason=STOP))
    body = {"text": "a", "tokens": 1, "finish": STOP, "prompt_tokens": 4}
    for first in (finished, inference.GenerateResponse()):
        with pytest.raises(EnvelopeError):
            Attempt(question(), CLUSTER.roster, RING, 60.0).take(first)
    other = inference.GenerateResponse(started=inference.Started(ring="demo-1"))
    with pytest.raises(EnvelopeError):
        Attempt(question(), CLUSTER.roster, RING, 60.0).take(other)
    for second in (started, inference.GenerateResponse()):
        attempt, _ = sealed_attempt()
        with pytest.raises(EnvelopeError):
            attempt.take(second)
    for after in (finished, started, inference.GenerateResponse()):
        attempt, seal = sealed_attempt()
        with pytest.raises(EnvelopeError):
            attempt.completion()
        assert not attempt.delivered
        attempt.take(seal(body, last=True))
        attempt.take(finished)
        assert attempt.delivered
        with pytest.raises(EnvelopeError):
            attempt.take(after)


def test_an_envelope_lives_for_minutes_and_a_question_goes_on_in_the_next_one() -> None:
    expired = EnvelopeError("too late", reason="ENVELOPE_EXPIRED")
    attempts = Attempts(question(timeout=3600.0), clock=lambda: 0.0)
    for _ in range(2 * MAX_ATTEMPTS):
        attempt = attempts.next(CLUSTER.roster, RingLoads())
        lived = attempt.request.envelope.sealed_for.expires - attempt.sealed_at
        assert lived <= MAX_LIFETIME_SECONDS
        attempt.sealed_at -= lived  # it waited that long
        assert attempts.pause_after(expired, attempt) <= 1.0
    with pytest.raises(EnvelopeError):
        attempts.pause_after(expired, attempts.next(CLUSTER.roster, RingLoads()))
    with pytest.raises(EnvelopeError):
        attempts.pause_after(expired)


def test_a_reply_in_clear_is_refused_and_one_that_holds_nothing_is_not_shown() -> None:
    attempt, seal = sealed_attempt()
    with pytest.raises(EnvelopeError) as caught:
        attempt.take(inference.GenerateResponse(delta=inference.Delta(text="x")))
    assert (caught.value.reason, attempt.delivered) == ("PLAINTEXT_REPLY", False)
    assert attempt.take(seal({"tokens": 1}, last=False)) is None
    assert attempt.delivered
    with pytest.raises(EnvelopeError):
        attempt.take(seal({"tokens": 0, "text": "x"}, last=False))


def test_what_is_sealed_and_no_delta_is_refused() -> None:
    attempt = Attempt(question(), CLUSTER.roster, RING, 60.0)
    to = attempt.request.envelope.sealed_for
    info = RequestInfo("demo", to.request_id, to.expires, to.roster_hash)
    reply = CLUSTER.keys["demo-0"].open_request(attempt.request.envelope.sealed, info, ReplayGuard()).reply
    attempt.take(inference.GenerateResponse(started=inference.Started(ring="demo-0")))
    with pytest.raises(EnvelopeError) as caught:
        attempt.take(inference.GenerateResponse(delta=inference.Delta(sealed=reply.seal(b"\xff"))))
    assert caught.value.reason == "REPLY_OUT_OF_ORDER"


def test_four_attempts_in_a_row_that_bring_nothing_and_no_more() -> None:
    attempts = Attempts(question(timeout=500.0), clock=lambda: 0.0)
    assert not attempts.retrying
    attempt = attempts.next(CLUSTER.roster, RingLoads())
    assert [attempts.pause_after(EpochEnded("gone"), attempt) for _ in range(3)] == [0.2, 0.4, 0.8]
    with pytest.raises(EpochEnded):
        attempts.pause_after(EpochEnded("gone"), attempt)
    attempts = Attempts(question(timeout=0.1), clock=lambda: 0.0)
    assert attempts.pause_after(EpochEnded("gone"), attempt) == pytest.approx(0.1)
    final = FailedPrecondition("x", reason="EPOCH_ENDED")  # it will not pass, whatever its reason
    for error in (Unavailable("x", reason="QUEUE"), DeadlineExceeded("x"), final):
        with pytest.raises(type(error)):
            Attempts(question(), clock=lambda: 0.0).pause_after(error, attempt)
    attempts = Attempts(question(timeout=500.0), clock=lambda: 0.0)
    pauses = []
    for attempt.delivered in (False, False, True, True, False, False):
        pauses.append(attempts.pause_after(EpochEnded("gone"), attempt))
    assert pauses == [0.2, 0.4, 0.2, 0.2, 0.4, 0.8]


def test_a_gateway_knows_what_was_asked_before() -> None:
    """It lets that wait, however long its queue is."""
    attempts = Attempts(question(), met=True, clock=lambda: 0.0)
    attempts.pause_after(Unavailable("nobody"))
    first = attempts.next(CLUSTER.roster, RingLoads())
    assert first.request.attempts == 0
    attempts.pause_after(EpochEnded("gone"), first)
    assert attempts.next(CLUSTER.roster, RingLoads()).request.attempts == 1


def test_an_attempt_is_counted_on_its_ring_until_it_ends() -> None:
    rings: list[Ring] = []
    loads = RingLoads()
    attempts = Attempts(question(), on_ring=rings.append)
    attempts.ended()
    assert attempts.next(CLUSTER.roster, loads).request.attempts == 0
    assert (rings, loads.of(RING.id)) == ([RING], (1, 1))
    for _ in range(2):
        attempts.ended()
        assert loads.of(RING.id) == (0, 1)


@pytest.mark.parametrize(
    ("reason", "met", "avoided"),
    [
        ("RING_GONE", True, True),
        ("RING_DOWN", True, True),
        ("EPOCH_ENDED", True, False),
        ("SEALED_BY_OTHER_ROSTER", True, False),
        ("RING_GONE", False, False),
    ],
)
def test_a_ring_that_is_not_there_is_avoided(reason: str, met: bool, avoided: bool) -> None:
    two = PaperCluster(
        {"demo-0": TrustLevel.SOFTWARE, "demo-1": TrustLevel.SOFTWARE}, clock=lambda: 1_800_000_000
    )
    attempts = Attempts(question(routing_key=bytes(8)))
    first = attempts.next(two.roster, RingLoads())
    attempts.pause_after(Unavailable("no", reason=reason), first if met else None)
    assert (attempts.next(two.roster, RingLoads()).ring != first.ring) is avoided


def test_gateways_go_on_counting_where_the_last_one_stopped() -> None:
    attempts = Attempts(question(timeout=500.0), clock=lambda: 0.0)
    asked = []
    for said, delivered in [
        ("2", False),
        ("", False),
        ("1000", False),
        ("9" * 9, False),
        ("-4", False),
        ("", True),
        ("3", True),
        ("999", False),
        ("0", False),
    ]:
        attempt = attempts.next(CLUSTER.roster, RingLoads())
        attempt.delivered = delivered
        stale = Unavailable("no", reason="SEALED_BY_OTHER_ROSTER", **({"attempts": said} if said else {}))
        attempts.pause_after(stale, attempt)
        asked.append(attempts.next(CLUSTER.roster, RingLoads()).request.attempts)
    assert asked == [2, 2, 2, 2, 2, 1, 3, 999, 1]
    with pytest.raises(FailedPrecondition):
        attempts.pause_after(FailedPrecondition("enough", reason="REQUEST_GIVEN_UP"), attempt)


def test_the_next_attempt_asks_for_what_is_missing_one_answer_after_the_other() -> None:
    attempts = Attempts(question(choices=3))
    held = inference.TokenLogprob(id=5, logprob=-1)

    def begun() -> tuple[Attempt, Any, inference.SealedPrompt]:
        attempt = attempts.next(CLUSTER.roster, RingLoads())
        seal, body = begin(attempt)
        return attempt, seal, body

    attempt, seal, body = begun()
    assert (body.choices, body.prompt.HasField("resume")) == (3, False)
    for delta, last in (
        ({"choice": 0, "text": "a", "tokens": 1, "token": 4}, False),
        ({"choice": 2, "text": "c", "tokens": 1, "token": 6, "finish": STOP}, False),
        ({"choice": 0, "tokens": 2, "token": 5, "held": [held]}, False),
    ):
        attempt.take(seal(delta, last=last))
    attempts.pause_after(EpochEnded("gone"), attempt)

    attempt, seal, body = begun()
    assert (body.choices, body.max_tokens, attempt.request.choices) == (1, 50, 1)
    assert body.prompt.text == "hello"
    assert body.prompt.resume == inference.Resume(
        tokens=[4, 5],
        held=[held],
        choice=0,
        earlier=[inference.EarlierEpoch(ring="demo-0", epoch=0, tokens=2)],
    )
    delta = attempt.take(seal({"text": "b", "tokens": 3, "finish": STOP, "prompt_tokens": 7}, last=True))
    assert delta is not None
    assert (delta.choice, delta.tokens) == (0, 3)
    attempt.take(inference.GenerateResponse(finished=inference.Finished(reason=STOP)))
    assert attempt.completion() is None

    attempt, seal, body = begun()
    assert body.prompt.resume == inference.Resume(choice=1)
    attempt.take(seal({"text": "d", "tokens": 1, "finish": STOP, "prompt_tokens": 7}, last=True))
    attempt.take(inference.GenerateResponse(finished=inference.Finished(reason=STOP)))
    whole = attempt.completion()
    assert whole is not None
    assert [choice.text for choice in whole.choices] == ["ab", "d", "c"]
    assert whole.usage == Usage(7, 5)


@pytest.mark.parametrize("reason", ["QUEUE_FULL", "RATE_LIMITED", "TOO_MANY_AT_ONCE", "TOO_MANY_BYTES"])
def test_an_answer_that_has_begun_waits_while_its_key_may_ask_for_nothing(reason: str) -> None:
    """A question that has not is refused at once."""
    full = ResourceExhausted("full", reason=reason, retry_after=1)
    for begun in (False, True):
        attempts = Attempts(question(timeout=500.0), clock=lambda: 0.0)
        attempt = attempts.next(CLUSTER.roster, RingLoads())
        seal, _ = begin(attempt)
        if begun:
            attempt.take(seal({"text": "a", "tokens": 1, "token": 4}, last=False))
        attempts.pause_after(EpochEnded("gone"), attempt)
        attempt = attempts.next(CLUSTER.roster, RingLoads())
        for _ in range(50 * begun):
            assert attempts.pause_after(full, attempt) <= 1.0
        with pytest.raises(ResourceExhausted):
            attempts.pause_after(
                ResourceExhausted("x", reason="DAILY_TOKENS_USED") if begun else full, attempt
            )


def sealed_attempt(**changes: Any) -> tuple[Attempt, Any]:
    """An attempt that has begun, and what seals its events."""
    attempt = Attempt(question(**changes), CLUSTER.roster, RING, 60.0)
    return attempt, begin(attempt)[0]


def begin(attempt: Attempt) -> tuple[Any, inference.SealedPrompt]:
    """Begins the stream that answers it: what seals its events, and what was asked."""
    to = attempt.request.envelope.sealed_for
    info = RequestInfo("demo", to.request_id, to.expires, to.roster_hash)
    opened = CLUSTER.keys[attempt.ring.id].open_request(attempt.request.envelope.sealed, info, ReplayGuard())
    attempt.take(inference.GenerateResponse(started=inference.Started(ring=attempt.ring.id)))

    def seal(body: dict[str, Any], *, last: bool) -> inference.GenerateResponse:
        sealed = opened.reply.seal(inference.SealedDelta(**body).SerializeToString(), last=last)
        return inference.GenerateResponse(delta=inference.Delta(sealed=sealed))

    return seal, inference.SealedPrompt.FromString(opened.body)


def test_a_question_that_no_gateway_has_taken_waits_for_one_and_not_for_ever() -> None:
    now = 0.0
    gone = Unavailable("no")
    with pytest.raises(Unavailable):
        Attempts(question(), clock=lambda: now).pause_after(gone)  # nobody was ever there
    attempts = Attempts(question(), met=True, clock=lambda: now)
    waited = 0
    while now < GATEWAY_SECONDS:
        now += attempts.pause_after(gone)
        waited += 1
    assert 30 < waited < 40
    with pytest.raises(Unavailable):
        attempts.pause_after(gone)


@pytest.mark.parametrize("reason", ["UNAVAILABLE", "RING_DOWN", "RING_GONE", "NO_ROSTER"])
def test_a_question_that_was_taken_waits_as_long_as_its_user_for_gateway_and_ring(reason: str) -> None:
    """Machines sleep for as long as their lids are closed."""
    now, seconds = 0.0, 3000.0
    attempts = Attempts(question(timeout=seconds), clock=lambda: now)
    attempt = attempts.next(CLUSTER.roster, RingLoads())
    attempts.pause_after(Unavailable("asleep"), attempt)
    away = Unavailable("no", reason=reason, retry_after=5)
    for later in range(int(seconds) - 1):
        now = float(later)
        assert attempts.pause_after(away, attempt if reason in ("RING_DOWN", "RING_GONE") else None) <= 1.0
    assert attempts.next(CLUSTER.roster, RingLoads()).request.attempts == 1
    now = seconds
    with pytest.raises(DeadlineExceeded, match=f"longer than 3000 s; before that: no .{reason}."):
        attempts.next(CLUSTER.roster, RingLoads())


def test_a_question_that_waits_for_its_model_was_taken() -> None:
    """All machines may sleep while it is loaded, for longer than a gateway takes to start."""
    now = 0.0
    attempts = Attempts(question(timeout=3000.0), met=True, clock=lambda: now)
    attempts.loading()
    while now < 10 * GATEWAY_SECONDS:
        now += attempts.pause_after(Unavailable("asleep"))
    with pytest.raises(Unavailable):
        attempts.pause_after(Unavailable("too large", reason="MODEL_NOT_LOADED"))


def test_a_new_question_that_is_refused_claims_no_place() -> None:
    """Else a ring that is down for long would keep it, as it keeps what it had accepted."""
    attempts = Attempts(question(), clock=lambda: 0.0)
    down = Unavailable("down", reason="RING_DOWN", retry_after=5)
    for _ in range(3):
        attempt = attempts.next(CLUSTER.roster, RingLoads())
        assert attempt.request.attempts == 0
        attempts.pause_after(down, attempt)
    with pytest.raises(Unavailable):
        attempts.pause_after(down, attempt)


def test_a_sealed_request_outlives_any_number_of_heads_that_it_waits_for() -> None:
    """As one in clear does in its gateway's queue; what ends rings itself is given up as ever."""
    attempts = Attempts(question(timeout=3000.0), clock=lambda: 0.0)
    attempt, _ = attempt_and_answer()
    for _ in range(2000):
        assert attempts.pause_after(Unavailable("no", reason="SEALED_BY_OTHER_ROSTER"), attempt) <= 1.0
    assert attempts.retrying
    for _ in range(3):
        attempts.pause_after(EpochEnded("gone"), attempt)
    with pytest.raises(EpochEnded):
        attempts.pause_after(EpochEnded("gone"), attempt)


def test_what_is_said_of_a_prompt_is_no_part_of_the_answer() -> None:
    attempt = Attempt(question(), CLUSTER.roster, RING, 60.0)
    assert attempt.request.tell_prefill
    told = inference.GenerateResponse(prefilling=inference.Prefilling(done=1, prompt_tokens=2))
    assert attempt.take(told) is None
    attempt.take(inference.GenerateResponse(started=inference.Started(ring="demo-0")))
    assert attempt.take(told) is None
