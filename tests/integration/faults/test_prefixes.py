"""What was kept of prompts goes on into the next epoch where all members still have it."""

from ringtest import CLUSTER, chat
from sharing import ask, dialogue

pytestmark = CLUSTER


async def test_what_is_kept_outlives_a_carrier_and_not_an_engine(broken):
    await broken.serving()
    messages = dialogue("What is the capital of France?")
    first = await ask(broken, messages)
    kept = (await ask(broken, messages)).cached
    assert kept >= 64
    epoch = (await broken.status()).epoch
    broken.part("node-1", "sealring.node.carrier.main").kill()
    while (await broken.serving()).epoch == epoch:
        await broken.reply(chat("Hello!"), 1)
    again = await ask(broken, messages)
    assert (again.text, again.cached) == (first.text, kept)
    await broken.cluster.kill_node("node-2")
    await broken.cluster.start_node("node-2")
    await broken.reply(chat("Hello!"), 1)
    again = await ask(broken, messages)
    assert (again.text, again.cached) == (first.text, 0)
