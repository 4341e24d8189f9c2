"""Conversations of agents and frameworks: `conversations.py NAME URL MODEL tools|plain` holds one.

It runs in their own environment (`make clients`), where nothing of ours is. Each is used as its
documentation says. A tool is called and its result told, what the model said goes back as the framework
itself passes it, and one answer is streamed. Printed is what each step came to, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUESTION = "What is the weather in Paris?"
RESULT = "21 degrees in Paris"


def get_weather(city: str) -> str:
    """Get the weather"""
    return f"21 degrees in {city}"


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather", "parameters": SCHEMA},
}


def run_litellm(url: str, model: str, tools: bool) -> list[str]:
    import litellm

    told = []
    for provider, base in (("openai", f"{url}/v1"), ("anthropic", url), ("ollama_chat", url)):
        asked: dict[str, Any] = {"model": f"{provider}/{model}", "api_base": base, "api_key": "none"}
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        if tools:
            first = litellm.completion(messages=messages, tools=[TOOL], **asked).choices[0].message
            call = first.tool_calls[0]
            result = get_weather(**json.loads(call.function.arguments))
            answer = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": result}
            messages += [first.model_dump(), answer]
            asked["tools"] = [TOOL]
        pieces = litellm.completion(messages=messages, stream=True, **asked)
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        messages.append(litellm.completion(messages=messages, **asked).choices[0].message)
        messages.append({"role": "user", "content": "Thanks."})
        asked.pop("tools", None)
        last = litellm.completion(messages=messages, **asked).choices[0].message.content
        told += [streamed, last]
    return told


def run_langchain(url: str, model: str, tools: bool) -> list[str]:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    told = []
    for responses in (False, True):
        chat = ChatOpenAI(
            model=model, base_url=f"{url}/v1", api_key="none", use_responses_api=responses, max_retries=0
        )
        bound: Any = chat.bind_tools([get_weather]) if tools else chat
        messages: list[Any] = [HumanMessage(QUESTION)]
        if tools:
            messages.append(bound.invoke(messages))
            (call,) = messages[-1].tool_calls
            messages.append(ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]))
        streamed = "".join(piece.text for piece in bound.stream(messages))
        messages += [bound.invoke(messages), HumanMessage("Thanks.")]
        told += [streamed, chat.invoke(messages).text]
    return told


def run_pydantic_ai(url: str, model: str, tools: bool) -> list[str]:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def converse(kind: Any) -> list[str]:
        provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
        agent = Agent(kind(model, provider=provider), tools=[get_weather] if tools else [])
        first = await agent.run(QUESTION)
        async with agent.run_stream("Again?", message_history=first.all_messages()) as stream:
            streamed = await stream.get_output()
        plain = Agent(kind(model, provider=provider))
        last = await plain.run("Thanks.", message_history=stream.all_messages())
        return [first.output, streamed, last.output]

    return [one for kind in (OpenAIChatModel, OpenAIResponsesModel) for one in asyncio.run(converse(kind))]


def run_instructor(url: str, model: str, tools: bool) -> list[str]:
    import instructor
    import openai
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    if not tools:
        answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": QUESTION}])
        return [answer.choices[0].message.content or ""]
    found = instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions.create(
        model=model, response_model=City, messages=[{"role": "user", "content": QUESTION}]
    )
    return [f"{RESULT}" if found.city == "Paris" else found.city]


def run_llm(url: str, model: str, tools: bool) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        entry = {"model_id": "ring", "model_name": model, "api_base": f"{url}/v1", "supports_tools": True}
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([{**entry, "api_key_name": "ring"}]))
        Path(folder, "keys.json").write_text('{"ring": "none"}')
        source = (
            'def get_weather(city: str) -> str:\n    "Get the weather"\n    return "21 degrees in " + city\n'
        )
        functions = ["--functions", source] if tools else []
        command = [str(Path(sys.executable).parent / "llm"), "-m", "ring"]
        told = []
        for options in ([*functions, QUESTION], ["-c", "Thanks."], ["--no-stream", QUESTION]):
            done = subprocess.run(
                [*command, *options],
                env={**os.environ, "LLM_USER_PATH": folder},
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            told.append(done.stdout.strip())
        return told


def run_openai_agents(url: str, model: str, tools: bool) -> list[str]:
    import openai
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)

    async def converse(kind: Any) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            served = kind(model, client)
            given = [function_tool(get_weather)] if tools else []
            agent: Any = Agent(name="a", instructions="Be short.", model=served, tools=given)
            first = await Runner.run(agent, QUESTION)
            stream = Runner.run_streamed(agent, [*first.to_input_list(), {"role": "user", "content": "?"}])
            async for _ in stream.stream_events():
                pass
            plain: Any = Agent(name="b", model=served)
            last = await Runner.run(plain, [*stream.to_input_list(), {"role": "user", "content": "Thanks."}])
            return [first.final_output, stream.final_output, last.final_output]

    kinds = (OpenAIChatCompletionsModel, OpenAIResponsesModel)
    return [one for kind in kinds for one in asyncio.run(converse(kind))]


def run_mini_swe_agent(url: str, model: str, tools: bool) -> list[str]:
    os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    served = LitellmModel(
        model_name=f"openai/{model}", model_kwargs={"api_base": f"{url}/v1", "api_key": "none"}
    )
    agent = DefaultAgent(
        served,
        LocalEnvironment(),
        system_template="You fix code.",
        instance_template="{{task}}",
        step_limit=3,
    )
    return [str(agent.run(QUESTION).get("exit_status"))]


RUN: dict[str, Callable[[str, str, bool], list[str]]] = {
    name.removeprefix("run_"): each for name, each in dict(globals()).items() if name.startswith("run_")
}

if __name__ == "__main__":
    name, url, model, tools = sys.argv[1:]
    told = RUN[name](url, model, tools == "tools")
    sys.stdout.write(f"\n{json.dumps(told)}\n")
