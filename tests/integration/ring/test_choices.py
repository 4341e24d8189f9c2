"""Several answers to one prompt on a real ring: each is what a request with its seed would bring."""

import asyncio

import openai
import pytest
from ringtest import CLUSTER

from sealring.mesh.errors import InvalidInput

pytestmark = CLUSTER
ASKED = {"prompt": "The", "temperature": 2.0, "top_p": 0.99, "max_tokens": 12}
"""The model is sure of what it answers in a chat, and not of how this goes on."""


async def test_choices_are_answers_of_seeds_that_follow(client):
    async def ask(**fields):
        return await client.completions.create(model="demo", **ASKED, **fields)

    alone = [(await ask(seed=seed)).choices[0] for seed in (7, 8, 9)]
    together, streamed = await asyncio.gather(
        ask(seed=7, n=3), ask(seed=7, n=3, stream=True, stream_options={"include_usage": True})
    )
    assert [choice.text for choice in together.choices] == [choice.text for choice in alone]
    assert [choice.finish_reason for choice in together.choices] == [one.finish_reason for one in alone]
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert len({choice.text for choice in alone}) > 1

    texts, reasons = ["", "", ""], {}
    async for chunk in streamed:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert texts == [choice.text for choice in alone]
    assert reasons == {index: one.finish_reason for index, one in enumerate(alone)}
    assert usage.completion_tokens == together.usage.completion_tokens

    assert len((await ask(n=8, seed=1)).choices) == 8

    with pytest.raises(openai.BadRequestError):
        await ask(n=9)


async def test_sealed_choices_are_those_in_clear(ring, client):
    clear = await client.completions.create(model="demo", n=3, seed=5, **ASKED)
    async with ring.sealing() as sealed:
        texts = ["", "", ""]
        reply = sealed.complete(ASKED["prompt"], temperature=2.0, top_p=0.99, max_tokens=12, seed=5, n=3)
        async for delta in reply:
            texts[delta.choice] += delta.text
        completion = reply.completion
        with pytest.raises(InvalidInput):
            sealed.complete("Once", n=9)
    assert texts == [choice.text for choice in clear.choices]
    assert [choice.text for choice in completion.choices] == texts
    assert [choice.finish_reason for choice in completion.choices] == [
        choice.finish_reason for choice in clear.choices
    ]
    assert completion.usage.completion_tokens == clear.usage.completion_tokens
    assert completion.text == texts[0]
