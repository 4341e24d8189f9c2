"""The API makers' newest SDKs: `newest.py NAME MODEL URL...` uses the helpers of one with each server.

It runs in the environment that `make clients NEWEST=1` makes. A helper does more than one call does: it
parses an answer into a class, puts a stream together, or calls tools and goes on. Printed is what each helper
came to, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

KEY = os.environ["API_KEY"]
CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


class City(BaseModel):
    """The class of answers and of a call's arguments."""

    city: str


def get_weather(city: str) -> str:
    """Get the weather

    Args:
        city: its name
    """
    return "21 degrees and sunny" if city == "Paris" else "no such city"


def run_openai(url: str, model: str) -> dict[str, str]:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    asked: Any = {"model": model, "temperature": 0}
    chats, responses = client.chat.completions, client.responses
    tool: Any = openai.pydantic_function_tool(City, name="get_weather", description="Get the weather")
    called = chats.parse(messages=WEATHER, tools=[tool], **asked).choices[0].message.tool_calls or []
    arguments: Any = called[0].function.parsed_arguments
    parsed = chats.parse(messages=CAPITAL, response_format=City, **asked).choices[0].message.parsed
    with chats.stream(messages=CAPITAL, **asked) as stream:
        streamed = stream.get_final_completion().choices[0].message.content
    answered = responses.parse(input=CAPITAL, text_format=City, **asked).output_parsed
    with responses.stream(input=CAPITAL, **asked) as events:
        told = events.get_final_response().output_text
    return {
        "a call's arguments": arguments.city,
        "a chat's class": type(parsed).__name__,
        "a chat's stream": streamed or "",
        "a response's class": type(answered).__name__,
        "a response's stream": told,
    }


def run_anthropic(url: str, model: str) -> dict[str, str]:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    asked: Any = {"model": model, "max_tokens": 100, "extra_body": {"temperature": 0}}
    runner = client.beta.messages.tool_runner(
        tools=[anthropic.beta_tool(get_weather)], messages=WEATHER, **asked
    )
    last = runner.until_done()
    parsed = client.messages.parse(messages=CAPITAL, output_format=City, **asked).parsed_output
    with client.messages.stream(messages=CAPITAL, **asked) as stream:
        streamed = stream.get_final_text()
    return {
        "a runner's last answer": "".join(one.text for one in last.content if one.type == "text"),
        "a message's class": type(parsed).__name__,
        "a message's stream": streamed,
    }


def run_ollama(url: str, model: str) -> dict[str, str]:
    import ollama

    client = ollama.Client(host=url, headers={"Authorization": f"Bearer {KEY}"})
    asked: Any = {"model": model, "options": {"temperature": 0}}
    call = (client.chat(messages=WEATHER, tools=[get_weather], **asked).message.tool_calls or [])[0]
    held = client.chat(messages=CAPITAL, format=City.model_json_schema(), **asked).message.content or ""
    pieces = client.chat(messages=CAPITAL, stream=True, **asked)
    return {
        "a call of a function": get_weather(**call.function.arguments),
        "a chat's class": type(City.model_validate_json(held)).__name__,
        "a chat's stream": "".join(piece.message.content or "" for piece in pieces),
    }


RUN: Mapping[str, Callable[[str, str], dict[str, str]]] = {
    "openai": run_openai,
    "anthropic": run_anthropic,
    "ollama": run_ollama,
}

if __name__ == "__main__":
    name, model, *urls = sys.argv[1:]
    seen = [RUN[name](url, model) for url in urls]
    sys.stdout.write(f"\n{json.dumps(seen)}\n")
