"""Tokens per second while all rows decode: what counts of answers that are all under way.

Requests for long answers are sent; the measurement begins after the second token of each and ends `seconds`
later, and the requests are then cancelled. The prefill of their prompts, one after the other, is over before
it begins.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.openai_client import LOOK_SECONDS, Reply, ask, still_coming, streams
from bench.serve import prompt

_GAPS = 3
"""The least number of gaps between pieces that a measurement has for each row, however slow rows are."""

_STRETCH = 4.0
"""Times `seconds` that a measurement takes at most for that."""


class Requests:
    """The requests of all measurements, each with a prompt of its own."""

    def __init__(self, options: argparse.Namespace, generator: random.Random | None = None) -> None:
        self._options = options
        self._generator = generator or random.Random(0)

    async def rate(self, url: str, rows: int) -> float:
        """Tokens per second of `rows` rows together. Raises Unavailable if an answer ends."""
        return (await self.rate_and_cost(url, rows, lambda: 0.0))[0]

    async def rate_and_cost(self, url: str, rows: int, spent: Callable[[], float]) -> tuple[float, float]:
        """The `rate`, and the growth of `spent` per token."""
        async with streams(url, [self._body(self._options.tokens) for _ in range(rows)]) as replies:
            begun, before = time.perf_counter(), spent()
            for _ in range(round(self._options.seconds * _STRETCH / LOOK_SECONDS)):
                fewest = min(sum(arrival > begun for arrival in one.arrivals) for one in replies)
                if time.perf_counter() >= begun + self._options.seconds and fewest > _GAPS:
                    break
                still_coming(replies)
                await asyncio.sleep(LOOK_SECONDS)
            cost = spent() - before
            tokens = sum(arrival > begun for one in replies for arrival in one.arrivals)
        await ask(url, self._body(1), path="/v1/completions")  # what was under way is over
        return steady_rate(replies, begun), cost / max(1, tokens)

    def _body(self, tokens: int) -> dict[str, Any]:
        text = prompt(self._generator, self._options.words)
        return {"model": "bench", "max_tokens": tokens, "temperature": 0, "prompt": text}


def steady_rate(replies: Sequence[Reply], begun: float) -> float:
    """Pieces per second after the moment when all had begun and up to when the first one ended, 0 if it has
    then ended.

    Each row from a piece of its own to a piece of its own, for a lane brings one for all of its rows at once
    and seconds between two.
    """
    ended = min((one.ended for one in replies if one.ended), default=float("inf"))
    rate = 0.0
    for one in replies:
        steady = [arrival for arrival in one.arrivals if begun < arrival <= ended]
        if len(steady) < 2:
            return 0.0
        rate += (len(steady) - 1) / (steady[-1] - steady[0])
    return rate
