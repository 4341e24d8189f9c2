"""A ring that cuts its model in one place for prompts and in another for answers."""

import asyncio
import secrets
from operator import gt

import pytest
import sharing
from capture import paths_in
from patience import until
from ringtest import CLUSTER, LIMIT_SECONDS, chat, serving

from sealring.api.receipts import text_digests
from sealring.client.trust import parse_root_sha256
from sealring.mesh.receipt.digests import request_digest
from sealring.mesh.receipt.verify import Known, verify_receipt
from sealring.v1 import inference_pb2 as inference

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


async def stages_of(ring):
    """Nodes by rank, each with the ends of its layers for answers and for prompts."""
    answer = await ring.cluster.admin.call("ListDeployments")
    (found,) = (one.plan for one in answer.deployments if one.plan.spec.name == ring.model)
    return [(ring.node_of(one.member), one.end_layer, one.prompt_end_layer) for one in found.rings[0].stages]


def blocks(ring, nodes):
    """The number that each of the nodes has stored."""
    folders = (ring.cluster.state_dir / node / "prefixes" for node in nodes)
    return [sum(path.suffix == ".block" for path in paths_in(folder)) for folder in folders]


async def test_answers_go_on_after_a_kill_and_prompts_are_read_from_disk(arrangements, reference):
    ring = await arrangements.have(split=[2, 3, 4], prompt_split=[4, 2, 3], prefill_chunk=64, max_rows=4)
    nodes = [node for node, *_ in await stages_of(ring)]
    before = blocks(ring, nodes)
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
    await until(lambda: all(map(gt, blocks(ring, nodes), before)), pause=0.1)
    read = await ring.counted("prefix_cache_disk_tokens_total")
    for node in nodes:  # each has layers of another kind: for prompts, for both, for answers
        replies = [asyncio.ensure_future(ring.reply(chat(*said), 64)) for _ in range(2)]
        await asyncio.sleep(0)
        ring.part(node, "engine.main").kill()
        assert [one.text for one in await asyncio.gather(*replies)] == [wanted.text] * 2
    assert await ring.counted("prefix_cache_disk_tokens_total") >= read + 256


LONG = 250


async def proven(ring, question, expected):
    """The statement in the receipt of an answer, which has to be the expected one."""
    prompt, nonce = chat(question, ignore_eos=True), secrets.token_bytes(16)
    request = inference.GenerateRequest(
        model=ring.model, envelope=inference.Envelope(clear=prompt), max_tokens=LONG
    )
    request.receipt.nonce = nonce
    text = ""
    async for event in ring.stub.Generate(request, timeout=LIMIT_SECONDS, metadata=ring.metadata()):
        text += event.delta.text
    assert text == expected
    digests = {"request": request_digest(prompt, LONG), "text": text_digests(text).text}
    known = Known(nonce=nonce, tokens=LONG, given=None, **digests)
    (receipt,) = event.finished.receipts
    return verify_receipt(receipt, parse_root_sha256(ring.pin), known).statement


@pytest.mark.parametrize("place", [0, pytest.param(-1, marks=pytest.mark.sweep)])
async def test_a_member_drains_while_rows_are_computed(arrangements, place):
    """A head or a tail: answers go on over other members, and so do conversations."""
    ring = await arrangements.have(split=[4, 5], prompt_split=[7, 2], prefill_chunk=64, max_rows=4)
    await ring.serving()
    nodes = {each.name: each.id for each in (await ring.cluster.admin.call("ListNodes")).nodes}
    wanted = {
        question: (await ring.reply(chat(question, ignore_eos=True), LONG)).text for question in QUESTIONS
    }
    said = (3 * BEGINNING, "I hear you.", "Name a lake.")
    roles = ("user", "assistant", "user")
    talk = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    before = await stages_of(ring)
    names = [node for node, *_ in before]
    had = blocks(ring, names)
    cold = await sharing.ask(ring, talk)
    await until(lambda: all(map(gt, blocks(ring, names), had)), pause=0.1)
    draining, earlier = True, []

    async def ask_on(question):
        while draining:
            earlier.extend((await proven(ring, question, wanted[question])).earlier)

    async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:
        for question in QUESTIONS:
            group.create_task(ask_on(question))
        left = names[place]
        await ring.cluster.admin.call("DrainNode", id=nodes[left])
        while left in [node for node, *_ in await stages_of(ring)]:
            await asyncio.sleep(0.1)
        await ring.serving()
        now = await stages_of(ring)
        assert [each[1:] for each in now] == [each[1:] for each in before] == [(4, 7), (9, 9)]
        warm = await sharing.ask(ring, talk)
        assert (warm.text, warm.cached >= 256) == (cold.text, True), "who left has handed it over"
        await ring.cluster.admin.call("DrainNode", id=nodes[left], undo=True)
        draining = False
    assert earlier, "no answer was under way"


@pytest.mark.sweep  # a cluster of its own: an evicted member does not come back
async def test_answers_go_on_over_others_when_a_member_is_evicted(tmp_path):
    spec = {"stages": 0, "split": [4, 5], "prompt_split": [7, 2], "prefill_chunk": 64, "max_rows": 4}
    async with serving(tmp_path / "state", 3, **spec) as ring:
        asked = [chat(question, ignore_eos=True) for question in QUESTIONS[::2]]
        wanted = [await ring.reply(each, LONG) for each in asked]
        before = await ring.serving()
        replies = [asyncio.ensure_future(ring.reply(each, LONG)) for each in asked]
        while await ring.counted("num_requests_running") < len(asked):
            await asyncio.sleep(0.05)
        await ring.cluster.admin.call("EvictNode", id=ring.deployment.plan.rings[0].stages[-1].member)
        assert await asyncio.gather(*replies) == wanted
        assert (await ring.serving()).epoch > before.epoch
        assert [each[1:] for each in await stages_of(ring)] == [(4, 7), (9, 9)]
