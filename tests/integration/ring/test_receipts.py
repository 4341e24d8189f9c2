"""Receipts of a real ring: over every API, in clear and sealed, whole and streamed, checked offline."""

import json
import secrets

import httpx
import pytest
from ringtest import CLUSTER, LIMIT_SECONDS, PROXY_KEY, chat

from sealring.api.receipts import read_answer, text_digests
from sealring.client.trust import parse_root_sha256
from sealring.mesh.errors import ReceiptError
from sealring.mesh.receipt.digests import request_digest
from sealring.mesh.receipt.form import NAME
from sealring.mesh.receipt.verify import Known, verify_receipt
from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
BODIES = {
    "/v1/chat/completions": {"model": "demo", "messages": ASKED, "max_tokens": 12, "n": 2, "seed": 3},
    "/v1/completions": {"model": "demo", "prompt": ["The capital of", "Once upon"], "max_tokens": 5},
    "/v1/responses": {"model": "demo", "input": "What is the capital of France?", "max_output_tokens": 9},
    "/v1/messages": {"model": "demo", "messages": ASKED, "max_tokens": 9},
    "/api/chat": {"model": "demo", "messages": ASKED, "stream": False, "options": {"num_predict": 9}},
    "/api/generate": {"model": "demo", "prompt": "Why?", "stream": False, "options": {"num_predict": 9}},
}
STREAMED = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat"]


def checked(pin: str, path: str, answer: dict, body: dict, nonce: bytes, before: bool = False) -> list:
    """What the receipts of a whole answer prove of it. With `before` the request has the hash that earlier
    releases compute."""
    answered = read_answer(answer, path, body)
    return [
        verify_receipt(
            receipt,
            parse_root_sha256(pin),
            Known(
                nonce=nonce,
                request=list(asking.requests)[-before],
                choice=asking.choice,
                text=digests.text,
                reasoning=digests.reasoning,
                calls=digests.calls,
                finish=digests.finish,
                deployment="demo",
            ),
        )
        for receipt, digests, asking in zip(answered.receipts, answered.choices, answered.asked, strict=True)
    ]


async def ask(url: str, path: str, body: dict, nonce: bytes) -> httpx.Response:
    headers = {"sealring-receipt": nonce.hex(), "authorization": f"Bearer {PROXY_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=LIMIT_SECONDS) as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("through", ["gateway", "proxy"])
async def test_an_answer_of_every_api_is_proved_from_what_its_client_sent_and_got(
    ring, sealed, path, through
):
    url, body, nonce = (
        ring.cluster.http_url if through == "gateway" else sealed,
        BODIES[path],
        secrets.token_bytes(16),
    )
    answer = (await ask(url, path, body, nonce)).json()
    proven = checked(ring.pin, path, answer, body, nonce)
    assert all(len(one.statement.members) == 3 and one.statement.tokens for one in proven)
    assert [one.statement.choice for one in proven] == ([0, 1] if "n" in body else [0] * len(proven))
    with pytest.raises(ReceiptError) as replayed:
        checked(ring.pin, path, answer, body, secrets.token_bytes(16))
    with pytest.raises(ReceiptError) as other:
        checked(
            ring.pin, path, answer, json.loads(json.dumps(body).replace("?", "!").replace(" of", "s")), nonce
        )
    assert (replayed.value.reason, other.value.reason) == ("RECEIPT_OTHER_NONCE", "RECEIPT_OTHER_REQUEST")


async def test_earlier_releases_take_the_receipt_where_the_models_own_options_change_nothing(ring):
    """The model has a temperature of its own, and no other option: the request names it."""
    path, nonce = "/v1/chat/completions", secrets.token_bytes(16)
    body = BODIES[path] | {"temperature": 0.5}
    answer = (await ask(ring.cluster.http_url, path, body, nonce)).json()
    assert checked(ring.pin, path, answer, body, nonce, before=True)
    with pytest.raises(ReceiptError):
        checked(ring.pin, path, answer, body, nonce)


@pytest.mark.parametrize("path", STREAMED)
async def test_a_streams_last_events_have_the_receipt(ring, path):
    body, nonce = {**BODIES[path], "stream": True}, secrets.token_bytes(16)
    stream = (await ask(ring.cluster.http_url, path, body, nonce)).text
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line[:1] in ("d", "{")]
    events = [json.loads(one) for one in events if one != "[DONE]"]
    last = next(one for one in reversed(events) if NAME in one or NAME in one.get("response", {}))
    receipts = read_answer(last.get(NAME) or last["response"][NAME], path).receipts
    assert len(receipts) == (2 if path in ("/v1/chat/completions", "/v1/completions") else 1)
    for receipt in receipts:
        verify_receipt(receipt, parse_root_sha256(ring.pin), Known(nonce=nonce))


async def test_grpc_has_receipts_in_clear(ring):
    prompt, nonce = chat("What is a tail call?", seed=1), secrets.token_bytes(16)
    request = inference.GenerateRequest(
        model="demo",
        envelope=inference.Envelope(clear=prompt),
        max_tokens=9,
        receipt=inference.ReceiptRequest(nonce=nonce),
    )
    text = ""
    async for event in ring.stub.Generate(request, timeout=LIMIT_SECONDS, metadata=ring.metadata()):
        text += event.delta.text
    (receipt,) = event.finished.receipts
    known = Known(nonce=nonce, request=request_digest(prompt, 9), text=text_digests(text).text, tokens=9)
    proven = verify_receipt(receipt, parse_root_sha256(ring.pin), known)
    assert proven.statement.epoch == (await ring.serving()).epoch


async def test_a_client_that_seals_has_checked_the_receipts(ring):
    async with ring.sealing() as client:
        done = await client.chat(ASKED, max_tokens=9, n=2, seed=4, temperature=1.0)
    for choice, receipt in zip(done.choices, done.receipts, strict=True):
        digests = text_digests(choice.text)
        proven = verify_receipt(receipt, parse_root_sha256(ring.pin), Known(text=digests.text))
        assert (proven.statement.tokens, proven.statement.given) == (choice.completion_tokens, 0)


async def test_who_asks_for_no_receipt_has_none(ring):
    async with httpx.AsyncClient(base_url=ring.cluster.http_url, timeout=LIMIT_SECONDS) as http:
        answer = (await http.post("/v1/messages", json=BODIES["/v1/messages"])).json()
    assert NAME not in answer
