"""The makers' own clients call a tool, tell its result and go on, with a real ring in clear or sealed."""

import asyncio
import json

import openai
from ringtest import CLUSTER, PROXY_KEY

pytestmark = CLUSTER
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GET = {"name": "get_weather", "description": "Get the weather"}
TOOL = {"type": "function", "function": {**GET, "parameters": CITY}}


def get_weather(city):
    assert city == "Paris"
    return "21 degrees and sunny"


async def with_chats(url):
    asked = {"model": "demo", "temperature": 0, "tools": [TOOL]}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY, max_retries=0) as client:
        said = (await client.chat.completions.create(messages=[QUESTION], **asked)).choices[0].message
        (call,) = said.tool_calls
        weather = get_weather(**json.loads(call.function.arguments))
        messages = [
            QUESTION,
            said.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": weather},
        ]
        pieces = await client.chat.completions.create(messages=messages, stream=True, **asked)
        return "".join([piece.choices[0].delta.content or "" async for piece in pieces])


async def with_responses(url):
    asked = {"model": "demo", "temperature": 0, "tools": [{"type": "function", **GET, "parameters": CITY}]}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY, max_retries=0) as client:
        (call,) = (await client.responses.create(input=[QUESTION], **asked)).output
        weather = get_weather(**json.loads(call.arguments))
        result = {"type": "function_call_output", "call_id": call.call_id, "output": weather}
        items = [QUESTION, call.model_dump(), result]
        async with client.responses.stream(input=items, **asked) as stream:
            return (await stream.get_final_response()).output_text


async def with_messages(url):
    import anthropic  # two seconds, which each process that collects this would spend

    asked = {"model": "demo", "max_tokens": 100, "tools": [{**GET, "input_schema": CITY}]}
    asked["extra_body"] = {"temperature": 0}
    async with anthropic.AsyncAnthropic(base_url=url, api_key=PROXY_KEY, max_retries=0) as client:
        said = await client.messages.create(messages=[QUESTION], **asked)
        (call,) = said.content
        result = {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**call.input)}
        said = {"role": "assistant", "content": said.content}
        messages = [QUESTION, said, {"role": "user", "content": [result]}]
        async with client.messages.stream(messages=messages, **asked) as stream:
            return (await stream.get_final_message()).content[0].text


async def with_ollama(url):
    import ollama

    asked = {"model": "demo", "options": {"temperature": 0}, "tools": [TOOL]}
    async with ollama.AsyncClient(host=url, headers={"authorization": f"Bearer {PROXY_KEY}"}) as client:
        said = (await client.chat(messages=[QUESTION], **asked)).message
        (call,) = said.tool_calls
        content = get_weather(**call.function.arguments)
        result = {"role": "tool", "tool_name": "get_weather", "content": content}
        parts = await client.chat(messages=[QUESTION, said, result], stream=True, **asked)
        return "".join([part.message.content or "" async for part in parts])


async def test_a_custom_tools_input_keeps_to_its_grammar(ring, sealed):
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: CITY "!"\nCITY: /[A-Z][a-z]+/'}
    asked = {"model": "demo", "temperature": 0, "tools": [{"type": "custom", **GET, "format": form}]}

    async def called(url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY, max_retries=0) as client:
            (call,) = (await client.responses.create(input=[QUESTION], **asked)).output
        return (call.type, call.name, call.input)

    calls = await asyncio.gather(called(ring.cluster.http_url), called(sealed))
    assert calls == [("custom_tool_call", "get_weather", "Paris!")] * 2


async def test_a_tool_is_called_and_its_result_told(ring, sealed):
    """In all APIs at once, because rows of one batch take hardly more than one row."""
    clear = ring.cluster.http_url
    asked = [(with_chats, clear), (with_responses, sealed), (with_messages, sealed), (with_ollama, clear)]
    answers = await asyncio.gather(*(converse(url) for converse, url in asked))
    assert dict(zip(asked, answers, strict=True)) == dict.fromkeys(
        asked, "It is 21 degrees and sunny in Paris."
    )
