"""What Ollama's own client makes of `/api`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from sealring.mesh.errors import EpochEnded
from sealring.v1 import inference_pb2 as inference

ollama = pytest.importorskip("ollama")

MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture
async def client(port: int) -> AsyncIterator[Any]:
    async with ollama.AsyncClient(host=f"http://127.0.0.1:{port}") as made:
        yield made


async def test_chats_and_prompts_whole_and_streamed(client: Any, backend: Any) -> None:
    options = {"num_predict": 7, "num_ctx": 4096, "temperature": 0.5, "stop": ["\n"]}
    whole = await client.chat(model="demo:latest", messages=MESSAGES, options=options)
    assert (whole.message.content, whole.done, whole.done_reason) == ("Hello – ☃", True, "stop")
    assert (whole.prompt_eval_count, whole.eval_count) == (5, 3)
    pieces = [piece async for piece in await client.chat(model="demo", messages=MESSAGES, stream=True)]
    assert "".join(piece.message.content or "" for piece in pieces) == "Hello – ☃"
    assert [piece.done for piece in pieces] == [False, False, False, True]
    for last in (whole, pieces[-1]):
        assert last.total_duration == last.prompt_eval_duration + last.eval_duration > 0
    made = await client.generate(model="demo", prompt="once", system="s", think=False)
    assert made.response == "Hello – ☃"
    first, _, third = (request.envelope.clear for request in backend.requests)
    assert (backend.requests[0].max_tokens, first.sampling.temperature, list(first.stop)) == (7, 0.5, ["\n"])
    assert [one.role for one in third.chat.messages] == ["system", "user"]
    assert third.chat.template_arguments == '{"enable_thinking": false}'


async def test_thinking_and_tools_go_there_and_back(client: Any, calling: Any) -> None:
    answer = await client.chat(model="demo", messages=MESSAGES, tools=TOOLS)
    assert (answer.message.thinking, answer.message.content) == ("hm", "Let me see.")
    called = [(call.function.name, dict(call.function.arguments)) for call in answer.message.tool_calls]
    assert called == [("look", {"at": 1}), ("look", {})]
    result = {"role": "tool", "tool_name": "look", "content": "ok"}
    await client.chat(model="demo", messages=[*MESSAGES, answer.message, result], tools=TOOLS)
    chat = calling.requests[-1].envelope.clear.chat
    assert [(one.role, one.reasoning, one.name) for one in chat.messages] == [
        ("user", "", ""),
        ("assistant", "hm", ""),
        ("tool", "", "look"),
    ]


async def test_what_is_served_is_told(client: Any, port: int) -> None:
    assert [model.model for model in (await client.list()).models] == ["demo"]
    assert [model.model for model in (await client.ps()).models] == ["demo"]
    shown = await client.show("demo")
    assert shown.capabilities == ["completion", "tools"]  # the model's own: it does not think
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        assert "version" in (await http.get("/api/version")).json()
        assert (await http.head("/")).status_code == 200


async def test_loaded_models_have_all_that_the_client_shows_of_one(client: Any, backend: Any) -> None:
    backend.models = [
        inference.Model(
            name="demo",
            model_type="llama",
            context=256,
            availability=inference.MODEL_AVAILABILITY_LOADED,
            expires=1_800_000_000,
            memory=9,
            digest="ab" * 32,
            aliases=["llama3.2:3b"],
            card={"parameters": 3_212_749_888, "precision": "int4"},
        )
    ]
    (running,) = (await client.ps()).models
    assert running.expires_at == datetime.fromtimestamp(1_800_000_000, UTC)
    assert (running.name, running.size, running.size_vram, running.context_length) == ("demo", 9, 9, 256)
    listed = (await client.list()).models
    assert [(one.model, one.digest[:12]) for one in listed] == [("demo", "ab" * 6), ("llama3.2:3b", "ab" * 6)]
    shown = await client.show("demo")
    assert shown.modelinfo["general.parameter_count"] == 3_212_749_888
    for one in (running, *listed, shown):
        details = (one.details.family, one.details.parameter_size, one.details.quantization_level)
        assert details == ("llama", "3.21B", "int4")


async def test_a_model_of_an_older_node_has_no_size_and_no_level(client: Any, port: int) -> None:
    details = (await client.show("demo")).details
    assert (details.parameter_size, details.quantization_level) == ("", "")


async def test_errors_have_ollamas_form(client: Any, backend: Any) -> None:
    with pytest.raises(ollama.ResponseError, match=r"options\.mirostat is not supported") as caught:
        await client.chat(model="demo", messages=MESSAGES, options={"mirostat": 1})
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="no model"):
        await client.show("other")
    backend.error, backend.error_after = EpochEnded("lost"), 1
    with pytest.raises(ollama.ResponseError, match="lost"):
        async for _ in await client.chat(model="demo", messages=MESSAGES, stream=True):
            pass


async def test_images_of_the_package_are_shown(client: Any, backend: Any, tmp_path: Path) -> None:
    file = tmp_path / "dot.png"
    file.write_bytes(b"picture")
    await client.chat(model="demo", messages=[{"role": "user", "content": "see", "images": [str(file)]}])
    await client.generate(model="demo", prompt="see", images=[file.read_bytes()])
    for request in backend.requests:
        (said,) = request.envelope.clear.chat.messages
        assert (said.content, said.images) == ("see", [inference.Image(data=b"picture")])


NOTHING: list[dict[str, Any]] = [
    {"raw": False, "template": "", "suffix": "", "context": [], "images": []},
    {"logprobs": False, "top_logprobs": 0, "truncate": True, "shift": True, "keep_alive": "5m"},
    {"options": {"mirostat": 0, "mirostat_tau": 5.0, "tfs_z": 1, "typical_p": 1.0, "num_predict": -1}},
    {"options": {"num_ctx": 8192, "num_keep": 24, "num_batch": 512, "penalize_newline": True}},
]


@pytest.mark.parametrize("change", NOTHING, ids=lambda change: str(change)[:40])
async def test_what_asks_for_nothing_changes_nothing(port: int, backend: Any, change: dict[str, Any]) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        for more in ({}, change):
            body = {"model": "demo", "prompt": "hello", "stream": False, **more}
            assert (await http.post("/api/generate", json=body)).status_code == 200
    first, second = (request.envelope for request in backend.requests)
    assert first == second


async def test_a_penalty_looks_at_all_that_there_is_or_is_off(client: Any, backend: Any) -> None:
    for last in (-1, 0):
        options = {"repeat_penalty": 1.5, "repeat_last_n": last}
        await client.generate(model="demo", prompt="hello", options=options)
    wide, off = (request.envelope.clear.sampling for request in backend.requests)
    assert (wide.repetition_penalty, wide.repetition_context_size) == (1.5, 4096)
    assert off.repetition_penalty == 1  # named, so that the model does not choose


async def test_a_model_is_loaded_without_being_asked(client: Any, backend: Any) -> None:
    chat = await client.chat(model="demo:latest", messages=[])
    made = await client.generate(model="demo")
    gone = await client.generate(model="demo", keep_alive=0)
    assert [one.done_reason for one in (chat, made, gone)] == ["load", "load", "unload"]
    assert (chat.message.content, made.response, backend.requests) == ("", "", [])
    pieces = [piece async for piece in await client.generate(model="demo", stream=True, keep_alive="-1m")]
    assert [(one.done, one.done_reason) for one in pieces] == [(True, "load")]
    assert backend.loads == [("demo", alive, "") for alive in (None, None, 0, -1)]
    with pytest.raises(ollama.ResponseError, match="no model") as caught:
        await client.generate(model="other")
    assert caught.value.status_code == 404


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"options": {"num_predict": 0}}, "options.num_predict is"),
        ({"options": {"repeat_penalty": 11}}, "options.repeat_penalty is"),
        ({"options": {"surprise": 1}}, "unknown field 'options.surprise'"),
        ({"raw": True}, "raw is"),
        ({"prompt": 7}, "prompt is"),
        ({"format": 7}, "format is"),
    ],
)
async def test_what_is_refused_has_the_clients_name(port: int, change: dict[str, Any], param: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        answer = await http.post("/api/generate", json={"model": "demo", "prompt": "hello", **change})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(param)


async def test_a_whole_answer_has_the_times_of_its_first_piece_and_its_end(client: Any, backend: Any) -> None:
    backend.pause = 0.05
    whole = await client.generate(model="demo", prompt="hello")
    assert 0 < whole.prompt_eval_duration < whole.total_duration
    assert whole.eval_duration == whole.total_duration - whole.prompt_eval_duration


@pytest.mark.parametrize("stream", [False, True])
async def test_the_time_that_a_load_took_is_apart_from_the_prompts(
    client: Any, backend: Any, stream: bool
) -> None:
    """The load of this one began before the request did."""
    backend.load_ms = 3_600_000
    asked = await client.generate(model="demo", prompt="hello", stream=stream)
    last = [piece async for piece in asked][-1] if stream else asked
    assert 0 < last.load_duration <= last.total_duration
    assert last.total_duration == last.load_duration + last.prompt_eval_duration + last.eval_duration
