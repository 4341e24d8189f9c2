"""A ring whose parts are killed forms a new epoch and serves again."""

import pytest
from ringtest import CLUSTER, chat

pytestmark = CLUSTER
QUESTION = "What is the capital of France?"


@pytest.mark.parametrize("word", ["sealring.node.carrier.main", "sealring.node.engine.main"])
async def test_the_ring_serves_again(broken, word):
    await broken.serving()
    before = await broken.reply(chat(QUESTION), 20)
    engine = broken.part("node-1", "sealring.node.engine.main").pid
    broken.part("node-1", word).kill()
    assert await broken.reply(chat(QUESTION), 20) == before
    if word == "sealring.node.carrier.main":
        now = broken.part("node-1", "sealring.node.engine.main").pid
        assert now == engine, "the weights were dropped with the carrier"
