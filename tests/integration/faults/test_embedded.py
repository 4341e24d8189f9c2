"""Inputs whose ring breaks while they are embedded."""

import asyncio

from ringtest import CLUSTER, LIMIT_SECONDS
from vectormodels import write

pytestmark = CLUSTER
INPUTS = [f"{number} rivers and {number * 7} bridges" for number in range(1000)]


async def test_inputs_go_on_in_the_next_epoch(broken, tmp_path):
    await broken.serving()
    write(tmp_path)
    await broken.cluster.deploy(name="vectors", model=str(tmp_path), stages=3)
    try:
        async with broken.openai() as client:
            before = await client.embeddings.create(model="vectors", input=INPUTS[:20])
            steps = await broken.counted("steps_total")
            asking = asyncio.create_task(client.embeddings.create(model="vectors", input=INPUTS))
            async with asyncio.timeout(LIMIT_SECONDS):
                while await broken.counted("steps_total") < steps + 5 and not asking.done():
                    await asyncio.sleep(0.01)
            assert not asking.done()
            for engine in broken.parts("node-1", "engine"):
                engine.kill()
            found = await asking
    finally:
        await broken.cluster.admin.call("DeleteDeployment", name="vectors")
    assert [one.index for one in found.data] == list(range(len(INPUTS)))
    for one, other in zip(found.data, before.data, strict=False):
        assert one.embedding == other.embedding
    assert len({tuple(one.embedding) for one in found.data}) == len(INPUTS)
    await broken.serving()
