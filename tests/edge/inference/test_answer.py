"""Deltas that wait for a slow reader become one; nothing of them is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sealring.edge.inference.answer import Answer
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
