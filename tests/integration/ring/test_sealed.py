"""Sealed prompts end to end: the same answers, and heads that take nothing else."""

import asyncio
import time

import pytest
import pytest_asyncio
from capture import Capture
from forger import Forger
from ringtest import CLUSTER, chat

from sealring.client import Client
from sealring.mesh.errors import FailedPrecondition, RosterError
from sealring.mesh.prompt.sealed import SealingKey
from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER
QUESTION = "What is the capital of France?"


def messages(text):
    return [{"role": "user", "content": text}]


# The same answers


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.2, "seed": 42, "top_p": 0.95}, {"temperature": 0.8, "seed": 7, "top_k": 9}],
)
async def test_a_sealed_answer_is_the_clear_one_token_for_token(ring, sampling):
    clear = await ring.ask(chat("Tell me about the planets.", **sampling), 40)
    async with ring.sealing() as client:
        reply = client.chat(messages("Tell me about the planets."), max_tokens=40, **sampling)
        deltas = [delta async for delta in reply]
    done = reply.completion
    assert "".join(delta.text for delta in deltas) == done.text == clear.text
    assert [delta.tokens for delta in deltas] == sorted({delta.tokens for delta in deltas})
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (
        clear.prompt_tokens,
        clear.completion_tokens,
    )
    assert clear.reason.endswith(done.finish_reason.upper())


async def test_the_answer_says_who_saw_the_prompt(ring):
    async with ring.sealing() as client:
        done = await client.chat(messages(QUESTION), max_tokens=5)
        models = await client.models()
    assert done.finish_reason == "length"
    assert [one.rank for one in done.ring.members] == [0, 1, 2]
    assert done.ring.members[0].layers[0] == 0
    assert {(one.trust, one.level) for one in done.ring.members} == {(10, "software")}
    assert [(one.name, one.rings, one.min_trust) for one in models] == [("demo", 1, 10)]


async def test_text_without_limit_and_stop_strings(ring):
    async with ring.sealing() as client:
        whole = (await client.chat(messages(QUESTION))).text
        stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
        stopped = await client.chat(messages(QUESTION), stop=stop)
        text = await client.complete("The capital of", max_tokens=4)
    assert (stopped.text, stopped.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert text.usage.completion_tokens <= 4


async def test_sealed_and_clear_rows_share_a_batch(ring):
    async with ring.sealing() as client:
        sealed = [client.chat(messages(f"What is {n}+{n}?"), max_tokens=20).result() for n in range(4)]
        clear = [ring.ask(chat(f"What is {n}+{n}?"), 20) for n in range(4)]
        answers = await asyncio.gather(*sealed, *clear)
    assert [one.text for one in answers[:4]] == [one.text for one in answers[4:]]


async def test_the_synchronous_client(ring):
    def work():
        with Client(ring.cluster.grpc_address, root_sha256=ring.pin) as client:
            reply = client.chat(messages(QUESTION), max_tokens=30)
            return "".join(delta.text for delta in reply), reply.completion

    text, done = await asyncio.to_thread(work)
    assert text == done.text == (await ring.ask(chat(QUESTION), 30)).text


async def test_leaving_a_sealed_answer_frees_its_row(ring):
    async with ring.sealing() as client:
        async with client.chat(messages("List the months of the year.")) as reply:
            async for _ in reply:
                break
        await ring.idle()
        assert (await client.chat(messages(QUESTION), max_tokens=20)).text


# Refused by the client


async def test_a_wrong_root_and_too_high_a_trust_are_refused_before_anything_is_sent(ring):
    port = int(ring.cluster.grpc_address.rsplit(":", 1)[1])
    with Capture() as capture:
        async with ring.sealing(root_sha256="00" * 32) as client:
            with pytest.raises(RosterError) as wrong_root:
                await client.chat(messages(QUESTION))
        async with ring.sealing() as client:
            with pytest.raises(FailedPrecondition) as untrusted:
                await client.chat(messages(QUESTION), min_trust=20)
        await capture.caught_up()
    assert (wrong_root.value.reason, untrusted.value.reason) == ("ROOT_PIN", "TRUST_BELOW_FLOOR")
    sent = b"".join(bytes(data) for (_, target), data in capture.streams.items() if target == port)
    assert b"/sealring.v1.Inference/GetRoster" in sent
    assert b"/sealring.v1.Inference/Generate" not in sent


# Refused by the head


@pytest_asyncio.fixture(loop_scope="session")
async def forger(ring):
    return await Forger.meet(ring)


async def test_a_request_id_is_taken_once(forger):
    request = forger.request()
    assert await forger.outcome(request) > 0
    assert await forger.outcome(request) == "ENVELOPE_REPLAYED"
    again = forger.request(bound={"request_id": request.envelope.sealed_for.request_id})
    assert await forger.outcome(again) == "ENVELOPE_REPLAYED"


async def test_an_envelope_outlives_nothing(forger):
    now = int(time.time())
    for expires in (now - 1, now + 7200):
        assert await forger.outcome(forger.request(bound={"expires": expires})) == "ENVELOPE_EXPIRED"
    longer = forger.request(shown={"expires": now + 100})
    assert await forger.outcome(longer) == "ENVELOPE_REFUSED"


async def test_an_envelope_for_another_head_is_refused(forger):
    for key in (forger.keys[-1], SealingKey().public_key):
        assert await forger.outcome(forger.request(key=key)) == "ENVELOPE_REFUSED"


async def test_what_was_sealed_cannot_be_changed_on_the_way(forger):
    good = forger.request()
    other_id = forger.request(shown={"request_id": bytes(16)})
    other_hash = forger.request(shown={"roster_hash": bytes(32)})
    sealed = good.envelope.sealed
    flipped = inference.GenerateRequest()
    flipped.CopyFrom(good)
    flipped.envelope.sealed = sealed[:-1] + bytes([sealed[-1] ^ 1])
    expected = {
        "ENVELOPE_REFUSED": [flipped, other_id, forger.request(bound={"deployment": "other"})],
        "ENVELOPE_CHANGED": [forger.request(max_tokens=6), forger.request(max_tokens=0)],
        "SEALED_BY_OTHER_ROSTER": [other_hash, forger.request(bound={"roster_hash": bytes(32)})],
        "RING_GONE": [forger.request(shown={"ring": "demo-9"})],
        "BAD_REQUEST_INFO": [
            forger.request(shown={"ring": ""}),
            forger.request(shown={"request_id": b"short"}),
            forger.request(envelope=inference.Envelope(clear=chat(QUESTION), sealed_for={"ring": "demo-0"})),
        ],
    }
    for reason, requests in expected.items():
        for request in requests:
            assert await forger.outcome(request) == reason
    assert await forger.outcome(good) > 0


async def test_chunks_tell_no_lengths_of_tokens(ring, forger):
    sizes = []
    async for response in ring.stub.Generate(forger.request(), timeout=60):
        if response.HasField("delta"):
            sizes.append(len(response.delta.sealed))
    assert len(sizes) >= 3
    assert len(set(sizes[1:])) == 1, "every chunk but the first, which brings the key, has one length"
