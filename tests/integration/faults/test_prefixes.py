"""What was kept of prompts ends with the epoch."""

from ringtest import CLUSTER, chat
from sharing import ask, dialogue

pytestmark = CLUSTER


async def test_what_is_kept_ends_with_the_epoch(broken):
    await broken.serving()
    messages = dialogue("What is the capital of France?")
    first = await ask(broken, messages)
    assert (await ask(broken, messages)).cached >= 64
    await broken.cluster.kill_node("node-2")
    await broken.cluster.start_node("node-2")
    await broken.reply(chat("Hello!"), 1)
    again = await ask(broken, messages)
    assert (again.text, again.cached) == (first.text, 0)
