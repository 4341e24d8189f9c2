"""What a daemon asks of its carrier and engine ends when it is cancelled, and when its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mesh.errors import DeadlineExceeded
from node import daemon_carrier
from node.daemon_engine import Engine

Asked = Callable[[Any, float, str], Awaitable[Any]]


def of_engine(future: Any, seconds: float, what: str) -> Awaitable[Any]:
    return Engine._within(None, future, seconds, what)  # type: ignore[arg-type]


@pytest.mark.parametrize(("within", "turns"), [(daemon_carrier._within, 1), (of_engine, 0)])
async def test_a_cancellation_that_comes_with_the_answer_is_not_lost(within: Asked, turns: int) -> None:
    """The answer is there, and after so many turns of the loop whoever asked has not seen it yet."""
    answer = asyncio.get_running_loop().create_future()
    asking = asyncio.ensure_future(within(answer, 200.0, "a question"))
    await asyncio.sleep(0)
    answer.set_result("yes")
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("within", [daemon_carrier._within, of_engine])
async def test_an_answer_that_does_not_come_is_named(within: Asked) -> None:
    with pytest.raises(DeadlineExceeded, match="a question took longer than 0 s"):
        await within(asyncio.get_running_loop().create_future(), 0.0, "a question")
