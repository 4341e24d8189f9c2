"""Turns by name."""

from __future__ import annotations

import asyncio

from sealring.edge.access.turns import Turns


async def test_names_take_turns() -> None:
    """However much one of them has waiting, and however many may be at work at once."""
    for at_once in (1, 2):
        turns, order, working = Turns(at_once), list[str](), 0

        async def work(
            name: str, turns: Turns = turns, order: list[str] = order, most: int = at_once
        ) -> None:
            nonlocal working
            async with turns.turn(name):
                order.append(name)
                working += 1
                assert working <= most
                for _ in range(3):
                    await asyncio.sleep(0)
                working -= 1

        await asyncio.gather(*(work(name) for name in "aaaaaaaaabbc"))
        assert sorted(order[: 2 + at_once]) in (["a", "b", "c"], ["a", "a", "b", "c"])
        assert sorted(order) == list("aaaaaaaaabbc")
