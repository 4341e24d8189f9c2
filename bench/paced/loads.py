"""Loads of a paced cluster. Every moment that a client sees is given back on the Macs' own time."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time
from typing import Any

from bench.clusters import family, kind
from bench.mixed import requests
from bench.openai_client import LOOK_SECONDS, Reply, ask, streams
from bench.paced.clusters import NAME, MacCluster
from bench.serve import arrivals, prompt, send
from sealring.mesh.errors import DeadlineExceeded

NAMES = ("static", "chat", "mixed", "long", "agents")

_OF_MIXED = {"chat": "sharegpt", "mixed": "mixed", "long": "long"}
_ANSWER_SECONDS = 1800.0

_AGENT_WORDS, _TOOL_WORDS, _AGENT_TOKENS, _TURNS = 600, 80, 60, 4
"""Words of an agent's first message and of a tool's result, tokens of a turn, and turns of an agent."""

_UNDER_WAY = 4
"""Pieces of an answer that may still arrive of what was under way at a fault."""

_FAULT_ROWS, _FAULT_TOKENS, _FAULT_SECONDS = 4, 4096, 120.0


def faster(reply: Reply, slower: float) -> Reply:
    """The reply with its moments on the Macs' time."""
    return dataclasses.replace(
        reply,
        begun=reply.begun / slower,
        ended=reply.ended / slower,
        arrivals=[moment / slower for moment in reply.arrivals],
    )


async def requests_of(
    url: str, name: str, *, at_once: int = 0, rate: float = math.inf, count: int, seed: int, slower: float
) -> list[Reply]:
    """Requests of a list: `at_once` of them under way, or arriving at `rate` a second of the Macs."""
    asked = requests(_OF_MIXED.get(name, name), count, seed)
    times = arrivals(random.Random(seed), count, rate / slower, 1.0)
    replies, _ = await send(url, NAME, asked, times, at_once, seconds=_ANSWER_SECONDS * slower)
    return [faster(one, slower) for one in replies]


async def agents(url: str, *, count: int, seed: int, slower: float) -> list[Reply]:
    """Agents that each take turns: a long first message, then answers of the model and results of tools."""

    async def one(number: int) -> list[Reply]:
        generator = random.Random(f"agent {seed} {number}")
        said = [{"role": "user", "content": prompt(generator, _AGENT_WORDS)}]
        replies = []
        for _ in range(_TURNS):
            body: dict[str, Any] = {
                "model": NAME,
                "messages": said,
                "max_tokens": _AGENT_TOKENS,
                "temperature": 0,
                "stream_options": {"include_usage": True},
            }
            reply = await ask(url, body, seconds=_ANSWER_SECONDS * slower)
            replies.append(faster(reply, slower))
            result = prompt(generator, _TOOL_WORDS)
            said = [*said, {"role": "assistant", "content": reply.text}, {"role": "user", "content": result}]
        return replies

    found = await asyncio.gather(*map(one, range(count)))
    return [reply for replies in found for reply in replies]


async def fault(made: MacCluster, what: str) -> float:
    """Seconds without a token for the answer that waited longest after a process of the last node was killed.

    Seconds are this machine's: what a cluster notices a fault by is not paced. Raises DeadlineExceeded.
    """
    generator = random.Random(what)
    body = {"model": NAME, "max_tokens": _FAULT_TOKENS, "temperature": 0}
    bodies = [body | {"prompt": prompt(generator, 4)} for _ in range(_FAULT_ROWS)]
    async with streams(made.http_url, bodies) as replies:
        daemon = made.processes[made.node_names[-1]]
        (process,) = (one for one in family(daemon) if kind(one) == what)
        killed = time.perf_counter()
        process.kill()
        while not all(_resumed(one, killed) for one in replies):
            if time.perf_counter() > killed + _FAULT_SECONDS:
                raise DeadlineExceeded(f"no token came after a {what} was killed", reason="BENCH_FAILED")
            await asyncio.sleep(LOOK_SECONDS)
        return max(map(_longest_gap, replies))


def _resumed(reply: Reply, killed: float) -> bool:
    """Whether an answer goes on: more pieces came than were under way."""
    return sum(moment > killed for moment in reply.arrivals) > _UNDER_WAY


def _longest_gap(reply: Reply) -> float:
    return max(reply.gaps)
