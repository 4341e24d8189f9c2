"""API keys take turns in a real ring: what counts is the order in which answers are opened and begin."""

import asyncio

from ringtest import CLUSTER, LIMIT_SECONDS, chat

from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER
LONG = 40
CHUNK = 64


def long_prompt(number):
    """One of several chunks."""
    rooms = " ".join(f"Room {room} has {room * 7 % 50} chairs." for room in range(20))
    return chat(f"{number} is a house. {rooms}", temperature=0)


async def test_a_question_waits_for_few_of_another_keys_long_prompts(arrangements, other_key):
    ring = await arrangements.have(stages=2, prefill_chunk=CHUNK)
    await ring.idle()
    events, sizes, begun = [], {}, asyncio.Event()

    async def ask(name, key, prompt):
        asked = inference.GenerateRequest(
            model=ring.model, envelope=inference.Envelope(clear=prompt), max_tokens=8
        )
        key = (("authorization", f"Bearer {key}"),)
        async for part in ring.stub.Generate(asked, timeout=LIMIT_SECONDS, metadata=key):
            if part.HasField("started"):
                sizes[name] = part.started.prompt_tokens
                events.append((name, "opened"))
            elif (name, "begun") not in events:
                events.append((name, "begun"))
                begun.set()

    burst = [asyncio.create_task(ask(n, ring.key, long_prompt(n))) for n in range(LONG)]
    try:
        await begun.wait()
        await ask("short", other_key, chat("Hello!", temperature=0))
        await ask("long", other_key, long_prompt(LONG))
    finally:
        for task in burst:
            task.cancel()
        await asyncio.gather(*burst, return_exceptions=True)
        await ring.idle()
    assert sizes["short"] < CHUNK < 3 * CHUNK < sizes["long"]
    waits = {
        "short": 2,  # one chunk, beside one that was under way
        "long": LONG // 4,  # chunks in turn, of prompts of which some is left
    }
    for name, most in waits.items():
        end = events.index((name, "begun"))
        meanwhile = events[events.index((name, "opened")) : end]
        begun_then = {one for one, what in meanwhile if what == "begun"}
        assert len(begun_then) <= most
        assert len(begun_then & {one for one, what in meanwhile if what == "opened"}) <= 1
        assert sum(what == "begun" for _, what in events[:end]) < LONG // 2
