"""A ring that cuts its model in one place for prompts and in another for answers."""

import asyncio

from capture import paths_in
from patience import until
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


async def test_answers_go_on_after_a_kill_and_prompts_are_read_from_disk(arrangements, reference):
    ring = await arrangements.have(split=[2, 3, 4], prompt_split=[4, 2, 3], prefill_chunk=64, max_rows=4)
    nodes = [ring.node_of(stage.member) for stage in ring.deployment.plan.rings[0].stages]
    folders = [ring.cluster.state_dir / node / "prefixes" for node in nodes]

    def stored():
        return [sum(path.suffix == ".block" for path in paths_in(folder)) for folder in folders]

    before = stored()
    said = [
        2 * BEGINNING + "Name three rivers.",
        "I cannot.",
        "Go on.",
    ]  # a conversation, which is stored at once
    asked = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant", "user"), said, strict=True)
    ]
    wanted = reference.reply(asked, 64)
    assert (await ring.reply(chat(*said), 64)).text == wanted.text
    await until(lambda: all(now > had for now, had in zip(stored(), before, strict=True)), pause=0.1)
    read = await ring.counted("prefix_cache_disk_tokens_total")
    for node in nodes:  # each has layers of another kind: for prompts, for both, for answers
        replies = [asyncio.ensure_future(ring.reply(chat(*said), 64)) for _ in range(2)]
        await asyncio.sleep(0)
        ring.part(node, "engine.main").kill()
        assert [one.text for one in await asyncio.gather(*replies)] == [wanted.text] * 2
    assert await ring.counted("prefix_cache_disk_tokens_total") >= read + 256
