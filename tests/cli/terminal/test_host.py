from __future__ import annotations

import asyncio

import pytest

from sealring.cli.terminal.host import Host


class PollerCompletionQueue:
    """The class of grpcio that tells a call, in whatever loop runs, how it has ended."""

    def __call__(self) -> None:
        raise RuntimeError("Event loop is closed")


@pytest.mark.parametrize("of_grpc", [True, False])
def test_nobody_is_shown_a_call_that_ends_after_its_loop(
    caplog: pytest.LogCaptureFixture, of_grpc: bool
) -> None:
    """As after a join code: the cluster is asked again in a loop of its own."""

    def fail() -> None:
        raise RuntimeError("something else")

    async def work() -> int:
        asyncio.get_running_loop().call_soon(PollerCompletionQueue() if of_grpc else fail)
        await asyncio.sleep(0)
        return 7

    assert Host().run(work()) == 7
    assert ("something else" in caplog.text, bool(caplog.text)) == (not of_grpc, not of_grpc)
