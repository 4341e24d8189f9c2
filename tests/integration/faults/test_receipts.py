"""The receipt of an answer that went on in another epoch, in clear and sealed."""

import secrets
from dataclasses import replace

from harness import CARRIER
from refusals import refused
from ringtest import CLUSTER, LIMIT_SECONDS, chat

from sealring.api.receipts import text_digests
from sealring.client.trust import parse_root_sha256
from sealring.mesh.receipt.digests import request_digest
from sealring.mesh.receipt.statement import Statement
from sealring.mesh.receipt.verify import Known, verify_receipt
from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER
TOKENS, BEFORE = 150, 10


async def test_an_answer_over_two_epochs_names_both(broken):
    before = (await broken.serving()).epoch
    prompt, nonce, text = chat("Count as far as you can.", ignore_eos=True), secrets.token_bytes(16), ""
    request = inference.GenerateRequest(
        model="demo",
        envelope=inference.Envelope(clear=prompt),
        max_tokens=TOKENS,
        receipt=inference.ReceiptRequest(nonce=nonce),
    )
    killed = False
    async for event in broken.stub.Generate(request, timeout=LIMIT_SECONDS, metadata=broken.metadata()):
        text += event.delta.text
        if not killed and event.delta.tokens >= BEFORE:
            killed = True
            broken.part("node-1", CARRIER).kill()
    (receipt,) = event.finished.receipts
    known = Known(
        nonce=nonce, request=request_digest(prompt, TOKENS), text=text_digests(text).text, tokens=TOKENS
    )
    root = parse_root_sha256(broken.pin)
    with refused("RECEIPT_EARLIER"):
        verify_receipt(receipt, root, known)
    statement = verify_receipt(receipt, root, replace(known, given=None)).statement
    assert killed
    names_all_before(statement, before)
    assert BEFORE <= statement.given < TOKENS
    assert statement.epoch > before


async def test_a_sealed_answer_over_two_epochs_names_both(broken):
    before = (await broken.serving()).epoch
    messages, killed = [{"role": "user", "content": "Count as far as you can."}], False
    async with broken.sealing() as client:
        reply = client.chat(messages, max_tokens=TOKENS, ignore_eos=True)
        async for delta in reply:
            if not killed and delta.tokens >= BEFORE:
                killed = True
                broken.part("node-1", CARRIER).kill()
    (receipt,) = reply.completion.receipts
    known = Known(text=text_digests(reply.completion.text).text, tokens=TOKENS, given=None)
    statement = verify_receipt(receipt, parse_root_sha256(broken.pin), known).statement
    assert killed
    names_all_before(statement, before)
    assert statement.epoch > before


def names_all_before(statement: Statement, first: int) -> None:
    """From the epoch that was broken on. On a busy machine another may end after it, with more tokens."""
    assert statement.earlier[0].epoch == first
    tokens = [one.tokens for one in statement.earlier]
    assert tokens == sorted(tokens)
    assert BEFORE <= tokens[0] <= tokens[-1] == statement.given
