"""The receipt of an answer that went on in another epoch, in clear and sealed."""

import asyncio
import secrets
from dataclasses import replace

from harness import CARRIER
from refusals import refused
from ringtest import CLUSTER, LIMIT_SECONDS, chat

from sealring.api.receipts import text_digests
from sealring.client.trust import parse_root_sha256
from sealring.mesh.receipt.digests import request_digest
from sealring.mesh.receipt.statement import HeadStatement
from sealring.mesh.receipt.verify import Known, verify_receipt
from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER
TOKENS, BEFORE = 150, 10


async def cut_off(broken, ask):
    """The receipt of an answer in whose midst a carrier was killed, what is known of it, and its statement.

    `ask` calls its argument with the tokens that it has read so far. On a busy machine all may be computed
    before it reads any: it asks again.
    """
    async with asyncio.timeout(3 * LIMIT_SECONDS):
        while True:
            first, killed = (await broken.serving()).epoch, False

            def read(tokens):
                nonlocal killed
                if not killed and tokens >= BEFORE:
                    killed = True
                    broken.part("node-1", CARRIER).kill()

            receipt, known = await ask(read)
            assert killed
            root = parse_root_sha256(broken.pin)
            statement = verify_receipt(receipt, root, replace(known, given=None)).statement
            if statement.earlier:
                names_all_before(statement, first)
                return receipt, known, statement


async def test_an_answer_over_two_epochs_names_both(broken):
    prompt, nonce = chat("Count as far as you can.", ignore_eos=True), secrets.token_bytes(16)
    request = inference.GenerateRequest(
        model="demo",
        envelope=inference.Envelope(clear=prompt),
        max_tokens=TOKENS,
        receipt=inference.ReceiptRequest(nonce=nonce),
    )

    async def ask(read):
        text = ""
        async for event in broken.stub.Generate(request, timeout=LIMIT_SECONDS, metadata=broken.metadata()):
            text += event.delta.text
            read(event.delta.tokens)
        (receipt,) = event.finished.receipts
        asked = request_digest(prompt, TOKENS)
        return receipt, Known(nonce=nonce, request=asked, text=text_digests(text).text, tokens=TOKENS)

    receipt, known, statement = await cut_off(broken, ask)
    with refused("RECEIPT_EARLIER"):
        verify_receipt(receipt, parse_root_sha256(broken.pin), known)
    assert BEFORE <= statement.given < TOKENS


async def test_a_sealed_answer_over_two_epochs_names_both(broken):
    messages = [{"role": "user", "content": "Count as far as you can."}]
    async with broken.sealing() as client:

        async def ask(read):
            reply = client.chat(messages, max_tokens=TOKENS, ignore_eos=True)
            async for delta in reply:
                read(delta.tokens)
            (receipt,) = reply.completion.receipts
            return receipt, Known(text=text_digests(reply.completion.text).text, tokens=TOKENS)

        await cut_off(broken, ask)


def names_all_before(statement: HeadStatement, first: int) -> None:
    """From the epoch that was broken on. On a busy machine another may end after it, with more tokens."""
    assert statement.earlier[0].epoch == first
    assert statement.epoch > first
    tokens = [one.tokens for one in statement.earlier]
    assert tokens == sorted(tokens)
    assert BEFORE <= tokens[0] <= tokens[-1] == statement.given
