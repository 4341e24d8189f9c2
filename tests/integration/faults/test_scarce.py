"""A member without memory for a long prompt: that one fails, and says why; others are answered meanwhile."""

import asyncio

import scarce
from answering import Answer, Progress, ask_clear, ask_sealed
from ringtest import CLUSTER, built

pytestmark = CLUSTER


async def test_a_prompt_without_memory_fails_alone(place):
    """In clear and sealed, where another member than the head has none."""
    ring = place.ring
    await place.ready()
    name = place.order[1]
    answers = {each: Answer() for each in ("greedy", "drawn", "long prompt")}
    sealed = Answer()
    try:
        await place.ring.idle()
        await place.cluster.children.kill_one(name)
        with built(ring, scarce):
            await place.start(name)
        await place.ready()
        await asyncio.gather(*(ask_clear(ring, each, answer, Progress()) for each, answer in answers.items()))
        await place.ready()
        await ask_sealed(place.client, "long prompt", sealed, Progress())
        await place.ready()
    finally:
        await place.cluster.children.kill_one(name)
        await place.start(name)
        await place.ready()
    assert answers.pop("long prompt").error == sealed.error == "OUT_OF_MEMORY"
    assert answers == {name: place.expected[name] for name in answers}
    # Each ends one epoch, or two: on a busy machine a member's reason may come after the gateway tried again.
    assert len(scarce.epochs_without_memory(place.cluster.logs["coordinator"])) in (2, 3, 4)
