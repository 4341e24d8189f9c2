"""Two deployments on the same nodes: each answers as if it were alone, and loses only its own."""

import asyncio

from ringtest import CLUSTER, LIMIT_SECONDS, chat

from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER
QUESTIONS = ["What is the capital of France?", "What is the opposite of hot?", "Who are you?"]
LONG = "Name the planets of the solar system in order, please, beginning with the nearest."


def expected(reference, question, tokens, kv_bits):
    return reference.reply([{"role": "user", "content": question}], tokens, kv_bits=kv_bits).text


async def answers_exactly(ring, reference, kv_bits):
    """Several rows at once."""
    replies = await asyncio.gather(*(ring.ask(chat(question), 16) for question in QUESTIONS))
    assert [one.text for one in replies] == [expected(reference, one, 16, kv_bits) for one in QUESTIONS]


async def test_nodes_serve_two_deployments_and_a_fault_of_one_is_no_others(arrangements, reference):
    ring = await arrangements.have(stages=2, max_rows=4)
    nodes = [ring.node_of(stage.member) for stage in ring.deployment.plan.rings[0].stages]
    members = [stage.member for stage in ring.deployment.plan.rings[0].stages]
    before = {one.pid for node in nodes for one in ring.parts(node, "engine.main")}
    async with arrangements.beside(kv_bits=4, split=[4, 5], members=members[::-1]) as other:
        assert sum("also serves" in reason for reason in other.deployment.plan.reasons) == 2
        listed = (await ring.cluster.admin.call("ListNodes")).nodes
        places = {one.id: [place.ring for place in one.rings] for one in listed if one.rings}
        both = sorted(one.deployment.plan.rings[0].ring for one in (ring, other))
        assert places == dict.fromkeys(members, both)
        await asyncio.gather(answers_exactly(ring, reference, 0), answers_exactly(other, reference, 4))

        engines = [one for one in ring.parts(nodes[1], "engine.main") if one.pid not in before]
        (engine,) = engines
        epochs = [(await one.status()).epoch for one in (ring, other)]
        request = inference.GenerateRequest(
            model=ring.model, envelope=inference.Envelope(clear=chat(LONG)), max_tokens=40
        )
        text, alive = "", True
        async for response in ring.stub.Generate(request, timeout=LIMIT_SECONDS, metadata=ring.metadata()):
            if response.HasField("delta"):
                if alive:
                    engine.kill()
                alive = False
                text += response.delta.text
        assert text == expected(reference, LONG, 40, 0)
        while (await other.serving()).epoch <= epochs[1]:
            await asyncio.sleep(0.1)
        await asyncio.gather(answers_exactly(ring, reference, 0), answers_exactly(other, reference, 4))
        assert (await ring.status()).epoch == epochs[0]
    await answers_exactly(ring, reference, 0)
