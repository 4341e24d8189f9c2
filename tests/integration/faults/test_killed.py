"""A ring whose parts are killed: answers pause, and go on as if nothing had happened."""

import pytest
from answering import ask_all
from ringtest import CLUSTER

pytestmark = CLUSTER
ENGINE, CARRIER = "sealring.node.engine.main", "sealring.node.carrier.main"


@pytest.mark.parametrize(
    ("node", "word", "after"),
    [("node-0", ENGINE, 100), ("node-1", CARRIER, 200), ("node-2", ENGINE, 1)],
)
async def test_answers_go_on(broken, sealing, undisturbed, node, word, after):
    before = await broken.serving()
    engine = broken.part(node, ENGINE).pid

    async def kill():
        broken.part(node, word).kill()

    assert await ask_all(broken, sealing, kill, after) == undisturbed
    assert (await broken.serving()).epoch > before.epoch
    if word == CARRIER:
        assert broken.part(node, ENGINE).pid == engine, "the weights were dropped with the carrier"
