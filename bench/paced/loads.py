"""Loads of a paced cluster. Every moment that a client sees is given back on the Macs' own time."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time
from typing import Any

from bench.agents import run as sessions_of
from bench.clusters import family, kind
from bench.mixed import requests
from bench.openai_client import LOOK_SECONDS, Reply, ask, streams
from bench.paced.clusters import NAME, MacCluster
from bench.serve import arrivals, prompt, send
from sealring.mesh.errors import DeadlineExceeded, Unavailable

NAMES = ("static", "chat", "mixed", "long", "prompt", "agents", "drafts")

_OF_MIXED = {"chat": "sharegpt", "mixed": "mixed", "long": "long"}
_ANSWER_SECONDS = 1800.0

_SAMPLE_TOKENS = 64
"""The length of a prompt that shows how many tokens a word has."""

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


async def agents(url: str, *, slower: float, **given: Any) -> list[list[Reply]]:
    """As `bench.agents.run`."""
    sessions = await sessions_of(url, NAME, seconds=_ANSWER_SECONDS * slower, **given)
    return [[faster(reply, slower) for reply in session] for session in sessions]


async def prompt_of(url: str, tokens: int, *, slower: float) -> Reply:
    """The answer of two tokens to a prompt of about `tokens` tokens. Raises Unavailable (BENCH_FAILED)."""
    each, reply = 1.0, Reply(0.0)
    for wanted in (_SAMPLE_TOKENS, tokens):
        text = prompt(random.Random(f"{tokens} {wanted}"), max(1, round(wanted * each)))
        body: dict[str, Any] = {
            "model": NAME,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 2,
            "temperature": 0,
            "stream_options": {"include_usage": True},
        }
        reply = await ask(url, body, seconds=_ANSWER_SECONDS * slower)
        if not reply.ok or not reply.prompt_tokens:
            raise Unavailable(f"a prompt was not answered: {reply.error}", reason="BENCH_FAILED")
        each = wanted * each / reply.prompt_tokens
    return faster(reply, slower)


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
