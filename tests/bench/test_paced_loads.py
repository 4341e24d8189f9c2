"""Loads of a paced cluster, at a server that answers at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from bench.openai_client import Reply
from bench.paced import loads


def test_a_reply_is_given_back_on_the_macs_own_time():
    reply = Reply(30.0, [36.0, 39.0], ended=42.0)
    found = loads.faster(reply, 3.0)
    assert (found.ttft, found.gaps, found.latency) == (2.0, [1.0], 4.0)


async def test_each_turn_of_an_agent_begins_with_the_turn_before(monkeypatch: pytest.MonkeyPatch):
    asked: list[list[dict[str, Any]]] = []

    async def ask(url: str, body: dict[str, Any], **options: Any) -> Reply:
        asked.append(body["messages"])
        return Reply(0.0, [1.0], text=f"answer {len(asked)}", ended=2.0)

    monkeypatch.setattr(loads, "ask", ask)
    replies = await loads.agents("", count=1, seed=1, slower=1.0)
    assert len(replies) == len(asked) > 2
    for number, (before, after) in enumerate(pairwise(asked), 1):
        assert after[: len(before)] == before
        assert after[len(before)] == {"role": "assistant", "content": f"answer {number}"}


async def test_open_loops_arrive_on_the_macs_own_time(monkeypatch: pytest.MonkeyPatch):
    seen: list[float] = []

    async def send(url: str, model: str, asked: Any, times: Any, at_once: int, **options: Any) -> Any:
        seen.append(times[-1])
        return [Reply(0.0, [1.0], ended=1.0)], 1.0

    monkeypatch.setattr(loads, "send", send)
    for slower in (1.0, 4.0):
        await loads.requests_of("", "chat", rate=2.0, count=8, seed=1, slower=slower)
    assert seen[1] == pytest.approx(4 * seen[0])
