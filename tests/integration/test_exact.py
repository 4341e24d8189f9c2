"""Greedy output of real rings is token for token that of mlx_lm on the whole model."""

import asyncio

import pytest
from ringtest import chat, serving

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180), pytest.mark.xdist_group("integration")]

QUESTIONS = [
    (["What is the capital of France?"], 40, 0.0),
    (["What is 7+8? Answer with just the number."], 10, 0.0),
    (["List the months of the year."], 60, 0.1),
    (["Hello!", "Hello! How can I help you?", "What is the symbol of gold?"], 30, 0.2),
    (["Name the planets of the solar system in order, please, beginning with the nearest."], 80, 0.3),
    (["What is the opposite of hot?"], 1, 0.35),
    (["Who are you?"], 50, 0.5),
    (["What is the capital of Kenya? " * 40], 25, 0.6),
]


@pytest.mark.parametrize(("size", "kv_bits"), [(1, 0), (2, 0), (3, 0), (1, 8), (2, 4)])
async def test_rows_that_come_and_go_get_the_tokens_of_the_whole_model(tmp_path, reference, size, kv_bits):
    async with serving(tmp_path / "state", size, prefill_chunk=64, kv_bits=kv_bits) as ring:
        assert ring.deployment.plan.spec.kv_bits == kv_bits

        async def ask(contents, max_tokens, delay):
            await asyncio.sleep(delay)
            return await ring.ask(chat(*contents), max_tokens)

        replies = await asyncio.gather(*(ask(*question) for question in QUESTIONS))
    for (contents, max_tokens, _), reply in zip(QUESTIONS, replies, strict=True):
        messages = [
            {"role": ("user", "assistant")[number % 2], "content": content}
            for number, content in enumerate(contents)
        ]
        assert reply == reference.reply(messages, max_tokens, kv_bits=kv_bits)
