"""A ring that cuts its model in one place for prompts and in another for answers."""

import asyncio

from ringtest import CLUSTER, chat

pytestmark = CLUSTER
QUESTIONS = ["What is the capital of France?", "What is the opposite of hot?", "Who are you?"]
BEGINNING = "You are told many things, one after the other, and answer in few words. " * 6


async def test_answers_are_those_of_the_model_and_prompts_are_kept(arrangements, reference):
    ring = await arrangements.have(split=[2, 3, 4], prompt_split=[4, 2, 3], prefill_chunk=64, max_rows=4)
    (planned,) = ring.deployment.plan.rings
    held = [(one.first_layer, one.prompt_end_layer) for one in planned.stages]
    assert held == [(0, 4), (2, 6), (5, 9)]

    questions = [*QUESTIONS, *(BEGINNING + question for question in QUESTIONS)]
    for _ in range(2):
        replies = await asyncio.gather(*(ring.ask(chat(question), 16) for question in questions))
        assert [one.text for one in replies] == [
            reference.reply([{"role": "user", "content": question}], 16).text for question in questions
        ]
    assert await ring.counted("prefix_cache_hits_total") > 0
