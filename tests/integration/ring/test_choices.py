"""Several answers to one prompt on a real ring: each is what a request with its seed would bring."""

import asyncio

import openai
import pytest
from ringtest import CLUSTER, chat

from sealring.mesh.errors import InvalidInput

pytestmark = CLUSTER
QUESTION = [{"role": "user", "content": "Tell me about the planets."}]
SAMPLING = {"temperature": 1.2, "top_p": 0.95, "max_tokens": 12}


async def test_choices_are_answers_of_seeds_that_follow(client):
    async def ask(**fields):
        return await client.chat.completions.create(model="demo", messages=QUESTION, **SAMPLING, **fields)

    alone = [(await ask(seed=seed)).choices[0] for seed in (7, 8, 9)]
    together, streamed = await asyncio.gather(
        ask(seed=7, n=3), ask(seed=7, n=3, stream=True, stream_options={"include_usage": True})
    )
    assert [choice.message.content for choice in together.choices] == [
        choice.message.content for choice in alone
    ]
    assert [choice.finish_reason for choice in together.choices] == [one.finish_reason for one in alone]
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in alone}) > 1

    texts, reasons = ["", "", ""], {}
    async for chunk in streamed:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert texts == [choice.message.content for choice in alone]
    assert reasons == {index: one.finish_reason for index, one in enumerate(alone)}
    assert usage.completion_tokens == together.usage.completion_tokens

    text = await client.completions.create(model="demo", prompt="Once", n=8, seed=1, **SAMPLING)
    assert len(text.choices) == 8

    with pytest.raises(openai.BadRequestError):
        await ask(n=9)


async def test_sealed_choices_are_those_in_clear(ring, client):
    clear = await client.chat.completions.create(model="demo", messages=QUESTION, n=3, seed=5, **SAMPLING)
    prompt = chat(QUESTION[0]["content"], temperature=1.2, top_p=0.95, seed=5)
    async with ring.sealing() as sealed:
        texts = ["", "", ""]
        reply = sealed.ask(prompt, max_tokens=12, n=3)
        async for delta in reply:
            texts[delta.choice] += delta.text
        completion = reply.completion
        with pytest.raises(InvalidInput):
            sealed.ask(prompt, n=9)
    assert texts == [choice.message.content for choice in clear.choices]
    assert [choice.text for choice in completion.choices] == texts
    assert [choice.finish_reason for choice in completion.choices] == [
        choice.finish_reason for choice in clear.choices
    ]
    assert completion.usage.completion_tokens == clear.usage.completion_tokens
    assert completion.text == texts[0]
