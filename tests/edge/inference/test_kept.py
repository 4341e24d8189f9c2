"""Kept answers: whole, computed once, and bounded in number, time and size."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from sealring.edge.inference import kept
from sealring.edge.inference.kept import KeptAnswers
from sealring.edge.inference.timers import LOOKS
from sealring.mesh.errors import Cancelled, FailedPrecondition, InvalidInput, Unavailable
from sealring.v1 import inference_pb2 as inference


def delta(text: str) -> inference.GenerateResponse:
    return inference.GenerateResponse(delta=inference.Delta(text=text))


async def scripted(
    *texts: str, hold: asyncio.Event | None = None
) -> AsyncGenerator[inference.GenerateResponse, None]:
    for text in texts:
        yield delta(text)
    if hold is not None:
        await hold.wait()


async def texts(events: Any) -> list[str]:
    return [event.delta.text async for event in events]


async def test_readers_follow_one_answer_each_from_its_beginning() -> None:
    answers, hold = KeptAnswers(), asyncio.Event()
    first = answers.events("", "k", b"1", lambda: scripted("a", "b", hold=hold))
    assert (await anext(first)).delta.text == "a"
    second = asyncio.create_task(texts(answers.events("", "k", b"1", scripted)))
    hold.set()
    assert await texts(first) == ["b"]
    assert await second == ["a", "b"]
    assert await texts(answers.events("other", "k", b"2", lambda: scripted("z"))) == ["z"]
    with pytest.raises(FailedPrecondition):
        answers.events("", "k", b"2", scripted)
    with pytest.raises(InvalidInput):
        answers.events("", "", b"2", scripted)


async def test_what_breaks_off_by_a_fault_of_ours_is_not_kept() -> None:
    async def broken() -> AsyncGenerator[inference.GenerateResponse, None]:
        yield delta("a")
        raise RuntimeError

    answers = KeptAnswers()
    with pytest.raises(RuntimeError):
        await texts(answers.events("", "k", b"1", broken))
    assert await texts(answers.events("", "k", b"1", lambda: scripted("b"))) == ["b"]


@pytest.mark.parametrize(("lacking", "left"), [(0, ["2", "3", "4"]), (1, ["3", "4"])])
async def test_the_oldest_answers_make_room(
    monkeypatch: pytest.MonkeyPatch, lacking: int, left: list[str]
) -> None:
    answers = KeptAnswers()
    for number in range(5):
        await texts(answers.events("", str(number), b"", lambda: scripted("x" * 1000)))
        await asyncio.sleep(0)
        if not number:
            size = answers.kept["", "0"].size
            monkeypatch.setattr(kept, "KEPT_BYTES", 3 * size - lacking)
    assert size > 1000
    assert [key for _, key in answers.kept] == left


async def test_many_short_answers_are_no_more_than_few_long_ones() -> None:
    """A hundred answers count about the memory that Python takes for them."""
    answers = KeptAnswers()
    await texts(answers.events("", "first", b"", lambda: scripted("a")))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(100):
            await texts(answers.events("", f"{number:0250}", b"", lambda: scripted("a")))
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    counted = sum(one.size for one in answers.kept.values())
    assert taken / 2 < counted < 4 * taken


@pytest.mark.parametrize("read", [True, False])
async def test_the_longest_under_way_is_kept_no_more_where_room_is_short(
    monkeypatch: pytest.MonkeyPatch, read: bool
) -> None:
    """It goes on for those who read it, and is asked for no faster than they read."""
    monkeypatch.setattr(kept, "KEPT_BYTES", 10_000 + 2 * kept.ANSWER_BYTES)
    asked = 0

    async def long() -> AsyncGenerator[inference.GenerateResponse, None]:
        nonlocal asked
        yield delta("first")
        await begun.wait()
        for _ in range(100):
            asked += 1
            yield delta("x" * 1000)

    begun = asyncio.Event()
    answers, hold = KeptAnswers(), asyncio.Event()
    short = answers.events("", "short", b"", lambda: scripted("a", hold=hold))
    readers = [answers.events("", "long", b"", long) for _ in range(1 + read)]
    for reader in (short, *readers):
        await anext(reader)
    late = answers.events("", "long", b"", long)
    begun.set()
    for _ in range(200):
        await asyncio.sleep(0)
    assert asked < 20
    await anext(readers[0])
    if read:
        said = await asyncio.gather(*map(texts, readers))
        assert said == [["x" * 1000] * 99, ["x" * 1000] * 100]
        with pytest.raises(Unavailable):
            await anext(late)
    else:
        await readers[0].aclose()
        for _ in range(50):
            await asyncio.sleep(0)
        assert asked < 20
    assert await texts(answers.events("", "long", b"", lambda: scripted("anew"))) == ["anew"]
    hold.set()
    assert await texts(short) == []
    assert await texts(answers.events("", "short", b"", scripted)) == ["a"]


async def test_what_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_LEFT", 1)
    answers, hold = KeptAnswers(), asyncio.Event()
    readers = [answers.events("", str(number), b"", lambda: scripted("a", hold=hold)) for number in range(3)]
    for reader in readers:
        await anext(reader)
    late = answers.events("", "0", b"", scripted)
    assert (await anext(late)).delta.text == "a"
    entries = list(answers.kept.values())
    for reader in (*readers, late):
        await reader.aclose()
    await asyncio.sleep(0)
    assert [one.task.cancelled() for one in entries].count(True) == 2, "more than may be left"
    left = next(one for one in entries if not one.task.cancelled())
    left.task.cancel()  # as its timer does
    name = next(iter(answers.kept))
    with pytest.raises(Cancelled):
        await texts(answers.events(*name, b"", scripted))


async def test_a_caller_that_has_most_makes_room_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both where bytes are short, and where too many answers have no reader."""
    monkeypatch.setattr(kept, "MAX_LEFT", 2)
    monkeypatch.setattr(kept, "KEPT_BYTES", 4 * (kept.ANSWER_BYTES + 1500))
    answers, hold = KeptAnswers(), asyncio.Event()
    left = answers.events("one", "left", b"", lambda: scripted("a", hold=hold))
    await anext(left)
    await left.aclose()
    for number in range(9):
        greedy = answers.events("greedy", f"left {number}", b"", lambda: scripted("a", hold=hold))
        await anext(greedy)
        await greedy.aclose()
        for _ in range(9):
            await asyncio.sleep(0)
    assert ("one", "left") in answers.kept
    assert [key for caller, key in answers.kept if caller == "greedy"] == ["left 8"]
    await texts(answers.events("one", "ended", b"", lambda: scripted("x" * 1000)))
    for number in range(9):
        await texts(answers.events("greedy", str(number), b"", lambda: scripted("x" * 1000)))
        await asyncio.sleep(0)
    assert {key for caller, key in answers.kept if caller == "one"} == {"left", "ended"}
    hold.set()


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs out does so in hours, so that a test sees which of them a timer waits for."""
    monkeypatch.setattr(kept, "LEFT_SECONDS", 3 * 3600.0)
    monkeypatch.setattr(kept, "KEPT_SECONDS", 7 * 3600.0)


def ends_in(entry: Any) -> int | None:
    """The hours that an answer has left; None: for ever."""
    timer = entry.timer
    if timer.cancelled():
        return None
    return round(timer.left / 3600)


@pytest.mark.usefixtures("hours")
async def test_an_answer_runs_out_while_nobody_reads_it_and_some_time_after_its_end() -> None:
    answers, hold = KeptAnswers(), asyncio.Event()
    first = answers.events("", "k", b"", lambda: scripted("a", "b", hold=hold))
    entry = answers.kept["", "k"]
    assert ends_in(entry) == 3, "until it is read for the first time"
    await anext(first)
    assert ends_in(entry) is None
    second = answers.events("", "k", b"", scripted)
    await anext(second)
    await first.aclose()
    assert ends_in(entry) is None, "somebody still reads"
    await second.aclose()
    assert ends_in(entry) == 3
    third = answers.events("", "k", b"", scripted)
    await anext(third)
    assert ends_in(entry) is None
    hold.set()
    assert await texts(third) == ["b"]
    assert ends_in(entry) == 7
    assert await texts(answers.events("", "k", b"", scripted)) == ["a", "b"]
    assert ends_in(entry) == 7, "reading it again keeps it no longer"
    for _ in range(LOOKS):
        entry.timer.look()
    assert answers.kept == {}


@pytest.mark.usefixtures("hours")
async def test_what_makes_room_does_not_end_an_answer_that_takes_its_key_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept, "KEPT_BYTES", 0)
    answers = KeptAnswers()
    reader = answers.events("", "k", b"", lambda: scripted("a"))
    entry = answers.kept["", "k"]
    assert await texts(reader) == ["a"]
    await asyncio.sleep(0)
    assert (answers.kept, ends_in(entry)) == ({}, None)


async def test_readers_leave_no_task_behind() -> None:
    answers, hold = KeptAnswers(), asyncio.Event()
    before = asyncio.all_tasks()
    reading = [
        asyncio.create_task(texts(answers.events("", "k", b"", lambda: scripted("a", hold=hold))))
        for _ in range(3)
    ]
    for _ in range(5):
        await asyncio.sleep(0)
    gone = reading.pop()
    gone.cancel()
    hold.set()
    assert await asyncio.gather(*reading) == [["a"], ["a"]]
    await asyncio.wait([gone])
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("key", ["", "x" * 256, "a\nb", "a\x00"])
async def test_a_key_is_short_and_prints(key: str) -> None:
    answers = KeptAnswers()
    with pytest.raises(InvalidInput) as raised:
        answers.events("", key, b"", scripted)
    assert (raised.value.reason, answers.kept) == ("BAD_IDEMPOTENCY_KEY", {})


async def test_a_key_is_its_callers_alone() -> None:
    answers = KeptAnswers()
    assert await texts(answers.events("one", "k" * 255, b"", lambda: scripted("a"))) == ["a"]
    assert await texts(answers.events("two", "k" * 255, b"", lambda: scripted("b"))) == ["b"]
    assert await texts(answers.events("one", "k" * 255, b"", scripted)) == ["a"]
