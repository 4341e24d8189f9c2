"""A head that comes back with another sealing key."""

import asyncio

from ringtest import CLUSTER

pytestmark = CLUSTER


async def test_a_head_with_a_new_sealing_key_is_found_by_itself(broken):
    await broken.serving()
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    async with broken.sealing() as client:
        before = await client.chat(asked, max_tokens=20)
        name = broken.node_of(before.ring.members[0].id)
        await broken.cluster.kill_node(name)
        await broken.cluster.start_node(name)
        answers = await asyncio.gather(*(client.chat(asked, max_tokens=20).result() for _ in range(3)))
    assert [one.text for one in answers] == [before.text] * 3
