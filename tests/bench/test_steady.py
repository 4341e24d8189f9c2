"""What counts of the answers while all rows decode."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from bench import openai_client, steady
from bench.openai_client import Reply
from sealring.mesh.errors import Unavailable


def reply(*arrivals: float, ended: float = 0.0) -> Reply:
    return Reply(0.0, list(arrivals), ended=ended)


def test_each_row_counts_from_piece_to_piece_after_all_have_begun() -> None:
    early = reply(0.5, 1.0, 2.5, 3.0, 3.5)  # 2 gaps in a second
    late = reply(2.0, 2.1, 4.1)  # 1 gap in two seconds
    assert steady.steady_rate([early, late], 2.0) == pytest.approx(2.0 + 0.5)


def test_nothing_counts_after_the_first_answer_has_ended() -> None:
    ends = reply(1.0, 2.0, 3.0, ended=3.0)
    goes_on = reply(1.0, 2.0, 3.0, 3.1, 3.2, 3.3)
    assert steady.steady_rate([ends, goes_on], 0.5) == pytest.approx(2.0)
    assert steady.steady_rate([ends, goes_on], 2.5) == 0.0


OPTIONS = argparse.Namespace(seconds=0.2, tokens=100_000, words=2)


async def test_an_answer_that_breaks_off_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str, body: dict[str, Any], *, path: str, into: Reply, seconds: float) -> Reply:
        into.error, into.ended = "timeout", 1.0
        return into

    monkeypatch.setattr(openai_client, "ask", ask)
    with pytest.raises(Unavailable, match="timeout"):
        await steady.Requests(OPTIONS).rate("", 2)
