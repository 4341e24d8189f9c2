"""API keys take turns in a real ring: what counts is the order in which answers are opened and begin."""

import asyncio

import pytest
from ringtest import CLUSTER, LIMIT_SECONDS, chat

from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER
LONG = 40


def long_prompt(number):
    rooms = " ".join(f"Room {room} has {room * 7 % 50} chairs." for room in range(90))
    return chat(f"{number} is a house. {rooms}", temperature=0)


@pytest.mark.parametrize(
    ("prompt", "most"),
    [
        pytest.param(
            chat("Hello!", temperature=0), 2, id="short"
        ),  # one chunk, beside one that was under way
        pytest.param(
            long_prompt(LONG), LONG // 4, id="long"
        ),  # chunks in turn, of prompts of which some is left
    ],
)
async def test_a_question_waits_for_few_of_another_keys_long_prompts(arrangements, other_key, prompt, most):
    ring = await arrangements.have(stages=2)
    await ring.idle()
    events, begun = [], asyncio.Event()

    async def ask(name, key, prompt):
        asked = inference.GenerateRequest(
            model=ring.model, envelope=inference.Envelope(clear=prompt), max_tokens=8
        )
        key = (("authorization", f"Bearer {key}"),)
        async for part in ring.stub.Generate(asked, timeout=LIMIT_SECONDS, metadata=key):
            if part.HasField("started"):
                events.append((name, "opened"))
            elif (name, "begun") not in events:
                events.append((name, "begun"))
                begun.set()

    burst = [asyncio.create_task(ask(n, ring.key, long_prompt(n))) for n in range(LONG)]
    try:
        await begun.wait()
        await ask("other", other_key, prompt)
    finally:
        for task in burst:
            task.cancel()
        await asyncio.gather(*burst, return_exceptions=True)
        await ring.idle()
    end = events.index(("other", "begun"))
    meanwhile = events[events.index(("other", "opened")) : end]
    begun_then = {name for name, what in meanwhile if what == "begun"}
    assert len(begun_then) <= most
    assert len(begun_then & {name for name, what in meanwhile if what == "opened"}) <= 1
    assert sum(what == "begun" for _, what in events[:end]) < LONG // 2
