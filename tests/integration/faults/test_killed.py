"""A ring whose parts are killed or frozen: answers pause, and go on as if nothing had happened."""

import asyncio
import contextlib
import signal

import psutil
import pytest
from answering import ask_all
from ringtest import CLUSTER, LIMIT_SECONDS

from sealring.v1 import membership_pb2

pytestmark = CLUSTER
ENGINE, CARRIER = "sealring.node.engine.main", "sealring.node.carrier.main"


@pytest.mark.parametrize(
    ("node", "word", "after"),
    [("node-0", ENGINE, 100), ("node-1", CARRIER, 200), ("node-2", ENGINE, 1)],
)
async def test_answers_go_on_without_what_was_killed(broken, sealing, undisturbed, node, word, after):
    before = await broken.serving()
    engine = broken.part(node, ENGINE).pid

    async def kill():
        broken.part(node, word).kill()

    assert await ask_all(broken, sealing, kill, after) == undisturbed
    assert (await broken.serving()).epoch > before.epoch
    if word == CARRIER:
        assert broken.part(node, ENGINE).pid == engine, "the weights were dropped with the carrier"


async def test_answers_go_on_when_the_head_is_back_with_another_sealing_key(broken, sealing, undisturbed):
    before = await broken.serving()
    node = broken.node_of((await sealing.rings())[0].members[0].id)

    async def restart():
        await broken.cluster.kill_node(node)
        await broken.cluster.start_node(node)

    assert await ask_all(broken, sealing, restart) == undisturbed
    assert (await broken.serving()).epoch > before.epoch


@pytest.mark.parametrize(("node", "word"), [("node-0", ENGINE), ("node-2", CARRIER), ("node-1", "")])
async def test_answers_go_on_without_what_is_frozen(broken, sealing, undisturbed, node, word):
    """It is found though nobody wakes it."""
    before = await broken.serving()

    async def freeze():
        frozen = broken.part(node, word)
        frozen.send_signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                while (now := await broken.status()).epoch == before.epoch:
                    if now.phase != membership_pb2.RING_PHASE_SERVING:
                        break
                    await asyncio.sleep(0.1)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                frozen.send_signal(signal.SIGCONT)

    assert await ask_all(broken, sealing, freeze) == undisturbed
