"""Deltas that wait for a slow reader become one; nothing of them is lost."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.edge.inference import timings
from sealring.edge.inference.answer import Answer
from sealring.edge.inference.timings import Prefill
from sealring.mesh.errors import Unavailable
from sealring.v1 import inference_pb2 as inference


def tokens_of(*ids: int) -> list[inference.TokenLogprob]:
    return [inference.TokenLogprob(id=each) for each in ids]


def delta_of(text: str, tokens: int, *ids: int, **fields: Any) -> inference.Delta:
    return inference.Delta(text=text, tokens=tokens, logprobs=tokens_of(*ids), **fields)


async def test_waiting_deltas_are_joined_with_their_log_probabilities() -> None:
    answer = Answer()
    answer.delta(delta_of("a", 1, 1))
    answer.delta(delta_of("", 2, 2))
    answer.delta(delta_of("bc", 4, 3, 4))
    first = (await anext(answer)).delta
    assert (first.text, first.tokens, list(first.logprobs)) == ("abc", 4, tokens_of(1, 2, 3, 4))
    answer.delta(delta_of("d", 5))
    second = (await anext(answer)).delta
    assert (second.text, second.tokens, list(second.logprobs)) == ("d", 5, [])


async def test_joined_log_probabilities_stay_below_the_limit_of_a_message() -> None:
    answer = Answer()
    spelling = b"x" * 64
    top = [inference.TopLogprob(id=each, spelling=spelling, logprob=-1) for each in range(20)]
    for number in range(1, 3001):
        one = inference.TokenLogprob(id=number, spelling=spelling, logprob=-1, top=top)
        answer.delta(inference.Delta(text="x", tokens=number, logprobs=[one]))
    answer.finished(inference.Finished())
    events = [event async for event in answer]
    assert max(event.ByteSize() for event in events) < 1 << 20
    assert [one.id for event in events for one in event.delta.logprobs] == list(range(1, 3001))
    assert "".join(event.delta.text for event in events) == "x" * 3000


async def test_a_token_without_text_is_told() -> None:
    answer = Answer()
    answer.delta(delta_of("", 1, 1))
    answer.finished(inference.Finished(completion_tokens=1))
    events = [event async for event in answer]
    assert [event.WhichOneof("event") for event in events] == ["delta", "finished"]
    assert list(events[0].delta.logprobs) == tokens_of(1)


async def test_deltas_of_other_choices_and_sealed_ones_are_not_joined() -> None:
    answer = Answer()
    answer.delta(delta_of("a", 1))
    answer.delta(delta_of("b", 2, choice=1))
    answer.delta(delta_of("c", 3, choice=1))
    answer.delta(inference.Delta(sealed=b"s1", tokens=4))
    answer.delta(inference.Delta(sealed=b"s2", tokens=5))
    answer.delta(delta_of("d", 6))
    answer.fail(Unavailable("gone"))
    seen = []
    with pytest.raises(Unavailable):
        async for event in answer:
            delta = event.delta
            seen.append((delta.text, delta.sealed, delta.tokens, delta.choice))
    assert seen == [
        ("a", b"", 1, 0),
        ("bc", b"", 3, 1),
        ("", b"s1", 4, 0),
        ("", b"s2", 5, 0),
        ("d", b"", 6, 0),
    ]


async def test_what_was_parsed_is_not_joined_with_its_neighbours() -> None:
    answer = Answer()
    parsed = inference.Parsed(reasoning="why")
    answer.delta(delta_of("a", 1))
    answer.delta(delta_of("b", 2, parsed=parsed))
    answer.delta(delta_of("c", 3))
    answer.delta(delta_of("d", 4))
    answer.finished(inference.Finished())
    deltas = [event.delta async for event in answer if event.HasField("delta")]
    assert [(delta.text, delta.parsed) for delta in deltas] == [
        ("a", inference.Parsed()),
        ("b", parsed),
        ("cd", inference.Parsed()),
    ]


async def test_log_probabilities_are_joined_up_to_their_limit() -> None:
    answer = Answer()
    for number in range(1, 258):
        answer.delta(delta_of("x", number, number))
    assert [len((await anext(answer)).delta.logprobs) for _ in range(2)] == [256, 1]


async def test_who_waits_is_woken_by_each_event() -> None:
    for tell in (
        lambda answer: answer.delta(delta_of("a", 1)),
        lambda answer: answer.started(inference.Started()),
        lambda answer: answer.finished(inference.Finished()),
    ):
        answer = Answer()
        waiting = asyncio.ensure_future(anext(answer))
        await asyncio.sleep(0)
        tell(answer)
        assert await waiting
    answer = Answer()
    waiting = asyncio.ensure_future(anext(answer))
    await asyncio.sleep(0)
    answer.fail(Unavailable("gone"))
    with pytest.raises(Unavailable):
        await waiting


async def test_how_far_a_prompt_is_comes_where_it_is_wanted_and_before_any_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timings, "PREFILL_SECONDS", 0.0)
    unasked, answer = Answer(), Answer(tell_prefill=True)
    for one in (unasked, answer):
        one.prefilled(10, 100)
        one.delta(delta_of("a", 1))
        one.prefilled(20, 100)  # of an epoch that computes the prompt again
        one.finished(inference.Finished())
    assert [event.WhichOneof("event") async for event in unasked] == ["delta", "finished"]
    assert [event.WhichOneof("event") async for event in answer] == ["prefilling", "delta", "finished"]


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(0, 400)), max_size=40))
def test_a_prompts_share_never_falls_and_is_told_now_and_then(chunks: list[tuple[float, int]]) -> None:
    now, told, at = [0.0], list[inference.Prefilling](), list[float]()
    prefill = Prefill(lambda: now[0])
    for waited, done in chunks:
        now[0] += waited
        if (one := prefill.at(done, 300)) is not None:
            told.append(one)
            at.append(now[0])
    assert [one.done for one in told] == sorted(one.done for one in told)
    assert all(one.done <= one.prompt_tokens == 300 for one in told)
    assert all(later >= earlier + timings.PREFILL_SECONDS for earlier, later in pairwise(at))


def test_a_prompt_that_comes_evenly_says_when_it_is_over() -> None:
    now = [50.0]
    prefill = Prefill(lambda: now[0])
    assert prefill.at(1000, 30_000) is None, "that much was kept"
    now[0] += 10
    assert prefill.at(11_000, 30_000) == inference.Prefilling(
        done=11_000, prompt_tokens=30_000, seconds_left=19
    )
