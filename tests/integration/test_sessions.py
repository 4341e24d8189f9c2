"""Sessions of agents go on while a member, the gateway and the coordinator are killed one after the other.

So do those of programs that `make clients` installs (`tests/clients/test_survival.py`). Here all ways to a
ring are used at once, and every answer is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hasty
import httpx2
import openai
import pytest
import pytest_asyncio
from ringtest import CLUSTER, HASTY, LIMIT_SECONDS, PROXY_KEY, Ring, proxy, started
from scriptedmodel import Call, Scene, Step, write_scripted

from sealring.cli.local.cluster import LocalCluster
from sealring.openai import AsyncOpenAI

pytestmark = [*CLUSTER, pytest.mark.sweep, pytest.mark.timeout(8 * LIMIT_SECONDS)]
NAME = "agent"
WORDS = 600
"""The length of a program's own prompt, which has some thousand tokens."""

SCENES = 8
"""Turns of which each has other answers. Then they begin again, in a conversation that is longer."""

DOWN_SECONDS = 2.0
"""After which a killed component is started again, as launchd would."""

PARTS = ("engine", "node-0", "coordinator", "gateway")
STORY = " ".join(f"and then sheep {number} came over the hill" for number in range(1, 25))
READ = {"name": "read", "description": "Reads a file", "parameters": {"type": "object", "properties": {}}}
TOOLS: Any = [{"type": "function", "function": READ}]


def told(scene: int) -> str:
    """The long answer of a scene, to the word that the tool has found."""
    return f"Note {scene} says word-{scene}: {STORY}."


def scenes() -> list[Scene]:
    """In each turn the model calls the tool, and then tells what it has found."""
    return [
        Scene(f"Task {n}:", "read", [Step(Call("read", {"path": f"{n}.txt"})), Step(told(n), f"word-{n}")])
        for n in range(SCENES)
    ]


class Session:
    """A program's conversation with a server. An error that its client does not mend breaks it.

    One that `asks_again` does so where the server was gone, as agents do.
    """

    def __init__(self, name: str, client: Any, *, asks_again: bool) -> None:
        words = random.Random(name)
        prompt = " ".join(f"{words.choice('abcdefgh')}{words.randrange(1000)}" for _ in range(WORDS))
        self._client, self._asks_again = client, asks_again
        self._said: list[Any] = [{"role": "system", "content": f"You are {name}. {prompt}"}]
        self.turns = self.pieces = self.prompt_tokens = self.again = 0
        self._changed = asyncio.Event()

    async def hold(self, over: asyncio.Event) -> None:
        """Takes turns until it is over. Raises what breaks it."""
        while not over.is_set():
            await self._turn(self.turns % SCENES)
            self.turns += 1
            self._changed.set()

    async def until(self, *, turns: int = 0, pieces: int = 0) -> None:
        """Returns once it has ended that number of turns and received that number of pieces."""
        while self.turns < turns or self.pieces < pieces:
            self._changed.clear()
            await self._changed.wait()

    async def _turn(self, scene: int) -> None:
        self._said.append({"role": "user", "content": f"Task {scene}: read the note and tell what it says."})
        (call,) = (await self._answer())["tool_calls"]
        assert call["function"] == {"name": "read", "arguments": f'{{"path": "{scene}.txt"}}'}
        self._said.append({"role": "tool", "tool_call_id": call["id"], "content": f"word-{scene}"})
        assert (await self._answer())["content"] == told(scene)

    async def _answer(self) -> dict[str, Any]:
        while True:
            try:
                said = await self._asked()
            except (openai.APIConnectionError, httpx2.TransportError):
                if not self._asks_again:
                    raise
                self.again += 1
                await asyncio.sleep(0.5)
            else:
                self._said.append(said)
                return said

    async def _asked(self) -> dict[str, Any]:
        stream = await self._client.chat.completions.create(
            model=NAME,
            messages=self._said,
            tools=TOOLS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, calls = "", list[dict[str, Any]]()
        async for chunk in stream:
            if chunk.usage:
                self.prompt_tokens = chunk.usage.prompt_tokens
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    if call.index == len(calls):
                        function = {"name": call.function.name, "arguments": ""}
                        calls.append({"id": call.id, "type": "function", "function": function})
                    calls[call.index]["function"]["arguments"] += call.function.arguments or ""
            self.pieces += 1
            self._changed.set()
        return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ring(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ring]:
    folder = tmp_path_factory.mktemp("sessions")
    model = folder / "model"
    write_scripted(model, scenes())
    async with LocalCluster(folder / "state", model, nodes=2, name=NAME, settings=HASTY) as cluster:
        cluster.children.command = (sys.executable, hasty.__file__)
        async with started(cluster, stages=2) as ring:
            yield ring


async def kill(ring: Ring, part: str) -> None:
    if part == "engine":
        ring.part("node-1", "engine.main").kill()
        return
    await ring.cluster.children.kill_one(part)
    await asyncio.sleep(DOWN_SECONDS)
    await ring.cluster.start_one(part)


async def test_no_session_is_broken(ring: Ring, tmp_path: Path) -> None:
    """In clear, through the proxy, and by the library: each part is killed while all sessions are answered,
    and each session ends a turn before the next.

    OpenAI's own client tries a request three times within two seconds, and no more once the answer has begun.
    So a program with nothing between it and a gateway has to ask again itself where that is killed.
    """
    over = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        url, _ = await stack.enter_async_context(proxy(ring, tmp_path))
        pinned = {"root_sha256": ring.pin, "state_file": tmp_path / "roster"}
        clients = {
            "clear": openai.AsyncOpenAI(base_url=f"{ring.cluster.http_url}/v1", api_key="unused"),
            "proxied": openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY),
            "library": AsyncOpenAI(gateway=ring.cluster.grpc_address, **pinned),
        }
        for client in clients.values():
            await stack.enter_async_context(client)
        sessions = [Session(name, client, asks_again=name == "clear") for name, client in clients.items()]
        async with asyncio.TaskGroup() as group:
            for one in sessions:
                group.create_task(one.hold(over))
            for part in PARTS:
                for one in sessions:
                    await one.until(turns=one.turns + 1)
                for one in sessions:
                    await one.until(pieces=one.pieces + 5)
                assert not any(one.again for one in sessions), part
                turns = [one.turns for one in sessions]
                await kill(ring, part)
                for one, before in zip(sessions, turns, strict=True):
                    await one.until(turns=before + 1)
            over.set()
    assert min(one.prompt_tokens for one in sessions) > 2000
