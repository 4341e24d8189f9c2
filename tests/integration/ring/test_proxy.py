"""The proxy that seals for clients which cannot, before a real ring."""

import asyncio
import json
import sys

import httpx
import openai
import pytest
from capture import Capture, forms_of, found
from ringtest import CLUSTER, LIMIT_SECONDS, PROXY_KEY, proxy

from sealring.mesh.system.addresses import free_port

pytestmark = CLUSTER
KEY = {"authorization": f"Bearer {PROXY_KEY}"}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


async def test_the_openai_client_through_the_proxy(ring, reference, tmp_path):
    port = int(ring.cluster.grpc_address.rsplit(":", 1)[1])
    mark = "lambent ocelot trellis 40417 brocade"
    marking = [{"role": "user", "content": f"Please repeat: {mark}"}]
    prompt = forms_of(mark, reference.tokenizer)
    expected = reference.reply(MESSAGES, 100)
    async with proxy(ring, tmp_path) as (url, _):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY, max_retries=0)
        stream = await client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            temperature=0,
            max_tokens=100,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        with Capture() as capture:
            marked = await client.chat.completions.create(
                model="demo", messages=marking, temperature=0, max_tokens=30
            )
            await capture.caught_up()
        models = await client.models.list()
        text = await client.completions.create(model="demo", prompt="The capital of", max_tokens=4)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            await client.chat.completions.create(
                model="demo", messages=MESSAGES, extra_body={"min_trust": 20}
            )
        async with httpx.AsyncClient(base_url=url, headers=KEY, timeout=LIMIT_SECONDS) as http:
            health, metrics = await http.get("/health"), (await http.get("/metrics")).text
            stranger = await http.get("/v1/models", headers={"authorization": "Bearer none"})
        await client.close()
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == expected.text
    assert len(pieces) > 3
    assert chunks[-1].usage.prompt_tokens == expected.prompt_tokens
    assert chunks[-1].usage.completion_tokens == expected.completion_tokens
    assert marked.choices[0].message.content
    assert refused.value.code == "trust_below_floor"
    assert [model.id for model in models.data] == ["demo"]
    assert text.usage.completion_tokens <= 4
    assert (health.status_code, stranger.status_code) == (200, 401)
    assert f'sealring_prompt_tokens_total{{model_name="demo"}} {expected.prompt_tokens}' not in metrics
    assert 'model_name="demo"' in metrics
    assert 'model_name="other"' in metrics
    beyond = [bytes(data) for ports, data in capture.streams.items() if port in ports]
    assert sum(map(len, beyond)) > 1000
    assert {name for data in beyond for name in found(data, prompt)} == set()
    assert any("utf-8" in found(bytes(data), prompt) for data in capture.streams.values())


async def test_a_proxy_with_the_wrong_root_does_not_start(ring, tmp_path):
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "sealring.cli",
            "proxy",
            "--gateway",
            ring.cluster.grpc_address,
            "--root-sha256",
            "ab" * 32,
        ),
        *("--listen", f"127.0.0.1:{free_port()}", "--state-file", str(tmp_path / "roster-state")),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(LIMIT_SECONDS):
        _, said = await process.communicate()
    assert process.returncode not in (0, None)
    assert b"ROOT_PIN" in said


async def test_every_api_answers_alike_in_clear_and_sealed(ring, sealed, reference):
    """With the tools that Open WebUI sends each time; and so do calls of tools and answers by a schema."""
    expected = reference.reply(MESSAGES, 100)
    function = {"name": "look", "description": "looks", "parameters": {"type": "object"}}
    same = {"model": "demo", "messages": MESSAGES, "temperature": 0}
    tools = [{"type": "function", "function": function}]
    asked = {
        "/v1/chat/completions": {**same, "tools": tools, "max_tokens": 100},
        "/v1/responses": {
            "model": "demo",
            "input": MESSAGES,
            "temperature": 0,
            "tools": [{"type": "function", **function}],
        },
        "/v1/messages": {
            **same,
            "max_tokens": 100,
            "tools": [{"name": "look", "description": "looks", "input_schema": {"type": "object"}}],
        },
        "/api/chat": {
            **same,
            "temperature": None,
            "options": {"temperature": 0},
            "tools": tools,
            "stream": False,
        },
    }
    counting = {name: asked["/v1/messages"][name] for name in ("model", "messages", "tools")}
    ending = {**asked["/v1/messages"], "stop_sequences": [expected.text[4:8]]}
    bodies = (CALLING, {**CALLING, "tool_choice": "required"}, FITTING, IMPOSSIBLE)
    wanted = [
        *asked.items(),
        ("/v1/messages/count_tokens", counting),
        ("/v1/messages", ending),
        *(("/v1/chat/completions", body) for body in bodies),
    ]
    found, counts, held, stopped = {}, [], [], []
    async with httpx.AsyncClient(headers=KEY, timeout=LIMIT_SECONDS) as http:
        # At once, because rows of one batch take hardly more than one row.
        urls = (ring.cluster.http_url, sealed)
        calls = [http.post(f"{url}{path}", json=body) for url in urls for path, body in wanted]
        bodies = [answer.json() for answer in await asyncio.gather(*calls)]
        listed = [(await http.get(f"{url}/api/tags")).json()["models"][0] for url in urls]
    for one in listed:
        details = one["details"]
        assert (details["parameter_size"], details["quantization_level"]) == SIZE_AND_LEVEL
    for url, answers in zip(urls, (bodies[: len(wanted)], bodies[len(wanted) :]), strict=True):
        found |= {(url, path): answer for path, answer in zip(asked, answers, strict=False)}
        counts.append(answers[len(asked)])
        stopped.append(answers[len(asked) + 1])
        held.append(answers[len(asked) + 2 :])
    for (url, path), answer in found.items():
        text = {
            "/v1/chat/completions": lambda a: a["choices"][0]["message"]["content"],
            "/v1/responses": lambda a: a["output"][0]["content"][0]["text"],
            "/v1/messages": lambda a: a["content"][0]["text"],
            "/api/chat": lambda a: a["message"]["content"],
        }[path]
        assert text(answer) == expected.text, (url, path)
    chat = found[sealed, "/v1/chat/completions"]
    assert counts == [{"input_tokens": chat["usage"]["prompt_tokens"]}] * 2
    for answer in stopped:
        assert answer["content"][0]["text"] == expected.text[:4]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", expected.text[4:8])
    for *calls, fitting, impossible in held:
        for answer in calls:
            (choice,) = answer["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "tool_calls"
            assert call["function"]["name"] == "get_weather"
            assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        (choice,) = fitting["choices"]
        assert json.loads(choice["message"]["content"]) == {"country": "France", "capital": "Paris"}
        assert choice["finish_reason"] == "stop"
        assert impossible["error"]["code"] == "bad_grammar"


SIZE_AND_LEVEL = ("2.12M", "int4")
"""The demo model's."""

_STRING = {"type": "string"}
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather",
    "parameters": {
        "type": "object",
        "properties": {"city": _STRING},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALLING = {
    "model": "demo",
    "temperature": 0,
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [{"type": "function", "function": WEATHER}],
    "max_tokens": 100,
}
PLACE = {
    "type": "object",
    "properties": {"country": _STRING, "capital": _STRING},
    "required": ["country", "capital"],
    "additionalProperties": False,
}
FITTING = {
    **{name: CALLING[name] for name in ("model", "temperature", "max_tokens")},
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}},
}
IMPOSSIBLE = {
    **FITTING,
    "response_format": {"type": "json_schema", "json_schema": {"name": "no", "schema": {"not": _STRING}}},
}
