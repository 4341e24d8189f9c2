"""Kept prefixes last into the next epoch if all members still have them."""

from harness import CARRIER, ENGINE
from ringtest import CLUSTER, chat
from sharing import ask, dialogue

pytestmark = CLUSTER


async def test_what_is_kept_outlives_a_carrier_and_not_an_engine(broken):
    await broken.serving()
    messages = dialogue("What is the capital of France?")
    first = await ask(broken, messages)
    kept = (await ask(broken, messages)).cached
    assert kept >= 64
    epoch, engine = (await broken.status()).epoch, broken.part("node-1", ENGINE).pid
    broken.part("node-1", CARRIER).kill()
    while (await broken.serving()).epoch == epoch:
        await broken.reply(chat("Hello!"), 1)
    again = await ask(broken, messages)
    assert (again.text, again.cached) == (first.text, kept)
    assert broken.part("node-1", ENGINE).pid == engine, "it has its weights"
    await broken.cluster.children.kill_one("node-2")
    await broken.cluster.start_one("node-2")
    await broken.reply(chat("Hello!"), 1)
    again = await ask(broken, messages)
    assert (again.text, again.cached) == (first.text, 0)
