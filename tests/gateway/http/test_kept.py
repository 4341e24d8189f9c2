"""`Idempotency-Key`: who asks again is told the same answer, and what is kept of answers is bounded."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sealring.gateway.inference import kept
from sealring.gateway.inference.kept import KeptAnswers
from sealring.gateway.inference.service import InferenceService
from sealring.mesh.errors import Cancelled, FailedPrecondition, InvalidInput, Unavailable
from sealring.v1 import inference_pb2 as inference

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def http(port: int) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=200) as client:
        yield client


async def ask(http: httpx.AsyncClient, key: str, **fields: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=CHAT | fields, headers={"idempotency-key": key})


async def test_who_asks_again_is_told_the_same_answer_once_computed(
    http: httpx.AsyncClient, backend: Any
) -> None:
    first, again, other = await ask(http, "a"), await ask(http, "a"), await ask(http, "b")
    assert first.json()["id"] == again.json()["id"] != other.json()["id"]
    assert first.json()["choices"] == again.json()["choices"]
    assert len(backend.requests) == 2
    reused = await ask(http, "a", max_tokens=3)
    assert (reused.status_code, reused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert (await ask(http, "x" * 255)).status_code == 200
    assert (await ask(http, "x" * 256)).status_code == 400


async def test_who_asks_again_over_grpc_is_told_the_same_answer(backend: Any) -> None:
    """The metadata of its call has the key."""
    service = InferenceService(backend, lambda: b"")
    prompt = inference.Envelope(clear=inference.Prompt(text="x"))
    request = inference.GenerateRequest(model="demo", envelope=prompt)

    async def call(key: str) -> list[inference.GenerateResponse]:
        context: Any = SimpleNamespace(
            invocation_metadata=lambda: (("idempotency-key", key),),
            peer=lambda: secrets.token_hex(2),
            set_trailing_metadata=lambda _: None,
        )
        return [event async for event in service.Generate(request, context)]

    assert await call("a") == await call("a")
    assert await call("b")
    assert len(backend.requests) == 2
    request.max_tokens = 3
    with pytest.raises(FailedPrecondition):
        await call("a")


async def test_an_answer_goes_on_for_a_client_that_comes_back(http: httpx.AsyncClient, backend: Any) -> None:
    backend.held = asyncio.Event()
    with pytest.raises(httpx.ReadTimeout):
        await http.post(
            "/v1/chat/completions",
            json=CHAT,
            headers={"idempotency-key": "a"},
            timeout=httpx.Timeout(200, read=0.2),
        )
    again = asyncio.create_task(ask(http, "a"))
    await asyncio.sleep(0.05)
    assert backend.closed == []
    backend.held.set()
    assert (await again).json()["choices"][0]["message"]["content"] == "Hello – ☃"
    assert len(backend.requests) == 1


async def test_what_failed_is_asked_anew(http: httpx.AsyncClient, backend: Any) -> None:
    backend.error = Unavailable("no ring", reason="RING_DOWN")
    assert (await ask(http, "a")).status_code == 503
    backend.error = None
    assert (await ask(http, "a")).status_code == 200


def delta(text: str) -> inference.GenerateResponse:
    return inference.GenerateResponse(delta=inference.Delta(text=text))


async def told(
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
    first = answers.events("", "k", b"1", lambda: told("a", "b", hold=hold))
    assert (await anext(first)).delta.text == "a"
    second = asyncio.create_task(texts(answers.events("", "k", b"1", told)))
    hold.set()
    assert await texts(first) == ["b"]
    assert await second == ["a", "b"]
    assert await texts(answers.events("other", "k", b"2", lambda: told("z"))) == ["z"]
    with pytest.raises(FailedPrecondition):
        answers.events("", "k", b"2", told)
    with pytest.raises(InvalidInput):
        answers.events("", "", b"2", told)


async def test_what_breaks_off_by_a_fault_of_ours_is_not_kept() -> None:
    async def broken() -> AsyncGenerator[inference.GenerateResponse, None]:
        yield delta("a")
        raise RuntimeError

    answers = KeptAnswers()
    with pytest.raises(RuntimeError):
        await texts(answers.events("", "k", b"1", broken))
    assert await texts(answers.events("", "k", b"1", lambda: told("b"))) == ["b"]


@pytest.mark.parametrize(("lacking", "left"), [(0, ["2", "3", "4"]), (1, ["3", "4"])])
async def test_the_oldest_answers_make_room(
    monkeypatch: pytest.MonkeyPatch, lacking: int, left: list[str]
) -> None:
    answers = KeptAnswers()
    for number in range(5):
        await texts(answers.events("", str(number), b"", lambda: told("x" * 1000)))
        await asyncio.sleep(0)
        if not number:
            size = answers._kept["", "0"].size
            monkeypatch.setattr(kept, "KEPT_BYTES", 3 * size - lacking)
    assert size > 1000
    assert [key for _, key in answers._kept] == left


async def test_what_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_LEFT", 1)
    answers, hold = KeptAnswers(), asyncio.Event()
    readers = [answers.events("", str(number), b"", lambda: told("a", hold=hold)) for number in range(3)]
    for reader in readers:
        await anext(reader)
    late = answers.events("", "0", b"", told)
    assert (await anext(late)).delta.text == "a"
    entries = list(answers._kept.values())
    for reader in (*readers, late):
        await reader.aclose()
    await asyncio.sleep(0)
    assert [one.task.cancelled() for one in entries].count(True) == 2, "more than may be left"
    left = next(one for one in entries if not one.task.cancelled())
    left.task.cancel()  # as its timer does
    name = next(iter(answers._kept))
    with pytest.raises(Cancelled):
        await texts(answers.events(*name, b"", told))
