"""Conversations of agents and frameworks: `conversations.py NAME MODEL URL...` holds one with each server.

It runs in their own environment (`make clients`), where nothing of ours is. Each is used as its
documentation says. A tool is called and its result seen, what the model said goes back as the framework
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

KEY = os.environ["API_KEY"]

QUESTION = "What is the weather in Paris?"
THANKS = {"role": "user", "content": "Thanks."}


def get_weather(city: str) -> str:
    """Get the weather"""
    return "21 degrees and sunny" if city == "Paris" else "no such city"


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather", "parameters": SCHEMA},
}


def run_litellm(url: str, model: str) -> list[str]:
    import litellm

    seen = []
    for provider, base in (("openai", f"{url}/v1"), ("anthropic", url), ("ollama_chat", url)):
        asked: dict[str, Any] = {"model": f"{provider}/{model}", "api_base": base, "api_key": KEY}
        asked |= {"temperature": 0, "tools": [TOOL]}
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        first = litellm.completion(messages=messages, **asked).choices[0].message
        call = first.tool_calls[0]
        result = get_weather(**json.loads(call.function.arguments))
        answer = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": result}
        messages += [first.model_dump(), answer]
        pieces = litellm.completion(messages=messages, stream=True, **asked)
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        messages += [litellm.completion(messages=messages, **asked).choices[0].message, THANKS]
        seen += [streamed, litellm.completion(messages=messages, **asked).choices[0].message.content]
    return seen


def run_langchain(url: str, model: str) -> list[str]:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    seen = []
    for responses in (False, True):
        chat = ChatOpenAI(
            model=model,
            base_url=f"{url}/v1",
            api_key=KEY,
            use_responses_api=responses,
            max_retries=0,
            temperature=0,
        )
        bound: Any = chat.bind_tools([get_weather])
        messages: list[Any] = [HumanMessage(QUESTION)]
        messages.append(bound.invoke(messages))
        (call,) = messages[-1].tool_calls
        messages.append(ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]))
        streamed = "".join(piece.text for piece in bound.stream(messages))
        messages += [bound.invoke(messages), HumanMessage("Thanks.")]
        seen += [streamed, bound.invoke(messages).text]
    return seen


def run_pydantic_ai(url: str, model: str) -> list[str]:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def converse(kind: Any) -> list[str]:
        provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
        agent: Any = Agent(
            kind(model, provider=provider), tools=[get_weather], model_settings={"temperature": 0.0}
        )
        first = await agent.run(QUESTION)
        async with agent.run_stream("Thanks.", message_history=first.all_messages()) as stream:
            return [first.output, await stream.get_output()]

    return [one for kind in (OpenAIChatModel, OpenAIResponsesModel) for one in asyncio.run(converse(kind))]


def run_instructor(url: str, model: str) -> list[str]:
    import instructor
    import openai
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    found = instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions.create(
        model=model, response_model=City, messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    return [found.city]


def run_llm(url: str, model: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        entry = {"model_id": "ring", "model_name": model, "api_base": f"{url}/v1", "supports_tools": True}
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([{**entry, "api_key_name": "ring"}]))
        Path(folder, "keys.json").write_text(json.dumps({"ring": KEY}))
        source = (
            'def get_weather(city: str) -> str:\n    "Get the weather"\n    return "21 degrees and sunny"\n'
        )
        command = [str(Path(sys.executable).parent / "llm"), "-m", "ring", "-o", "temperature", "0"]
        seen = []
        for options in (["--functions", source, QUESTION], ["-c", "Thanks."]):
            done = subprocess.run(
                [*command, *options],
                env={**os.environ, "LLM_USER_PATH": folder},
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            seen.append(done.stdout.strip())
        return seen


def run_openai_agents(url: str, model: str) -> list[str]:
    import openai
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)

    async def converse(kind: Any) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
            agent: Any = Agent(
                name="a",
                model=kind(model, client),
                tools=[function_tool(get_weather)],
                model_settings=ModelSettings(temperature=0),
            )
            first = await Runner.run(agent, QUESTION)
            stream = Runner.run_streamed(agent, [*first.to_input_list(), THANKS])
            async for _ in stream.stream_events():
                pass
            return [first.final_output, stream.final_output]

    kinds = (OpenAIChatCompletionsModel, OpenAIResponsesModel)
    return [one for kind in kinds for one in asyncio.run(converse(kind))]


def run_mini_swe_agent(url: str, model: str) -> list[str]:
    """The bundled model knows few words: one of them is the command that ends the work, and as it takes the
    name of bash's argument for another, the tool is made a strict one."""
    os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import BASH_TOOL, LitellmModel

    BASH_TOOL["function"]["strict"] = True
    with tempfile.TemporaryDirectory() as folder:
        command = Path(folder, "Paris")
        command.write_text("#!/bin/sh\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n")
        command.chmod(0o700)
        served = LitellmModel(
            model_name=f"openai/{model}",
            model_kwargs={"api_base": f"{url}/v1", "api_key": KEY, "temperature": 0},
        )
        agent = DefaultAgent(
            served,
            LocalEnvironment(env={"PATH": folder}),
            system_template="You fix code.",
            instance_template="{{task}}",
            step_limit=3,
        )
        return [str(agent.run("Please call bash with command Paris.").get("exit_status"))]


RUN: dict[str, Callable[[str, str], list[str]]] = {
    name.removeprefix("run_"): each for name, each in dict(globals()).items() if name.startswith("run_")
}

if __name__ == "__main__":
    name, model, *urls = sys.argv[1:]
    seen = [RUN[name](url, model) for url in urls]
    sys.stdout.write(f"\n{json.dumps(seen)}\n")
