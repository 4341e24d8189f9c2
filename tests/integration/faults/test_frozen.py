"""Parts of a serving ring that stop without a word."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import psutil
import pytest
from ringtest import CLUSTER, LIMIT_SECONDS, Ring, chat

from sealring.v1 import membership_pb2

pytestmark = CLUSTER
QUESTION = "What is the capital of France?"


@pytest.mark.parametrize("node", ["node-0", "node-2"])
@pytest.mark.parametrize("word", ["sealring.node.carrier.main", "sealring.node.engine.main", ""])
async def test_what_is_frozen_is_found(broken: Ring, word: str, node: str) -> None:
    """While a request is under way: its epoch ends, though nobody wakes what is frozen."""
    before = await broken.serving()
    expected = await broken.reply(chat(QUESTION), 40)
    frozen = broken.part(node, word)
    frozen.send_signal(signal.SIGSTOP)
    try:
        answer = asyncio.create_task(broken.reply(chat(QUESTION), 40))
        async with asyncio.timeout(LIMIT_SECONDS):
            while (now := await broken.status()).epoch == before.epoch:
                if now.phase != membership_pb2.RING_PHASE_SERVING:
                    break
                await asyncio.sleep(0.1)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            frozen.send_signal(signal.SIGCONT)
    assert await answer == expected
