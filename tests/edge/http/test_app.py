"""What OpenAI's own client makes of the edge."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import jsonschema
import openai
import psutil
import pytest
from patience import until
from starlette.routing import Route
from structlog.testing import capture_logs

from sealring.api.vectors import AT_ONCE, MAX_INPUTS, VectorRenderer
from sealring.edge.http.app import _headers, create_app
from sealring.edge.http.body import LONG_BODY
from sealring.mesh.errors import EpochEnded, InvalidInput, ResourceExhausted, Unavailable
from sealring.testing import ScriptedBackend, serve_edge
from sealring.v1 import inference_pb2 as inference

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def client(port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        api_key="none", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, timeout=200
    ) as made:
        yield made


async def test_chat_whole(client: openai.AsyncOpenAI, backend: Any) -> None:
    answer = await client.chat.completions.create(model="demo", messages=MESSAGES)
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == "Hello – ☃"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        5,
        3,
        8,
    )
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("fp_")
    assert backend.closed == [backend.requests[0].request_id]
    assert backend.requests[0].envelope.clear.sampling.temperature == 1.0


async def test_chat_stream(client: openai.AsyncOpenAI, backend: Any) -> None:
    backend.reason = inference.FINISH_REASON_LENGTH
    stream = await client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello – ☃"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


async def test_guessed_tokens_are_told_as_openai_names_them(client: openai.AsyncOpenAI, backend: Any) -> None:
    predicted: Any = {"type": "content", "content": [{"type": "text", "text": "Hello"}]}
    for backend.drafted, rejected in ((0, 0), (3, 2)):
        answer = await client.chat.completions.create(model="demo", messages=MESSAGES, prediction=predicted)
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        assert details.accepted_prediction_tokens == (backend.drafted and 1)
        assert details.rejected_prediction_tokens == rejected
    assert [one.envelope.clear.prediction for one in backend.requests] == ["Hello", "Hello"]


async def test_chat_stream_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])


TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


async def test_tools_are_called_and_answered(client: openai.AsyncOpenAI, calling: Any) -> None:
    answer = await client.chat.completions.create(model="demo", messages=MESSAGES, tools=TOOLS)
    message = answer.choices[0].message
    assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", "Let me see.")
    assert message.model_extra == {"reasoning_content": "hm"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 1
    assert message.tool_calls is not None
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]  # type: ignore[union-attr]
    assert calls == [("look", '{"at": 1}'), ("look", "{}")]
    ids = {call.id for call in message.tool_calls}
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert len(ids) == 2
    passed_back = [*MESSAGES, message.model_dump()]
    passed_back += [{"role": "tool", "tool_call_id": one, "content": "ok"} for one in ids]
    await client.chat.completions.create(model="demo", messages=passed_back, tools=TOOLS)
    chat = calling.requests[-1].envelope.clear.chat
    assert [one.role for one in chat.messages] == ["user", "assistant", "tool", "tool"]
    assert chat.messages[1].reasoning == "hm"
    assert {call.id for call in chat.messages[1].tool_calls} == ids


async def test_calls_are_streamed(client: openai.AsyncOpenAI, calling: Any) -> None:
    async with client.chat.completions.stream(model="demo", messages=MESSAGES, tools=TOOLS) as stream:
        answer = await stream.get_final_completion()
    message = answer.choices[0].message
    assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", "Let me see.")
    assert [call.function.arguments for call in message.tool_calls or ()] == ['{"at": 1}', "{}"]
    calling.reason = inference.FINISH_REASON_LENGTH
    stream2 = await client.chat.completions.create(model="demo", messages=MESSAGES, tools=TOOLS, stream=True)
    chunks = [chunk async for chunk in stream2]
    assert chunks[1].choices[0].delta.model_extra == {"reasoning_content": "hm"}
    assert [call.index for call in chunks[3].choices[0].delta.tool_calls or ()] == [0, 1]
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_completion(client: openai.AsyncOpenAI, backend: Any) -> None:
    answer = await client.completions.create(model="demo", prompt="once", max_tokens=7, stop="\n")
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "Hello – ☃"
    assert backend.requests[0].max_tokens == 7
    assert backend.requests[0].envelope.clear.text == "once"
    assert list(backend.requests[0].envelope.clear.stop) == ["\n"]


async def test_completions_of_several_prompts_whole_and_streamed(
    client: openai.AsyncOpenAI, backend: Any
) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": ["one ", "two "], "echo": True}
    answer = await client.completions.create(**asked)
    found = [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices]
    assert found == [(0, "one Hello – ☃", "stop"), (1, "two Hello – ☃", "stop")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 6)
    texts = ["", ""]
    async for chunk in await client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["one Hello – ☃", "two Hello – ☃"]
    await client.completions.create(model="demo", prompt=[[1, 2], [3]])
    assert [list(one.envelope.clear.tokens.ids) for one in backend.requests[-2:]] == [[1, 2], [3]]
    backend.error, backend.error_after = EpochEnded("lost"), 1
    with pytest.raises(openai.InternalServerError, match="lost"):
        await client.completions.create(**asked)
    assert len(backend.closed) == len(backend.requests) == 8


async def test_completion_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="demo", prompt=["once"], stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello – ☃"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_sampling_reaches_the_backend(client: openai.AsyncOpenAI, backend: Any) -> None:
    await client.chat.completions.create(
        model="demo",
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c", "name": "x"},
        ],
        temperature=0,
        top_p=0.5,
        seed=-1,
        stop=["x", "y"],
        max_completion_tokens=9,
        user="somebody",
        n=1,
        presence_penalty=0,
        logprobs=False,
        extra_body={"top_k": 4, "min_p": 0.25, "min_trust": 10},
    )
    request = backend.requests[0]
    sampling = request.envelope.clear.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 4, 0.25)
    assert sampling.seed == (1 << 64) - 1
    assert [(m.role, m.content) for m in request.envelope.clear.chat.messages] == [
        ("system", "a\nb"),
        ("user", "c"),
    ]
    assert request.max_tokens == 9
    assert request.min_trust == 10
    assert backend.keys == ["somebody"]


def token(spelling: bytes, logprob: float, *others: tuple[bytes, float]) -> inference.TokenLogprob:
    top = [inference.TopLogprob(spelling=each, logprob=value) for each, value in others]
    return inference.TokenLogprob(spelling=spelling, logprob=logprob, top=top)


SNOWMAN = "☃".encode()


@pytest.fixture
def logged(backend: Any) -> Any:
    """A backend whose three deltas bring no, one and three tokens; the last two are parts of a character."""
    backend.texts = ["", "Hé", "!☃"]
    backend.logprobs = [
        [],
        [token("Hé".encode(), -0.5, ("Hé".encode(), -0.5), (b"x", -1.5))],
        [
            token(b"!", -2.0, (b"?", -0.25), (b"?", -1.0)),
            token(SNOWMAN[:1], -0.5, (SNOWMAN[:1], -0.5), (SNOWMAN[1:2], -9999)),
            token(SNOWMAN[1:], -0.5, (SNOWMAN[1:], -0.5), (b".", -3)),
        ],
    ]
    return backend


async def test_chat_logprobs_whole(client: openai.AsyncOpenAI, logged: Any) -> None:
    answer = await client.chat.completions.create(
        model="demo", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    assert logged.requests[0].envelope.clear.sampling.logprobs == 2
    logged_by = answer.choices[0].logprobs
    assert logged_by is not None
    assert logged_by.content is not None
    assert logged_by.refusal is None
    assert [one.token for one in logged_by.content] == ["Hé", "!", "\ufffd", "\ufffd\ufffd"]
    assert [one.logprob for one in logged_by.content] == [-0.5, -2.0, -0.5, -0.5]
    spelt = b"".join(bytes(one.bytes or []) for one in logged_by.content)
    assert spelt.decode() == answer.choices[0].message.content
    first = logged_by.content[0].top_logprobs
    assert [(one.token, one.bytes, one.logprob) for one in first] == [
        ("Hé", list("Hé".encode()), -0.5),
        ("x", [120], -1.5),
    ]


async def test_chat_logprobs_streamed(client: openai.AsyncOpenAI, logged: Any) -> None:
    stream = await client.chat.completions.create(
        model="demo", messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True
    )
    chunks = [chunk async for chunk in stream]
    logged_by = [chunk.choices[0].logprobs for chunk in chunks]
    assert [None if one is None else len(one.content or []) for one in logged_by] == [None, None, 1, 3, None]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hé!☃"


async def test_chat_logprobs_of_no_tokens(client: openai.AsyncOpenAI, backend: Any) -> None:
    backend.texts = []
    answer = await client.chat.completions.create(model="demo", messages=MESSAGES, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content == []
    assert backend.requests[0].envelope.clear.sampling.HasField("logprobs")
    plain = await client.chat.completions.create(model="demo", messages=MESSAGES)
    assert plain.choices[0].logprobs is None
    assert not backend.requests[1].envelope.clear.sampling.HasField("logprobs")


async def test_completion_logprobs_whole_and_streamed(client: openai.AsyncOpenAI, logged: Any) -> None:
    answer = await client.completions.create(model="demo", prompt="once", logprobs=2)
    logged_by = answer.choices[0].logprobs
    assert logged_by is not None
    assert logged_by.tokens == ["Hé", "!", r"bytes:\xe2", r"bytes:\x98\x83"]
    assert logged_by.token_logprobs == [-0.5, -2.0, -0.5, -0.5]
    assert logged_by.text_offset == [0, 2, 3, 3]
    assert logged_by.top_logprobs is not None
    assert logged_by.top_logprobs[0] == {"Hé": -0.5, "x": -1.5}
    assert logged_by.top_logprobs[1] == {"?": -0.25, "!": -2.0}
    stream = await client.completions.create(model="demo", prompt="once", logprobs=2, stream=True)
    pieces = [chunk.choices[0].logprobs async for chunk in stream]
    joined = [one for piece in pieces if piece is not None for one in piece.tokens or []]
    offsets = [one for piece in pieces if piece is not None for one in piece.text_offset or []]
    assert (joined, offsets) == (logged_by.tokens, logged_by.text_offset)


@pytest.mark.parametrize("asked", [{"prompt": "Hé!"}, {"prompt": [[0, 7, 8]], "n": 1}])
async def test_an_echo_with_logprobs_as_evaluation_harnesses_ask(
    client: openai.AsyncOpenAI, backend: Any, asked: dict[str, Any]
) -> None:
    prompt = [token(b"<s>", 0.0), token(" Hé".encode(), -1.5, (b"x", -0.5)), token(b"!", -2.0, (b"!", -2.0))]
    for one in prompt:
        one.prompt = True
    backend.texts, backend.logprobs = ["."], [[*prompt, token(b".", -0.25, (b".", -0.25))]]
    before = "Hé!" if isinstance(asked["prompt"], str) else "<s> Hé!"
    offsets = [0, 0, 2, 3] if isinstance(asked["prompt"], str) else [0, 3, 6, 7]
    for most, answer, count in ((1, ".", 4), (0, "", 3)):
        asked |= {"model": "demo", "echo": True, "logprobs": 1, "max_tokens": most}
        whole = await client.completions.create(**asked)
        logged_by = whole.choices[0].logprobs
        assert logged_by is not None
        assert whole.choices[0].text == before + answer
        assert logged_by.tokens == ["<s>", " Hé", "!", "."][:count]
        assert logged_by.token_logprobs == [None, -1.5, -2.0, -0.25][:count]
        assert logged_by.top_logprobs == [None, {"x": -0.5, " Hé": -1.5}, {"!": -2.0}, {".": -0.25}][:count]
        assert logged_by.text_offset == offsets[:count]
        assert whole.usage is not None
        assert whole.usage.completion_tokens == most
        pieces = [chunk.choices[0] async for chunk in await client.completions.create(**asked, stream=True)]
        assert "".join(piece.text for piece in pieces) == before + answer
        logged = [piece.logprobs for piece in pieces if piece.logprobs]
        joined = [
            [value for one in logged for value in part(one) or []]
            for part in (lambda one: one.tokens, lambda one: one.text_offset, lambda one: one.token_logprobs)
        ]
        assert joined == [logged_by.tokens, logged_by.text_offset, logged_by.token_logprobs]


async def test_completion_logprobs_of_none_but_the_sampled(client: openai.AsyncOpenAI, logged: Any) -> None:
    answer = await client.completions.create(model="demo", prompt="once", logprobs=0)
    logged_by = answer.choices[0].logprobs
    assert logged_by is not None
    assert logged_by.token_logprobs == [-0.5, -2.0, -0.5, -0.5]
    assert logged_by.top_logprobs is None


async def test_models(client: openai.AsyncOpenAI) -> None:
    models = await client.models.list()
    assert [model.id for model in models.data] == ["demo"]
    model = await client.models.retrieve("demo")
    assert model.owned_by == "sealring"
    assert model.model_dump()["context_length"] == 256
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other/model")


async def test_unknown_model(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="nope", messages=MESSAGES)
    body: Any = caught.value.body
    assert body["code"] == "model_not_found"
    assert body["param"] == "model"
    assert "demo" in body["message"]


async def test_errors_before_the_stream_have_a_status(client: openai.AsyncOpenAI, backend: Any) -> None:
    backend.error = ResourceExhausted("full", reason="QUEUE_FULL", hint="later", retry_after=7)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="demo", messages=MESSAGES, stream=stream)
        assert caught.value.response.headers["retry-after"] == "7"
        assert caught.value.response.headers["x-request-id"]
    backend.error = Unavailable("down", reason="RING_DOWN")
    with pytest.raises(openai.InternalServerError) as down:
        await client.chat.completions.create(model="demo", messages=MESSAGES)
    assert down.value.status_code == 503
    backend.error = InvalidInput("too long", reason="CONTEXT_TOO_LONG", param="messages")
    with pytest.raises(openai.BadRequestError) as long:
        await client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
    assert long.value.code == "context_length_exceeded"
    assert backend.closed == [request.request_id for request in backend.requests]


async def test_an_error_in_mid_stream_raises(client: openai.AsyncOpenAI, backend: Any) -> None:
    backend.error, backend.error_after = EpochEnded("the ring lost a member"), 1
    stream = await client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
    texts = []
    with pytest.raises(openai.APIError) as caught:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content)
    assert texts == ["", "Hel"]
    assert caught.value.code == "epoch_ended"


async def test_an_unexpected_error_is_masked(client: openai.AsyncOpenAI, backend: Any) -> None:
    backend.texts = None
    with pytest.raises(openai.InternalServerError) as caught, capture_logs():
        await client.chat.completions.create(model="demo", messages=MESSAGES)
    assert caught.value.status_code == 500
    assert "NoneType" not in str(caught.value)


async def noticed(port: int, condition: Callable[[], bool]) -> bool:
    """Whether it holds by the time that the server, which has this loop, has answered many requests that came
    later. A server that does not notice a client's end fails a test so, and does not hold it up."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=200) as later:
        for _ in range(100):
            if condition():
                return True
            await later.get("/health/live")
    return False


async def test_a_client_that_leaves_cancels(port: int, backend: Any) -> None:
    backend.pause, backend.texts = 0.05, ["x"] * 1000
    body = {"model": "demo", "messages": MESSAGES}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=200) as client:
        async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            assert response.headers["x-sealring-min-trust"] == "10"
            async for _ in response.aiter_lines():
                break
        backend.sealed = True  # an answer that counts its prompt's tokens goes on to its end
        for number, path in enumerate(("/v1/chat/completions", "/v1/messages/count_tokens"), 2):
            whole = asyncio.create_task(client.post(path, json=body))
            await until(lambda number=number: len(backend.requests) >= number)
            whole.cancel()
            with pytest.raises(asyncio.CancelledError):
                await whole
    assert await noticed(port, lambda: len(backend.closed) == 3)


async def test_a_client_that_does_not_read_is_given_up(
    port: int, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealring.edge.inference.timers.SEND_SECONDS", 0.3)
    backend.texts = ["x" * 100_000] * 1000
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
    body = json.dumps({"model": "demo", "messages": MESSAGES, "stream": True}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    await reader.readline()
    await until(lambda: backend.closed)
    client = writer.get_extra_info("sockname")
    served = psutil.CONN_ESTABLISHED, client
    await until(lambda: served not in [(one.status, one.raddr) for one in psutil.Process().net_connections()])
    writer.transport.abort()


async def test_health_and_metrics(port: int, backend: Any) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=200) as client:
        assert (await client.get("/health")).json() == {"status": "serving", "rings": {"demo": 1}}
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/metrics")).text == "# none\n"
        backend.models = []
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/health/live")).status_code == 200


def test_an_answer_tells_where_it_comes_from() -> None:
    where = {"x-sealring-ring": "demo-0", "x-sealring-min-trust": "20", "x-sealring-roster-version": "7"}
    assert _headers(inference.Started(ring="demo-0", min_trust=20, roster_version=7)) == where


@pytest.mark.parametrize(
    ("path", "change", "ping", "told"),
    [
        ("/v1/chat/completions", {}, ": keep-alive", "Hel"),
        ("/v1/messages", {}, "event: ping", "Hel"),
        ("/api/chat", {}, " ", "Hel"),
        ("/api/chat", {"messages": []}, " ", '"done_reason": "load"'),
    ],
)
async def test_a_stream_is_kept_alive_before_its_answer_begins(
    port: int, backend: Any, monkeypatch: pytest.MonkeyPatch, path: str, change: Any, ping: str, told: str
) -> None:
    monkeypatch.setattr("sealring.edge.http.answers.PING_SECONDS", 0.01)
    backend.held = asyncio.Event()
    body = {"model": "demo", "messages": MESSAGES, "stream": True, "max_tokens": 5} | change
    if path == "/api/chat":
        del body["max_tokens"]
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=200) as http,
        http.stream("POST", path, json=body) as answer,
    ):
        parts = answer.aiter_text()
        begin = await anext(parts)
        assert begin.startswith(ping)
        backend.held.set()
        whole = begin + "".join([part async for part in parts])
    assert told in whole
    if path == "/api/chat":
        assert [json.loads(line)["done"] for line in whole.splitlines()][-1:] == [True]


async def test_an_error_after_the_first_sign_of_life_ends_the_stream_in_the_clients_words(
    port: int, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealring.edge.http.answers.PING_SECONDS", 0.01)
    error = InvalidInput("max_tokens is too large", param="max_tokens")
    backend.held, backend.error, backend.error_after = asyncio.Event(), error, 0
    body = {"model": "demo", "input": "x", "max_output_tokens": 5, "stream": True}
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=200) as http,
        http.stream("POST", "/v1/responses", json=body) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        await anext(lines)
        backend.held.set()
        assert '"message": "max_output_tokens is too large"' in "".join([line async for line in lines])


async def test_a_client_that_leaves_before_the_start_cancels(port: int, backend: Any) -> None:
    backend.held = asyncio.Event()
    body = {"model": "demo", "messages": MESSAGES, "stream": True}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=200) as http:
        task = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await until(lambda: backend.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await noticed(port, lambda: bool(backend.closed))
    backend.held.set()


async def test_what_is_served_is_told_where_nothing_is(port: int, backend: Any) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        page = await http.get("/")
        lost = await http.post("/v1/moderations", json={})
        read = await http.get("/docs")
        described = (await http.get("/openapi.json")).json()
    app = create_app(backend, exposition=lambda: b"")
    served = {
        route.path.replace("{model:path}", "{model}") for route in app.routes if isinstance(route, Route)
    }
    assert set(described["paths"]) == served - {"/", "/docs", "/openapi.json"}
    assert all(path in read.text for path in described["paths"])
    assert "http:" not in read.text
    assert "https:" not in read.text
    body = described["components"]["schemas"]["ChatBody"]
    assert set(body["required"]) == {"messages"}
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert lost.status_code == 404
    assert "/v1/chat/completions" in lost.json()["error"]["message"]


async def test_pages_of_named_origins_and_no_others_may_ask(backend: Any) -> None:
    async with (
        serve_edge(backend, cors_origins=["https://a.example"]) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
            asks = {"origin": origin, "access-control-request-method": "POST"}
            preflight = await http.options("/v1/chat/completions", headers=asks)
            answer = await http.get("/v1/models", headers={"origin": origin})
            for each in (preflight, answer):
                assert (each.headers.get("access-control-allow-origin") == origin) is allowed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"])
@pytest.mark.parametrize("arguments", ["no JSON", "[1]", '{"a":' * 100_000])
async def test_a_call_without_an_object_is_an_error_of_the_answer_in_every_api(
    port: int, calling: Any, path: str, stream: bool, arguments: str
) -> None:
    calling.parsed[2].tool_calls[0].arguments = arguments
    body: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    if path == "/v1/responses":
        body = {"model": "demo", "input": "x"}
    elif path == "/v1/messages":
        body["max_tokens"] = 9
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=200) as http:
        answer = await http.post(path, json={**body, "stream": stream})
    assert answer.status_code == (200 if stream else 503)
    assert "arguments of a call are no JSON object" in answer.text


ANSWERED = [
    ("post", "/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "x"}]}, 200),
    ("post", "/v1/chat/completions", {}, 400),
    ("post", "/v1/completions", {"model": "demo", "prompt": "x"}, 200),
    ("post", "/v1/responses", {"model": "demo", "input": "x"}, 200),
    ("post", "/v1/responses", {"model": "other", "input": "x"}, 404),
    (
        "post",
        "/v1/messages",
        {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
        200,
    ),
    ("post", "/v1/messages", {}, 400),
    (
        "post",
        "/v1/messages/count_tokens",
        {"model": "demo", "messages": [{"role": "user", "content": "x"}]},
        200,
    ),
    ("post", "/api/chat", {"model": "demo"}, 200),
    ("post", "/api/generate", {"model": "demo", "prompt": "x", "stream": False}, 200),
    ("post", "/api/generate", {"prompt": 1}, 400),
    ("post", "/api/show", {"model": "demo"}, 200),
    ("post", "/api/show", {"model": "other"}, 404),
    ("get", "/v1/models", None, 200),
    ("get", "/v1/models/{model}", None, 404),
    ("get", "/api/tags", None, 200),
    ("get", "/version", None, 200),
    ("get", "/ping", None, 200),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), ANSWERED)
async def test_answers_and_errors_are_as_described(
    port: int, method: str, path: str, body: Any, status: int
) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        described = (await http.get("/openapi.json")).json()
        answer = await http.request(method, path, json=body)
    response = described["paths"][path][method]["responses"]["200" if status == 200 else "4XX"]
    assert answer.status_code == status
    schema = response["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json(), {**schema, "components": described["components"]})


async def test_a_model_is_loaded_and_unloaded_through_ollamas_api(port: int, backend: Any) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        for body in ({"model": "demo", "keep_alive": "5m"}, {"model": "demo", "keep_alive": 0}):
            answer = await http.post("/api/generate", json=body)
            assert answer.status_code == 200
        assert backend.loads == [("demo", 300, ""), ("demo", 0, "")]
        assert [one["name"] for one in (await http.get("/api/ps")).json()["models"]] == ["demo"]
        loadable = inference.Model(name="big", availability=inference.MODEL_AVAILABILITY_NOT_LOADED)
        backend.models = [loadable]
        assert (await http.get("/api/ps")).json() == {"models": []}
        assert (await http.get("/health")).status_code == 200, "a request loads it"
        assert (await http.get("/v1/models/big")).json()["state"] == "not loaded"
        assert (await http.get("/v1/models/")).json() == (await http.get("/v1/models")).json()


async def test_vectors_are_written_beside_the_loop(
    port: int, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one body may be millions of numbers."""
    written, write = list[bool](), VectorRenderer.whole

    def whole(self: VectorRenderer, *given: Any) -> bytes:
        written.append(threading.current_thread() is threading.main_thread())
        return write(self, *given)

    monkeypatch.setattr(VectorRenderer, "whole", whole)
    backend.texts, backend.parsed = [""], [inference.Parsed(vector=[0.5, -1.0])]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        found = await http.post("/v1/embeddings", json={"model": "demo", "input": ["a", "b"]})
        backend.parsed = [inference.Parsed(vector=[math.nan])]
        none = await http.post("/api/embed", json={"model": "demo", "input": "a"})
    assert [one["embedding"] for one in found.json()["data"]] == [[0.5, -1.0]] * 2
    assert none.status_code == 503
    assert written == [False, False]


async def test_a_client_that_leaves_ends_its_inputs_and_begins_no_more(port: int, backend: Any) -> None:
    backend.held = asyncio.Event()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=200) as http:
        asking = asyncio.create_task(
            http.post("/v1/embeddings", json={"model": "demo", "input": ["a"] * MAX_INPUTS})
        )
        await until(lambda: len(backend.requests) == AT_ONCE)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await noticed(port, lambda: len(backend.closed) == AT_ONCE)
        backend.held.set()
        assert (await http.get("/v1/models")).status_code == 200
    assert len(backend.requests) == AT_ONCE


async def test_long_bodies_that_come_at_once_are_read_in_turns_of_the_loop() -> None:
    """The loop goes on with the streams of others between any two of them, refused ones included."""
    turn, read = 0, list[int]()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    class Noting(ScriptedBackend):
        def generate(self, request: Any, **names: Any) -> Any:
            read.append(turn)
            return super().generate(request, **names)

    app = create_app(Noting(), exposition=lambda: b"")
    counting = asyncio.create_task(count_turns())
    long = {"model": "demo", "messages": [{"role": "user", "content": "x" * LONG_BODY}]}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        bodies = [long if number % 3 else long | {"no_field": 1} for number in range(9)]
        answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for body in bodies))
    counting.cancel()
    assert [answer.status_code for answer in answers] == [400, 200, 200] * 3
    assert len(set(read)) == len(read) == 6
