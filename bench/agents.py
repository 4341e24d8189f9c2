"""Sessions of agents: a program's long beginning, then turns of an answer and of a tool's result.

Sizes follow what agents send: system prompt and tools of 12,000 to 30,000 tokens, which agents of one program
share, tool results of 200 to 8,000 tokens, and answers of 50 to 600. All of them are divided by a scale.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from bench.drawn import Drawn
from bench.frame import Result
from bench.openai_client import Reply, ask
from bench.serve import prompt
from bench.summaries import summary
from sealring.mesh.errors import Unavailable

PROGRAMS = (12_000, 20_000, 30_000)
"""Tokens of the system prompt and tools of each program. Agents have one in turn, the largest first."""

RESULT, ANSWER = Drawn(900, 1.0, 200, 8000), Drawn(150, 0.7, 50, 600)
"""Tokens of a tool's result, and of an answer."""

TURNS = 20
_WORDS = 200


@dataclass
class Agent:
    """A session. `replies` are of its turns until now."""

    generator: random.Random
    said: list[dict[str, str]]
    replies: list[Reply] = field(default_factory=list)


async def run(
    url: str,
    model: str,
    *,
    count: int,
    turns: int,
    scale: float,
    seed: int,
    seconds: float,
    programs: Sequence[int] = PROGRAMS,
    restart: Callable[[], Awaitable[None]] | None = None,
) -> list[list[Reply]]:
    """The replies of `count` agents at a time, of each turn. `programs` are as PROGRAMS; no two begin alike.
    `restart` is called once, between two turns in the middle. Raises Unavailable (BENCH_FAILED)."""
    each = await _words_of_a_token(url, model)

    def text(generator: random.Random, tokens: float) -> str:
        return prompt(generator, max(1, round(tokens * each / scale)))

    beginnings = [
        text(random.Random(f"program {seed} {place}"), tokens) for place, tokens in enumerate(programs)
    ]
    agents = []
    for number in range(count):
        generator = random.Random(f"agent {seed} {number}")
        beginning = beginnings[-1 - number % len(beginnings)]
        task = text(generator, RESULT.draw(generator))
        said = [{"role": "system", "content": beginning}, {"role": "user", "content": task}]
        agents.append(Agent(generator, said))

    async def take(agent: Agent, number: int) -> None:
        for _ in range(number):
            body: dict[str, Any] = {
                "model": model,
                "messages": agent.said,
                "max_tokens": max(2, round(ANSWER.draw(agent.generator) / scale)),
                "temperature": 0,
                "stream_options": {"include_usage": True},
            }
            reply = await ask(url, body, seconds=seconds)
            agent.replies.append(reply)
            result = text(agent.generator, RESULT.draw(agent.generator))
            told = [{"role": "assistant", "content": reply.text}, {"role": "user", "content": result}]
            agent.said = [*agent.said, *told]

    first = turns // 2 if restart else turns
    await asyncio.gather(*(take(agent, first) for agent in agents))
    if restart:
        await restart()
        await asyncio.gather(*(take(agent, turns - first) for agent in agents))
    return [agent.replies for agent in agents]


async def _words_of_a_token(url: str, model: str) -> float:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt(random.Random(0), _WORDS)}],
        "max_tokens": 2,
        "stream_options": {"include_usage": True},
    }
    reply = await ask(url, body)
    if not reply.prompt_tokens:
        raise Unavailable(f"an agent's first request was not answered: {reply.error}", reason="BENCH_FAILED")
    return _WORDS / reply.prompt_tokens


def figures(sessions: Sequence[Sequence[Reply]], restarted: bool) -> Result:
    """`turns`: milliseconds to the first token and new tokens of each turn. `computed_again`: the share of
    prefix tokens that were, a prefix being the whole prompt of the turn before; `after_restart` is that of
    the first turn after it, which `computed_again` leaves out."""
    turns = min(map(len, sessions))
    shares: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    by_turn = []
    for turn in range(turns):
        replies = [session[turn] for session in sessions if session[turn].ok]
        first = [1e3 * one.ttft for one in replies]
        new = [one.prompt_tokens - one.cached_tokens for one in replies]
        by_turn.append({"ttft_ms": summary(first), "new": round(mean(new)) if new else 0})
        if not turn:
            continue
        for session in sessions:
            before, now = session[turn - 1], session[turn]
            if before.ok and now.ok:
                again = max(0, before.prompt_tokens - now.cached_tokens)
                shares[restarted and turn == turns // 2].append((again, before.prompt_tokens))
    found: Result = {"turns": by_turn, "computed_again": _share(shares[False])}
    if restarted:
        found["after_restart"] = _share(shares[True])
    return found


def _share(pairs: Sequence[tuple[int, int]]) -> float:
    return round(sum(part for part, _ in pairs) / max(1, sum(whole for _, whole in pairs)), 4)


def rows(label: str, found: Result) -> list[list[object]]:
    """Rows of a table of `COLUMNS`."""
    return [
        [label, number, *(turn["ttft_ms"].get(part) for part in ("p50", "max")), turn["new"]]
        for number, turn in enumerate(found["turns"], 1)
    ]


COLUMNS = ("load", "turn", "ttft p50 ms", "ttft max ms", "new tokens")
