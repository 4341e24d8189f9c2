"""Answers that break off, and clients that do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from patience import until

from sealring.api.chat import ask_chat
from sealring.edge.http.answers import (
    PIECE_BYTES,
    EventStream,
    Whole,
    _Writer,
    collect,
    count_prompt,
    together,
    unless_disconnected,
)
from sealring.edge.inference import timers
from sealring.mesh.errors import Cancelled, Internal
from sealring.v1 import inference_pb2 as inference

STARTED = inference.GenerateResponse(started=inference.Started(model="demo"))
FINISHED = inference.GenerateResponse(finished=inference.Finished(completion_tokens=3))


def delta(text: str, choice: int = 0, *logged: int) -> inference.GenerateResponse:
    tokens = [inference.TokenLogprob(id=one) for one in logged]
    return inference.GenerateResponse(delta=inference.Delta(text=text, choice=choice, logprobs=tokens))


async def events(*given: inference.GenerateResponse) -> AsyncGenerator[inference.GenerateResponse, None]:
    for event in given:
        yield event


async def test_a_whole_answer_is_put_together_by_choice() -> None:
    parts = events(STARTED, delta("a", 0, 1), delta("x", 1), delta("b", 0, 2, 3), FINISHED)
    begin, choices, end = await collect(parts, 2)
    assert (begin.model, end.completion_tokens) == ("demo", 3)
    assert [(one.text, [token.id for token in one.logprobs]) for one in choices] == [
        ("ab", [1, 2, 3]),
        ("x", []),
    ]


async def test_answers_to_several_prompts_are_those_to_one() -> None:
    ends = [inference.FinishedChoice(completion_tokens=tokens) for tokens in (1, 2)]
    several = inference.GenerateResponse(finished=inference.Finished(completion_tokens=3, choices=ends))
    for end, tokens in ((several, [1, 2, 1, 2]), (FINISHED, [3, 3])):
        parts = [events(STARTED, delta("a"), end) for _ in range(2)]
        _, choices, whole = await collect(together(parts, len(tokens) // 2), len(tokens))
        assert [one.text for one in choices] == ["a", *[""] * (len(tokens) // 2 - 1)] * 2
        assert [one.completion_tokens for one in whole.choices] == tokens
        assert whole.completion_tokens == 6


@pytest.mark.parametrize(
    ("given", "lacks", "uncounted"),
    [
        ((), "begin", "begin"),
        ((FINISHED,), "begin", "begin"),
        ((STARTED, delta("a")), "end", "tell"),
        ((STARTED, FINISHED), "", "tell"),
    ],
)
async def test_an_answer_without_one_of_its_parts_is_a_fault_of_ours(
    given: Any, lacks: str, uncounted: str
) -> None:
    with pytest.raises(Internal, match=lacks) if lacks else contextlib.nullcontext():
        await collect(events(*given), 1)
    with pytest.raises(Internal, match=uncounted):
        await count_prompt(events(*given))


async def test_a_prompts_tokens_are_told_by_the_first_event_or_the_last() -> None:
    begin = inference.GenerateResponse(started=inference.Started(prompt_tokens=7))
    end = inference.GenerateResponse(finished=inference.Finished(prompt_tokens=8))
    assert await count_prompt(events(begin)) == 7
    assert await count_prompt(events(STARTED, delta("a"), end)) == 8


async def test_what_one_of_several_fails_with_ends_them_all() -> None:
    closed = []

    async def part(number: int, error: Exception | None) -> AsyncGenerator[inference.GenerateResponse, None]:
        try:
            yield STARTED
            yield delta("a")
            if error is not None:
                raise error
            await asyncio.Event().wait()
        finally:
            closed.append(number)

    received = []
    with pytest.raises(ValueError, match="broken"):
        async for event in together([part(0, None), part(1, ValueError("broken")), part(2, None)], 2):
            received.append(event)
    assert [event.WhichOneof("event") for event in received].count("started") == 1
    assert {event.delta.choice for event in received if event.HasField("delta")} <= {0, 2, 4}
    assert sorted(closed) == [0, 1, 2]


async def test_the_numbers_of_several_answers_are_added_up() -> None:
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "drafted_tokens", "accepted_tokens")
    ends = []
    for scale in (1, 10):
        numbers = {name: scale * index for index, name in enumerate(names, 1)}
        ends.append(inference.Finished(reason=inference.FINISH_REASON_LENGTH, **numbers))  # type: ignore[arg-type]
    parts = [events(STARTED, inference.GenerateResponse(finished=end)) for end in ends]
    _, _, whole = await collect(together(parts, 1), 2)
    assert [getattr(whole, name) for name in names] == [11, 22, 33, 44, 55]
    assert [(one.reason, one.completion_tokens) for one in whole.choices] == [
        (ends[0].reason, 2),
        (ends[0].reason, 20),
    ]


async def test_work_ends_with_its_client() -> None:
    ended = []

    async def work() -> None:
        try:
            for _ in range(100):  # turns of the loop, of which noticing takes a few
                await asyncio.sleep(0)
        finally:
            ended.append(True)

    for last in ({"type": "http.disconnect"}, OSError("reset")):
        messages: list[Any] = [{"type": "http.request"}, last]

        async def receive(messages: list[Any] = messages) -> Any:
            if not messages:
                await asyncio.Event().wait()
            message = messages.pop(0)
            if isinstance(message, OSError):
                raise message
            return message

        with pytest.raises(Cancelled):
            await unless_disconnected(receive, work())
    assert ended == [True, True]

    async def silent() -> Any:
        await asyncio.Event().wait()

    async def quick() -> int:
        return 7

    assert await unless_disconnected(silent, quick()) == 7


async def test_what_else_a_client_sends_ends_nothing() -> None:
    messages = [{"type": "http.request", "body": b"", "more_body": False}] * 3
    done, heard = asyncio.Event(), asyncio.Event()

    async def receive() -> Any:
        if messages:
            return messages.pop()
        heard.set()
        await done.wait()

    async def work() -> int:
        await heard.wait()
        await asyncio.sleep(0)
        return 7

    assert await unless_disconnected(receive, work()) == 7


async def test_a_client_that_is_gone_ends_the_writing() -> None:
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:
            raise OSError("gone")

    writer = _Writer(send, lambda: b":\n")
    with writer:
        await writer.write(b"a")
        await writer.write(b"b", more=False)
        with pytest.raises(Cancelled, match="went away"):
            await writer.write(b"c")
    assert [(one["body"], one["more_body"]) for one in sent] == [(b"a", True), (b"b", False), (b"c", True)]


async def test_a_whole_answer_is_under_way_until_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client that reads nothing would have the memory of any number of answers."""
    taken, reads = list[Any](), asyncio.Semaphore(0)

    async def send(message: Any) -> None:
        await reads.acquire()
        taken.append(message)

    whole = Whole(b"x" * 3 * PIECE_BYTES)
    task = asyncio.create_task(whole({"state": {"send": send}}, send, send))
    for count in range(5):
        for _ in range(3):
            await asyncio.sleep(0)
        assert (len(taken), task.done()) == (count, False)
        reads.release()
    await task
    assert b"".join(one.get("body", b"") for one in taken) == whole.body
    assert max(len(one.get("body", b"")) for one in taken) == PIECE_BYTES
    assert (taken[0]["status"], taken[-1]["more_body"]) == (200, False)
    monkeypatch.setattr(timers, "SEND_SECONDS", 0.01)
    reads.release()
    with pytest.raises(Cancelled, match="does not read"):
        await asyncio.create_task(whole({"state": {"send": send}}, send, send))


async def test_only_who_does_not_read_is_cancelled_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held = asyncio.Event()

    async def send(message: Any) -> None:
        await held.wait()

    async def write() -> None:
        writer = _Writer(send, lambda: b":\n")
        with writer:
            await writer.write(b"a")

    task = asyncio.create_task(write())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    monkeypatch.setattr(timers, "SEND_SECONDS", 0.01)
    with pytest.raises(Cancelled, match="does not read"):
        await asyncio.create_task(write())


async def test_a_writer_that_waits_for_its_answer_and_not_its_client_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timers, "SEND_SECONDS", 0.001)

    async def send(message: Any) -> None: ...

    writer = _Writer(send, lambda: b":\n")
    watch = writer.watch
    looks, look = [], watch.look
    watch.look = lambda: (looks.append(True), look())[1]  # type: ignore[method-assign]
    with writer:
        await writer.write(b"a")
        await until(lambda: len(looks) >= 3)
        await writer.write(b"b")


@pytest.mark.parametrize(
    ("sending", "quiet", "expected", "next_look"),
    [
        (False, 8.0, [b":\n"], 8.0),
        (False, 9.5, [b":\n"], 8.0),
        (False, 7.5, [], 0.5),
        (True, 8.0, [], 8.0),  # a part is on its way, and a ping might get in its middle
    ],
)
async def test_a_stream_that_tells_nothing_is_pinged(
    sending: bool, quiet: float, expected: list[bytes], next_look: float
) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    loop = asyncio.get_running_loop()
    now, looks = [100.0], list[float]()

    class Clock:
        time = staticmethod(lambda: now[0])
        create_task = staticmethod(loop.create_task)

        @staticmethod
        def call_later(seconds: float, look: Any) -> asyncio.TimerHandle:
            looks.append(seconds)
            return loop.call_later(3600, look)

    writer = _Writer(send, lambda: b":\n")
    writer.loop = Clock  # type: ignore[assignment]
    with writer:
        await writer.write(b"a")
        if sending:
            writer.watch.begin()
        now[0] += quiet
        writer.beat.cancel()
        writer.keep_alive()
        await asyncio.sleep(0)
        assert [one["body"] for one in sent[1:]] == expected
        assert all(one["more_body"] for one in sent)
        assert looks == [8.0, next_look]


async def test_a_stream_tells_between_keep_alives_how_far_a_long_prompt_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a comment, which clients pass over, also before the answer begins."""
    monkeypatch.setattr("sealring.edge.http.answers.PING_SECONDS", 0.01)
    may, comments = asyncio.Queue[None](), list[bytes]()

    async def events() -> AsyncGenerator[inference.GenerateResponse, None]:
        for done, left in ((100, 0), (2000, 41)):
            told = inference.Prefilling(done=done, prompt_tokens=30000, seconds_left=left)
            yield inference.GenerateResponse(prefilling=told)
            await may.get()
        yield inference.GenerateResponse(started=inference.Started())
        yield inference.GenerateResponse(delta=inference.Delta(text="Hel", tokens=1))
        yield inference.GenerateResponse(finished=inference.Finished(reason=inference.FINISH_REASON_STOP))

    async def send(message: Any) -> None:
        lines = message.get("body", b"").split(b"\n")
        comments.extend(line for line in lines if line.startswith(b": prompt"))
        if len(comments) > may.qsize():
            may.put_nowait(None)

    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    asked = ask_chat(body, "req-1")
    stream = EventStream(events(), asked, lambda begun: {})
    assert asked.request.tell_prefill
    await stream({"type": "http", "state": {"send": send}}, asyncio.Event().wait, send)
    assert comments == [
        b": prompt 100 of 30000 tokens",
        b": prompt 2000 of 30000 tokens, 41 s left",
    ]


async def test_a_ping_that_nobody_takes_breaks_nothing() -> None:
    async def send(message: Any) -> None:
        raise OSError("gone")

    await _Writer(send, lambda: b":\n").send_ping()


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("completions", {"prompt": "hello"}),
    ],
)
async def test_a_stream_tells_its_usage_with_each_piece(port: int, path: str, asked: dict[str, Any]) -> None:
    """As clients that measure speed ask, with a length of the answer that does not depend on the model."""
    body = {"model": "demo", "stream": True, "ignore_eos": True, "min_tokens": 3, **asked}
    for continuous, counted in ((True, [1, 2, 3]), (False, [])):
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1") as http:
            answer = await http.post(f"/{path}", json={**body, "stream_options": options})
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        *pieces, last = (json.loads(line)["usage"] for line in lines)
        counts = [one["completion_tokens"] for one in pieces if one]
        assert sorted(set(counts) - {0}) == counted
        assert all(one["prompt_tokens"] == 5 for one in pieces if one)
        assert (last["completion_tokens"], last["total_tokens"]) == (3, 8)
