"""A conversation in each API, by its makers' own client: a tool is called, and its result told.

`form` is the schema of the last answer, or None."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import openai
from ringtest import HANG_SECONDS, PROXY_KEY, Ring

from sealring.v1 import inference_pb2 as inference

ASKED = "What is the weather in Paris?"
QUESTION: Any = {"role": "user", "content": ASKED}
CITY = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}
"""In the order in which Ollama's client sends its names, so that all APIs make one prompt."""

GET = {"name": "get_weather", "description": "Get the weather"}
TOOL: Any = {"type": "function", "function": {**GET, "parameters": CITY}}

TOKENS = 100
"""At most in each answer."""


def get_weather(city: str) -> str:
    assert city == "Paris"
    return "21 degrees and sunny"


def client_of(url: str) -> openai.AsyncOpenAI:
    """OpenAI's, which waits as long as it takes and asks once."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY, max_retries=0, timeout=HANG_SECONDS)


async def with_chats(url: str, model: str, form: Any) -> str:
    asked: Any = {"model": model, "temperature": 0, "max_tokens": TOKENS, "tools": [TOOL]}
    named = {"name": "answer", "schema": form, "strict": True}
    held: Any = {"response_format": {"type": "json_schema", "json_schema": named}} if form else {}
    async with client_of(url) as client:
        done = await client.chat.completions.create(messages=[QUESTION], **asked)
        said = done.choices[0].message
        (call,) = said.tool_calls
        weather = get_weather(**json.loads(call.function.arguments))
        result = {"role": "tool", "tool_call_id": call.id, "content": weather}
        messages = [QUESTION, said.model_dump(), result]
        pieces = await client.chat.completions.create(messages=messages, stream=True, **held, **asked)
        return "".join([piece.choices[0].delta.content or "" async for piece in pieces])


async def with_responses(url: str, model: str, form: Any) -> str:
    tool = {"type": "function", **GET, "parameters": CITY}
    asked: Any = {"model": model, "temperature": 0, "max_output_tokens": TOKENS, "tools": [tool]}
    named = {"type": "json_schema", "name": "answer", "schema": form, "strict": True}
    held: Any = {"text": {"format": named}} if form else {}
    async with client_of(url) as client:
        items = (await client.responses.create(input=[QUESTION], **asked)).output
        (call,) = (one for one in items if one.type == "function_call")
        weather = get_weather(**json.loads(call.arguments))
        result = {"type": "function_call_output", "call_id": call.call_id, "output": weather}
        said: Any = [QUESTION, *(one.model_dump() for one in items), result]
        async with client.responses.stream(input=said, **held, **asked) as stream:
            return (await stream.get_final_response()).output_text


async def with_messages(url: str, model: str, form: Any) -> str:
    import anthropic  # two seconds, which each process that collects this would spend

    asked: Any = {"model": model, "max_tokens": TOKENS, "tools": [{**GET, "input_schema": CITY}]}
    asked["extra_body"] = {"temperature": 0}
    held: Any = {"output_config": {"format": {"type": "json_schema", "schema": form}}} if form else {}
    made: Any = {"base_url": url, "api_key": PROXY_KEY, "max_retries": 0, "timeout": HANG_SECONDS}
    async with anthropic.AsyncAnthropic(**made) as client:
        said = await client.messages.create(messages=[QUESTION], **asked)
        (call,) = (one for one in said.content if one.type == "tool_use")
        weather = get_weather(**call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": weather}
        answered = {"role": "assistant", "content": said.content}
        messages: Any = [QUESTION, answered, {"role": "user", "content": [result]}]
        async with client.messages.stream(messages=messages, **held, **asked) as stream:
            return await stream.get_final_text()


async def with_ollama(url: str, model: str, form: Any) -> str:
    import ollama

    options = {"temperature": 0, "num_predict": TOKENS}
    asked: Any = {"model": model, "options": options, "tools": [TOOL]}
    key = {"authorization": f"Bearer {PROXY_KEY}"}
    async with ollama.AsyncClient(host=url, headers=key, timeout=HANG_SECONDS) as client:
        said: Any = (await client.chat(messages=[QUESTION], **asked)).message
        (call,) = said.tool_calls
        weather = get_weather(**call.function.arguments)
        result = {"role": "tool", "tool_name": "get_weather", "content": weather}
        parts = await client.chat(messages=[QUESTION, said, result], format=form, stream=True, **asked)
        return "".join([part.message.content or "" async for part in parts])


BY_HTTP: dict[str, Callable[[str, str, Any], Awaitable[str]]] = {
    "chats": with_chats,
    "responses": with_responses,
    "messages": with_messages,
    "ollama": with_ollama,
}


async def over_grpc(ring: Ring, form: Any = None) -> str:
    """In clear."""

    async def ask(prompt: inference.Prompt) -> tuple[str, Sequence[Any]]:
        asked = inference.GenerateRequest(
            model=ring.model, envelope=inference.Envelope(clear=prompt), max_tokens=TOKENS
        )
        text, calls = "", list[Any]()
        async for part in ring.stub.Generate(asked, timeout=HANG_SECONDS, metadata=ring.metadata()):
            text += part.delta.text
            calls += part.delta.parsed.tool_calls
        return text, calls

    return await _by_prompts(ask, form)


async def with_the_library(ring: Ring, form: Any = None) -> str:
    """Sealed."""
    async with ring.sealing(timeout=HANG_SECONDS) as client:

        async def ask(prompt: inference.Prompt) -> tuple[str, Sequence[Any]]:
            said = await client.ask(prompt, model=ring.model, max_tokens=TOKENS)
            return said.text, said.tool_calls

        return await _by_prompts(ask, form)


async def _by_prompts(
    ask: Callable[[inference.Prompt], Awaitable[tuple[str, Sequence[Any]]]], form: Any
) -> str:
    prompt = inference.Prompt(sampling=inference.Sampling(temperature=0))
    prompt.chat.tools.add(**GET, parameters=json.dumps(CITY))
    prompt.chat.messages.add(role="user", content=ASKED)
    text, (call,) = await ask(prompt)
    weather = get_weather(**json.loads(call.arguments))
    said = prompt.chat.messages.add(role="assistant", content=text)
    said.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
    prompt.chat.messages.add(role="tool", tool_call_id=call.id, content=weather)
    prompt.schema = json.dumps(form) if form else ""
    text, calls = await ask(prompt)
    assert not calls
    return text
