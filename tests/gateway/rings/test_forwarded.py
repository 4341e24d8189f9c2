"""Messages between two gateways of one ring: a request and its answer are the same on both sides."""

import math
import sys
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from requestkit import with_progress

from sealring.edge.inference.timings import Timings
from sealring.gateway.rings.forwarded import ForwardedRequests, Sent
from sealring.gateway.rings.requests import Answers
from sealring.gateway.rings.served import GuestAnswer, Refused
from sealring.gateway.scheduler import MAX_ATTEMPTS, TOKEN_BYTES, ChoiceProgress, Fail, Request, Scheduler
from sealring.mesh.errors import InvalidInput, ResourceExhausted, StageFailed
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

CONTEXT = 100
PROMPT = inference.Envelope(clear=inference.Prompt(text="hello"))


class Told(list[control.Forwarded]):
    """Messages to the guest, and the callbacks for when each is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Callable[[], None]] = []

    def __call__(self, told: control.Forwarded, written: Callable[[], None]) -> None:
        self.append(told)
        self.written.append(written)


def ask(choices: int = 1, min_trust: int = 0, max_tokens: int = 50, **fields: object) -> Request:
    name, key = str(fields.pop("name", "req-1")), str(fields.pop("key", "who"))
    waits = {"priority": 2, "patience": 7.5}
    asked = Request(name, key, max_tokens, PROMPT, "demo", "tenant", choices, min_trust=min_trust, **waits)
    return with_progress(asked, **fields)


def state(choice: ChoiceProgress) -> tuple[list[int], list[int], inference.FinishedChoice | None]:
    return list(choice.tokens), [one.id for one in choice.held], choice.end


def test_a_request_is_served_as_if_it_had_come_to_the_other_gateway() -> None:
    told = Told()
    sent, asked = Sent(), ask(choices=2, min_trust=10)
    forward = sent.add(asked, 0.0)
    forward.guest = 3
    answer = GuestAnswer(told, 3, forward.number, Refused())
    served = answer.request(forward, "demo", CONTEXT)
    assert (served.id, served.key, served.tenant, served.max_tokens) == ("3:1", "who", "tenant", 50)
    assert (served.choices, served.priority, served.patience, served.min_trust) == (2, 2, 7.5, 10)
    assert (served.progress.started, served.progress.earlier_tokens, served.envelope) == (False, 0, PROMPT)

    answer.opened()
    answer.started(inference.Started(ring="demo-0"))
    first, second = served.progress.choices
    first.tokens.extend([5, 6])
    first.end = inference.FinishedChoice(reason=inference.FINISH_REASON_STOP, completion_tokens=2)
    second.tokens.append(7)
    second.held = [inference.TokenLogprob(id=7)]
    answer.delta(inference.Delta(text="a", tokens=2))
    answer.delta(inference.Delta(text="b", tokens=1, choice=1), second.held)
    answer.timings.ring = 1.5
    requests = [sent.take(one, CONTEXT) for one in told]
    assert requests == [asked] * 4
    assert [state(one) for one in asked.progress.choices] == [state(one) for one in served.progress.choices]
    assert [one.event.delta.text for one in told[2:]] == ["a", "b"]
    assert [list(one.tokens) for one in told[3].progress] == [[], [7]]

    answer.fail(StageFailed("gone"))
    assert [one.ring_ms for one in told] == [0, 0, 0, 0, 1500]
    begun, waiting = sent.clear()
    assert (begun, waiting, len(sent)) == ([asked], [], 0)
    asked.progress.started = True
    again = GuestAnswer(told, 1, 1, Refused()).request(sent.add(asked, 0.0), "demo", CONTEXT)
    assert [state(one) for one in again.progress.choices] == [state(one) for one in asked.progress.choices]
    assert (again.progress.started, again.progress.earlier_tokens) == (True, 3)


@pytest.mark.parametrize(
    ("again", "attempts", "claimed", "told"),
    [
        (False, 0, 0, (0, 0)),
        (True, 0, 0, (1, 0)),
        (False, 0, 3, (0, 1)),
        (True, 2, 3, (2, 0)),
        (True, 99, 0, (MAX_ATTEMPTS - 1, 0)),
    ],
)
def test_the_other_gateway_knows_what_goes_on_after_a_fault(
    again: bool, attempts: int, claimed: int, told: tuple[int, int]
) -> None:
    """It counts the guest's own attempts. Of a client's claim it knows only that it is one."""
    asked = ask(attempts=attempts, claimed=claimed)
    answer = GuestAnswer(lambda told, written: None, 3, 1, Refused())
    request = answer.request(Sent().add(asked, 0.0, again=again), "demo", CONTEXT)
    assert (request.progress.attempts, request.progress.claimed) == told


def test_clients_of_another_gateway_fill_no_queue_by_what_they_claim() -> None:
    scheduler, failed = Scheduler(queue_limit=4), []
    for number in range(9):
        asked = ask(name=f"req-{number}", key="greedy", claimed=1)
        answer = GuestAnswer(lambda told, written: None, 3, number, Refused())
        failed += scheduler.submit(answer.request(Sent().add(asked, 0.0), "demo", CONTEXT), 0.0)
    assert len(failed) == 9 - 4
    (displaced,) = scheduler.submit(ask(name="req-honest", key="another"), 0.0)
    assert isinstance(displaced, Fail)
    assert displaced.request.key == "greedy"


def test_a_deadline_is_that_of_the_arrival_and_ends_with_the_wait() -> None:
    """However often the ring breaks; what is being computed may take as long as it takes."""
    sent, asked = Sent(), ask()
    assert [sent.add(asked, now).request.deadline_ms for now in (100.0, 104.0, 200.0)] == [7500, 3500, 1]
    for waits, deadline in ((False, 107.5), (True, 107.5)):
        sent.take(control.Forwarded(number=1, waits=waits), CONTEXT)
        assert asked.progress.deadline == deadline
    asked.progress.started = True
    sent.take(control.Forwarded(number=1, waits=True), CONTEXT)
    assert asked.progress.deadline == 107.5
    sent.take(control.Forwarded(number=1), CONTEXT)
    assert sent.add(asked, 200.0).request.deadline_ms == 0
    assert (asked.progress.deadline, ask().patience) == (math.inf, 7.5)


def test_a_prompt_counts_once_the_other_gateways_ring_computes_it() -> None:
    """Its client may leave before anything is answered, and has used the ring."""
    told = Told()
    sent, asked = Sent(), ask()
    forward = sent.add(asked, 0.0)
    answer = GuestAnswer(told, 3, forward.number, Refused())
    answer.request(forward, "demo", CONTEXT)
    answer.opened()
    answer.started(inference.Started(ring="demo-0"))
    answer.waits()
    for one in told:
        sent.take(one, CONTEXT)
        asked.progress.started = True
    assert not asked.progress.begun
    answer.computed()
    sent.take(told[-1], CONTEXT)
    assert asked.progress.begun


def test_a_request_that_gives_way_waits_until_it_is_computed_again() -> None:
    told = Told()
    sent, asked = Sent(), ask()
    forward = sent.add(asked, 0.0)
    answer = GuestAnswer(told, 3, forward.number, Refused())
    served = answer.request(forward, "demo", CONTEXT)

    def heard() -> int:
        while told:
            sent.take(told.pop(0), CONTEXT)
        return sent.begun

    answer.opened()
    answer.computed()
    asked.progress.started = True
    served.progress.choices[0].tokens.extend([4, 5, 6])
    answer.delta(inference.Delta(text="abc", tokens=3))
    assert heard() == 1
    answer.paused()
    assert (heard(), asked.progress.earlier_tokens) == (0, 3)
    assert sent.clear() == ([], [asked])
    forward = sent.add(asked, 0.0)
    assert list(forward.progress[0].tokens) == [4, 5, 6]


def test_what_is_over_is_forgotten() -> None:
    told = Told()
    sent = Sent()
    first, second, third = (ask(name=f"req-{number}") for number in (1, 2, 3))
    forwards = [sent.add(one, 0.0) for one in (first, second, third)]
    assert [one.number for one in forwards] == [1, 2, 3]
    GuestAnswer(told, 1, 1, Refused()).fail(ResourceExhausted("full", reason="QUEUE_FULL"))
    assert told[0].problem.reason == "QUEUE_FULL"
    assert sent.take(told[0], CONTEXT) is first
    assert sent.take(told[0], CONTEXT) is None
    assert sent.cancel("req-2") == control.Forward(number=2, cancel=True)
    assert "req-2" not in sent
    assert sent.clear() == ([], [third])


def test_an_answer_that_has_ended_or_was_cancelled_leaves_nothing() -> None:
    told = Told()
    sent, asked = Sent(), ask()
    for over in (True, False):
        forward = sent.add(asked, 0.0)
        answer = GuestAnswer(told, 1, forward.number, Refused())
        answer.request(forward, "demo", CONTEXT)
        answer.computed()
        assert sent.take(told[-1], CONTEXT) is asked
        answer.delta(inference.Delta(text="a", tokens=1))
        assert told[-1].event.delta == inference.Delta(text="a", tokens=1)
        if over:
            answer.finished(inference.Finished())
            assert sent.take(told[-1], CONTEXT) is asked
        else:
            sent.cancel(asked.id)
        assert (asked.id in sent, len(sent)) == (False, 0)
    assert sent.clear() == ([], [])


def test_how_far_a_long_prompt_is_reaches_the_client_of_the_other_gateway() -> None:
    told, heard = Told(), list[tuple[int, int]]()
    answer = SimpleNamespace(timings=Timings(), prefilled=lambda *at: heard.append(at))
    epoch = SimpleNamespace(
        serving=SimpleNamespace(context=CONTEXT),
        streams=SimpleNamespace(send_prompt=lambda *_, **__: None, stir=lambda: None),
    )
    own: Any = SimpleNamespace(scheduler=SimpleNamespace(drain=lambda: []))
    guest = ForwardedRequests(own, Answers("demo-0"), lambda: 0.0)
    guest.begin(cast(Any, epoch))
    guest.submit(ask(), cast(Any, answer))
    for done in (0, 64):
        GuestAnswer(told, 1, 1, Refused()).prefilled(done, 90)
    for one in told:
        guest.hear(control.ScheduleResponse(forwarded=one))
    assert heard == [(0, 90), (64, 90)]


def test_a_request_that_was_never_tried_says_so() -> None:
    assert [Sent().add(ask(claimed=claimed), 0.0).request.attempts for claimed in (0, 1)] == [0, 1]


def test_what_does_not_fit_is_refused() -> None:
    sent, asked = Sent(), ask()
    sent.add(asked, 0.0)
    with pytest.raises(InvalidInput):
        sent.take(control.Forwarded(number=1, progress=[control.Progress(), control.Progress()]), CONTEXT)
    wrong = inference.GenerateResponse(delta=inference.Delta(text="x", choice=1))
    with pytest.raises(InvalidInput):
        sent.take(control.Forwarded(number=1, event=wrong), CONTEXT)
    answer = GuestAnswer(lambda told, written: None, 1, 1, Refused())
    for forward in (
        control.Forward(number=1),
        sent.add(ask(), 0.0),
    ):
        with pytest.raises(InvalidInput):
            answer.request(forward, "another", CONTEXT)
    forward = sent.add(ask(), 0.0)
    forward.request.priority = 11
    with pytest.raises(InvalidInput) as caught:
        answer.request(forward, "demo", CONTEXT)
    assert caught.value.reason == "BAD_PRIORITY"
    forward = sent.add(ask(), 0.0)
    forward.progress.add(held=[inference.TokenLogprob(id=1)])
    with pytest.raises(InvalidInput, match="longer than it may be"):
        answer.request(forward, "demo", CONTEXT)
    forward = sent.add(ask(), 0.0)
    forward.progress.add(tokens=array("I", [1]))
    forward.progress.add()
    with pytest.raises(InvalidInput):
        answer.request(forward, "demo", CONTEXT)


@pytest.mark.parametrize(("max_tokens", "most"), [(3, 3), (0, CONTEXT), (2 * CONTEXT, CONTEXT)])
def test_no_answer_is_longer_than_was_asked_for(max_tokens: int, most: int) -> None:
    """Neither the one that a guest brings along nor the one that comes back to it."""
    sent, asked = Sent(), ask(choices=2, max_tokens=max_tokens)
    forward = sent.add(asked, 0.0)
    told = control.Forwarded(number=1, progress=[control.Progress(), control.Progress()])
    for message in (forward, told):
        del message.progress[:]
        message.progress.add(tokens=[1] * most)
        message.progress.add(tokens=[1] * most)
    answer = GuestAnswer(lambda told, written: None, 1, 1, Refused())
    assert [len(one.tokens) for one in answer.request(forward, "demo", CONTEXT).progress.choices] == [
        most,
        most,
    ]
    assert sent.take(told, CONTEXT) is asked
    forward.progress[1].tokens.append(1)
    with pytest.raises(InvalidInput):
        answer.request(forward, "demo", CONTEXT)
    told.progress[0].tokens[:] = []
    told.progress[1].tokens[:] = [1]
    with pytest.raises(InvalidInput):
        sent.take(told, CONTEXT)


def test_names_that_a_guest_tells_are_short_and_its_deadline_may_be_none() -> None:
    forward = Sent().add(ask(), 0.0)
    forward.key, forward.tenant, forward.request.deadline_ms, forward.request.choices = (
        "k" * 300,
        "t" * 300,
        0,
        0,
    )
    served = GuestAnswer(lambda told, written: None, 1, 1, Refused()).request(forward, "demo", CONTEXT)
    assert (served.key, served.tenant) == ("k" * 256, "t" * 256)
    assert (served.patience, served.choices) == (math.inf, 1)


def test_a_sealed_answer_goes_back_as_it_is() -> None:
    told = Told()
    answer = GuestAnswer(told, 1, 1, Refused())
    answer.request(Sent().add(ask(), 0.0), "demo", CONTEXT)
    answer.delta(inference.Delta(sealed=b"sealed", tokens=3))
    answer.finished(inference.Finished(completion_tokens=3))
    answer.waits()
    answer.computed()
    answer.waits()
    assert told[0].event.delta == inference.Delta(sealed=b"sealed", tokens=3)
    assert told[1].event.finished.completion_tokens == 3
    assert [one.waits for one in told] == [False, False, True, False], "what is computed no longer waits"


def test_what_had_no_memory_is_refused_once_when_it_is_brought_again() -> None:
    refused, error = Refused(), StageFailed("no memory", reason=StageFailed.out_of_memory)
    forward = Sent().add(ask(), 0.0)
    answer = GuestAnswer(lambda told, written: None, 1, 1, refused)
    answer.request(forward, "demo", CONTEXT)
    answer.fail(StageFailed("else"))
    answer.request(forward, "demo", CONTEXT)
    answer.fail(error)
    other = control.Forward.FromString(forward.SerializeToString())
    other.key = "somebody else"
    answer.request(other, "demo", CONTEXT)
    with pytest.raises(StageFailed) as raised:
        answer.request(forward, "demo", CONTEXT)
    assert raised.value is error
    answer.request(forward, "demo", CONTEXT)


def piece(text: str, *tokens: int) -> control.Forwarded:
    event = inference.GenerateResponse(delta=inference.Delta(text=text))
    return control.Forwarded(number=1, event=event, progress=[control.Progress(tokens=tokens)])


@pytest.mark.parametrize(
    "last",
    [piece("c"), piece("x" * 4 * TOKEN_BYTES, 3), piece("", *range(50))],
    ids=["piece", "text", "ids"],
)
def test_no_more_is_told_than_tokens_bring(last: control.Forwarded) -> None:
    """Two of a run with drafts come with the tokens of both."""
    sent, asked = Sent(), ask()
    sent.add(asked, 0.0)
    for each in (piece("a", 1, 2), piece("b" * TOKEN_BYTES)):
        assert sent.take(each, CONTEXT) is asked
    with pytest.raises(InvalidInput):
        sent.take(last, CONTEXT)


def test_sealed_pieces_of_several_choices_are_no_more_than_their_tokens_and_receipts() -> None:
    sent, receipt = Sent(), inference.ReceiptRequest()
    envelope = inference.Envelope(sealed=b"prompt")
    asked = Request("req-1", "who", 50, envelope, "demo", "tenant", 2, receipt=receipt)
    sent.add(asked, 0.0)
    delta = inference.GenerateResponse(delta=inference.Delta(sealed=b"piece", tokens=1))
    token, none = control.Progress(tokens=[0]), control.Progress()
    for progress in ([token, none], [none, token], [token, none], [none, token], [], []):
        assert sent.take(control.Forwarded(number=1, event=delta, progress=progress), CONTEXT) is asked
    with pytest.raises(InvalidInput):
        sent.take(control.Forwarded(number=1, event=delta), CONTEXT)


@pytest.mark.parametrize("refused", [True, False])
def test_an_end_that_the_head_does_not_read_keeps_no_prompt(refused: bool) -> None:
    """Else a head that forwards 32 MiB and reads nothing could do that again and again."""
    told, forward = Told(), Sent().add(ask(), 0.0)
    held = sys.getrefcount(forward)
    answer = GuestAnswer(told, 1, 1, Refused())
    answer.request(forward, "demo", CONTEXT)
    assert sys.getrefcount(forward) > held
    if refused:
        answer.fail(ResourceExhausted("full", reason="QUEUE_FULL"))
    else:
        answer.finished(inference.Finished())
    del answer
    assert told.written
    assert sys.getrefcount(forward) == held


def test_what_is_not_on_its_way_to_the_guest_is_unread() -> None:
    told = Told()
    answer = GuestAnswer(told, 1, 1, Refused())
    answer.request(Sent().add(ask(), 0.0), "demo", CONTEXT)
    for number in range(1, 4):
        answer.delta(inference.Delta(text="x" * 1000, tokens=number))
    assert answer.unread > 3000
    for written in told.written:
        written()
    assert answer.unread == 0


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), min_size=1, max_size=6),
        max_size=6,
    ),
    st.integers(0, 40),
)
@example([[(0, True, False), (0, True, True)]], 1)
def test_a_gateway_that_takes_over_has_the_tokens_of_the_text_that_was_told_and_no_others(
    steps: list[list[tuple[int, bool, bool]]], arrived: int
) -> None:
    """The other gateway goes between two messages of one step. Each token of a choice has text, a
    log-probability or neither, which is held back until the next that has."""
    told, sent, asked = Told(), Sent(), ask(choices=3)
    answer = GuestAnswer(told, 3, 1, Refused())
    served = answer.request(sent.add(asked, 0.0), "demo", CONTEXT)
    back: list[list[int]] = [[], [], []]
    for step in steps:
        deltas = []
        for number, tells, ends in step:
            choice = served.progress.choices[number]
            if choice.end is not None:
                continue
            choice.tokens.append(len(choice.tokens))
            back[number].append(len(choice.tokens) - 1)
            logged = back[number][:] if tells else []
            if tells:
                back[number] = []
            choice.held = [inference.TokenLogprob(id=one) for one in back[number]]
            if ends and tells:
                choice.end = inference.FinishedChoice(completion_tokens=len(choice.tokens))
            if tells:
                logprobs = [inference.TokenLogprob(id=one) for one in logged]
                delta = inference.Delta(
                    text="x" * len(logged), tokens=len(choice.tokens), logprobs=logprobs, choice=number
                )
                deltas.append((delta, choice.held))
        for delta, held in deltas:
            answer.delta(delta, held)
    texts = ["", "", ""]
    for message in told[:arrived]:
        sent.take(message, CONTEXT)
        texts[message.event.delta.choice] += message.event.delta.text
    for number, choice in enumerate(asked.progress.choices):
        assert list(choice.tokens) == list(range(len(texts[number])))
        assert list(choice.held) == []
        assert choice.end is None or choice.end.completion_tokens == len(texts[number])
