"""One client's stream while others send prompts of 100,000 tokens: longest pauses.

The model is so small that its prefill costs next to nothing, so a pause shows what gateway and head do with
the prompt: read, validate, open, render, tokenize and name it. Each prompt is sent twice, the second time
with a few words more, when nearly all of it is a prefix that members have kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from bench.clusters import Deployment, cluster
from bench.frame import Result, Table, progress
from bench.hostile import longest_pause
from bench.models import DEMO, Shape, random_model
from bench.openai_client import Reply, ask
from bench.verdict import Check
from sealring.client import AsyncClient
from sealring.mesh.errors import SealringError

CONTEXT = 131_072
SHAPE = Shape(layers=1, hidden=16, intermediate=16, heads=1, kv_heads=1, context=CONTEXT)
TARGET = 0.1
QUICK = ("--tokens", "20000", "--only", "agent")
QUICK_SECONDS = 120.0

_TURNS = 200
_TOOLS = 40
_WAIT_SECONDS = 300.0
BEFORE_SECONDS = 2.0
"""Seconds that the stream runs before a prompt is sent."""


class Words:
    """Texts of words that the demo model's tokenizer makes one token of."""

    def __init__(self, seed: int) -> None:
        vocabulary = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
        found = (token for token in vocabulary if token[0] == "Ġ" and 3 <= len(token) <= 9)
        self._words = [" " + token[1:] for token in found if token[1:].isascii() and token[1:].isalpha()]
        self._random = random.Random(seed)

    def text(self, tokens: int) -> str:
        return "".join(self._random.choices(self._words, k=tokens))


def plain(words: Words, tokens: int) -> dict[str, Any]:
    """A body with one message."""
    return {"messages": [{"role": "user", "content": words.text(tokens)}]}


def agent(words: Words, tokens: int) -> dict[str, Any]:
    """A body as an agent's in Anthropic's form: tools, and turns of a call and its result."""
    each = tokens // (_TURNS + _TOOLS)
    properties = {f"a{number}": {"type": "string", "description": words.text(8)} for number in range(10)}
    tools = [
        {
            "name": f"tool{number}",
            "description": words.text(each // 2),
            "input_schema": {"type": "object", "properties": properties},
        }
        for number in range(_TOOLS)
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": words.text(each)}]
    for turn in range(_TURNS):
        call = {"type": "tool_use", "id": f"c{turn}", "name": f"tool{turn % _TOOLS}", "input": {"a0": "x"}}
        said = {"type": "text", "text": words.text(each // 8)}
        result = [{"type": "text", "text": words.text(each * 3 // 4)}]
        messages.append({"role": "assistant", "content": [said, call]})
        answer = {"type": "tool_result", "tool_use_id": f"c{turn}", "content": result}
        messages.append({"role": "user", "content": [answer]})
    messages.append({"role": "user", "content": words.text(each)})
    return {"tools": tools, "messages": messages}


def tokens(count: int) -> dict[str, Any]:
    """A body with a prompt of token ids."""
    return {"prompt": random.Random(count).choices(range(300, 1300), k=count)}


def longer(body: dict[str, Any]) -> dict[str, Any]:
    """A copy of a body whose prompt has some tokens more at its end."""
    if "prompt" in body:
        return body | {"prompt": [*body["prompt"], 300, 301, 302]}
    *before, last = body["messages"]
    return body | {"messages": [*before, last | {"content": f"{last['content']} of the capital"}]}


@dataclass(frozen=True)
class Sent:
    """One prompt and what came of it; times in seconds."""

    prompt: str
    again: bool
    tokens: int = 0
    cached: int = 0
    error: str = ""
    took: float = 0.0
    pause: float = 0.0


Send = Callable[[dict[str, Any], Sent], Awaitable[Sent]]


async def run(options: argparse.Namespace) -> Result:
    spec = {"max_rows": 8, "context": CONTEXT}
    wanted = Deployment("demo", random_model(SHAPE), options.stages, spec=spec)
    async with cluster([wanted]) as made, AsyncExitStack() as stack:
        pin = json.loads((made.operator_bundle / "member.json").read_text())["root_sha256"]
        client = AsyncClient(made.grpc_address, root_sha256=pin, user="long")
        stack.push_async_callback(client.close)
        kinds: dict[str, tuple[dict[str, Any], Send]] = {
            "nothing": ({"prompt": []}, _nothing),
            "chat": (plain(Words(1), options.tokens), _over_http(made.http_url, "/v1/chat/completions")),
            "messages": (plain(Words(2), options.tokens), _over_http(made.http_url, "/v1/messages")),
            "ids": (tokens(options.tokens), _over_http(made.http_url, "/v1/completions")),
            "agent": (agent(Words(3), options.tokens), _over_http(made.http_url, "/v1/messages")),
            "sealed": (plain(Words(4), options.tokens), _sealed(client)),
        }
        found = []
        for name, (body, send) in kinds.items():
            for again in (False, True):
                if not options.only or name in ("nothing", *options.only):
                    asked = longer(body) if again else body
                    found.append(await _beside(made.http_url, Sent(name, again), asked, send))
        return {"sent": [vars(one) for one in found]}


async def _beside(url: str, sent: Sent, body: dict[str, Any], send: Send) -> Sent:
    """Sends one prompt while a process of its own reads a stream."""
    progress(f"{sent.prompt}{', again' * sent.again}")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.long", url, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    await process.stdout.readline()  # the stream has begun
    begin = time.perf_counter()
    done = await send(body, sent)
    took = time.perf_counter() - begin
    await asyncio.sleep(0.5)
    end = time.perf_counter()
    process.stdin.close()
    replies = [Reply(**one) for one in json.loads(await process.stdout.read())]
    await process.wait()
    failed = next((one.error for one in replies if one.error), "")
    pause = longest_pause(replies, begin, end)
    return replace(done, took=round(took, 3), pause=round(pause, 3), error=done.error or failed)


async def _nothing(body: dict[str, Any], sent: Sent) -> Sent:
    await asyncio.sleep(3.0)
    return sent


def _over_http(url: str, path: str) -> Send:
    async def send(body: dict[str, Any], sent: Sent) -> Sent:
        whole = {"model": "demo", "max_tokens": 4, "stream": False} | body
        host, _, port = url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps(whole).encode()
        head = (
            *(f"POST {path} HTTP/1.1", f"host: {host}:{port}", "content-type: application/json"),
            *("connection: close", f"content-length: {len(data)}"),
        )
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + data)
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                answer = await reader.read()
        finally:
            writer.close()
        head_of, _, told = answer.partition(b"\r\n\r\n")
        if b" 200 " not in head_of[:16]:
            return replace(sent, error=told[:120].decode(errors="replace"))
        return _counted(sent, json.loads(told[told.index(b"{") : told.rindex(b"}") + 1])["usage"])

    return send


def _counted(sent: Sent, usage: dict[str, Any]) -> Sent:
    if "input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return replace(sent, tokens=usage["input_tokens"] + cached, cached=cached)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return replace(sent, tokens=usage["prompt_tokens"], cached=cached)


def _sealed(client: AsyncClient) -> Send:
    async def send(body: dict[str, Any], sent: Sent) -> Sent:
        try:
            reply = client.chat(body["messages"], model="demo", max_tokens=4)
            async for _ in reply:
                pass
        except SealringError as error:
            return replace(sent, error=error.reason)
        usage = reply.completion.usage
        return replace(sent, tokens=usage.prompt_tokens, cached=usage.cached_tokens)

    return send


async def _watch(url: str) -> list[Reply]:
    """Reads one stream after the other until standard input ends. Says when the first one runs."""
    replies: list[Reply] = []
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "go on"}],
        "max_tokens": CONTEXT // 2,
        "temperature": 0,
        "ignore_eos": True,
    }

    async def read() -> None:
        while True:
            replies.append(Reply(time.perf_counter()))
            await ask(url, body, into=replies[-1], seconds=2 * _WAIT_SECONDS)

    reading = asyncio.ensure_future(read())
    await asyncio.sleep(BEFORE_SECONDS)
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return replies


def tables(result: Result) -> list[Table]:
    columns = [
        "prompt",
        "again",
        "tokens",
        "of these cached",
        "error",
        "answered after, s",
        "longest pause, s",
    ]
    rows = [list(one.values()) for one in result["sent"]]
    return [Table("A stream beside long prompts", columns, rows)]


def checks(result: Result) -> list[Check]:
    sent = [one for one in result["sent"] if one["prompt"] != "nothing"]
    return [
        Check(
            "long prompts: longest pause of another's stream, s", [max(one["pause"] for one in sent)], TARGET
        ),
        Check("long prompts: refused", [sum(bool(one["error"]) for one in sent)], 0),
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=99_000, help="of each prompt, about")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="kinds of prompts")


def main() -> None:
    replies = asyncio.run(_watch(sys.argv[1]))
    sys.stdout.write(json.dumps([vars(one) for one in replies]))


if __name__ == "__main__":
    main()
