"""Loads of a paced cluster, at a server that answers at once."""

from __future__ import annotations

from typing import Any

import pytest

from bench.openai_client import Reply
from bench.paced import loads


def test_a_reply_is_given_back_on_the_macs_own_time():
    reply = Reply(30.0, [36.0, 39.0], ended=42.0)
    found = loads.faster(reply, 3.0)
    assert (found.ttft, found.gaps, found.latency) == (2.0, [1.0], 4.0)


async def test_open_loops_arrive_on_the_macs_own_time(monkeypatch: pytest.MonkeyPatch):
    seen: list[float] = []

    async def send(url: str, model: str, asked: Any, times: Any, at_once: int, **options: Any) -> Any:
        seen.append(times[-1])
        return [Reply(0.0, [1.0], ended=1.0)], 1.0

    monkeypatch.setattr(loads, "send", send)
    for slower in (1.0, 4.0):
        await loads.requests_of("", "chat", rate=2.0, count=8, seed=1, slower=slower)
    assert seen[1] == pytest.approx(4 * seen[0])
