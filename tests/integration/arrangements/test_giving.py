"""A key asks for more than a ring has rows for, and gives way to another: its answers are those of a ring
that it has for itself."""

import asyncio
import dataclasses
import secrets
from functools import partial
from types import SimpleNamespace

import answering
import pytest
from answering import PROMPTS, Answer, Progress, ask_clear, ask_http, ask_sealed
from guests import guest
from refusals import refused
from ringtest import CLUSTER, LIMIT_SECONDS, PROXY_KEY, chat, proxy

from sealring.api.receipts import text_digests
from sealring.client.trust import parse_root_sha256
from sealring.mesh.receipt.digests import request_digest
from sealring.mesh.receipt.verify import Known, verify_receipt
from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER
ROWS, TOKENS = 4, 120


@pytest.fixture
def others_begin(monkeypatch):
    """Long answers, of which none ends while another key's question comes."""
    monkeypatch.setattr(answering, "TOKENS", TOKENS)


async def have(arrangements):
    return await arrangements.have(stages=2, max_rows=ROWS)


async def begin_before_any_ends(other, answers):
    """Another key's question, whose first token comes before any of these answers ends."""
    request = inference.GenerateRequest(
        model=other.model, envelope=inference.Envelope(clear=chat("Hello!")), max_tokens=2
    )
    async for event in other.stub.Generate(request, timeout=LIMIT_SECONDS, metadata=other.metadata()):
        if event.HasField("delta"):
            assert not [name for name, answer in answers.items() if answer.end or answer.error]


async def ask(asks, happen=None):
    """The answers to all of these at once; `happen` is called with them in their midst."""
    answers = {name: Answer() for name in asks}
    progress = Progress(ROWS * 10 * (happen is not None), lambda: happen(answers))
    async with asyncio.timeout(3 * LIMIT_SECONDS):
        await asyncio.gather(*(ask(answers[name], progress) for name, ask in asks.items()))
    return answers


async def used(ring):
    """Requests, tokens of prompts and of answers by the ring's key."""
    answer = await ring.stub.GetUsage(inference.GetUsageRequest(), metadata=ring.metadata())
    mine = [one for one in answer.usage if one.key == ring.key.split("_")[1]]
    counts = ("requests", "prompt_tokens", "answered_tokens")
    return [sum(getattr(one, what) for one in mine) for what in counts]


async def used_by(ring, asking):
    before = await used(ring)
    answers = await asking
    return answers, [now - then for now, then in zip(await used(ring), before, strict=True)]


async def test_answers_that_give_way_are_those_of_a_key_that_is_alone(
    arrangements, other_key, others_begin, tmp_path
):
    ring = await have(arrangements)
    other = dataclasses.replace(ring, key=other_key)
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(ring.key)
    async with (
        ring.sealing() as client,
        proxy(ring, tmp_path, "--api-key-file", str(key)) as (url, _),
        guest(ring) as over_guest,
        ring.sealing(gateway=over_guest.cluster.grpc_address, api_key=over_guest.key) as guests_client,
    ):
        sealing = dataclasses.replace(ring, cluster=SimpleNamespace(http_url=url), key=PROXY_KEY)
        happen = partial(begin_before_any_ends, other)
        asks = prompts(ring, client)
        expected, alone = await used_by(ring, ask(asks))
        assert all(alone)
        for flood in (asks, dict(reversed(asks.items()))):
            answers, counted = await used_by(ring, ask(flood, happen))
            assert (answers, counted) == (expected, alone), "nothing is counted twice"
        http = {str(number): partial(ask_http, sealing) for number in range(2 * ROWS)}
        (alone,) = (await ask({"": http["0"]})).values()
        assert list((await ask(http, happen)).values()) == [alone] * 2 * ROWS, "through the proxy"
        assert await ask(prompts(over_guest, guests_client), happen) == expected, "over another gateway"


def prompts(ring, client):
    """All in clear and sealed, to be asked."""

    def clear(name, answer, progress):
        return ask_clear(ring, name, answer, progress)

    def sealed(name, answer, progress):
        return ask_sealed(client, name, answer, progress, ring.model)

    return {f"{name}, {each.__name__}": partial(each, name) for each in (clear, sealed) for name in PROMPTS}


async def test_a_receipt_names_the_tokens_from_before_the_answer_gave_way(arrangements, other_key):
    ring = await have(arrangements)
    other = dataclasses.replace(ring, key=other_key)
    epoch, root = (await ring.serving()).epoch, parse_root_sha256(ring.pin)
    prompt = chat("Count as far as you can.", ignore_eos=True)
    earlier = []

    async def count(answer, progress):
        nonce, text = secrets.token_bytes(16), ""
        request = inference.GenerateRequest(
            model=ring.model,
            envelope=inference.Envelope(clear=prompt),
            max_tokens=TOKENS,
            receipt=inference.ReceiptRequest(nonce=nonce),
        )
        async for event in ring.stub.Generate(request, timeout=LIMIT_SECONDS, metadata=ring.metadata()):
            if event.HasField("delta"):
                text += event.delta.text
                await progress.piece("counting")
        answer.end = (event.finished.completion_tokens,)
        asked = request_digest(prompt, TOKENS)
        known = Known(nonce=nonce, request=asked, text=text_digests(text).text, tokens=TOKENS, given=None)
        (receipt,) = event.finished.receipts
        statement = verify_receipt(receipt, root, known).statement
        earlier.append(statement.given)
        assert {one.epoch for one in statement.earlier} <= {epoch} == {statement.epoch}
        if statement.given:
            with refused("RECEIPT_EARLIER"):
                verify_receipt(receipt, root, dataclasses.replace(known, given=0))

    counts = {str(number): count for number in range(ROWS + 1)}
    await ask(counts, partial(begin_before_any_ends, other))
    assert any(earlier)
    assert not all(earlier), "whole answers have whole receipts"
