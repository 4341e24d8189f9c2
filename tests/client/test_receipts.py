"""Receipts of sealed answers, by what the client has got itself."""

from typing import Any

import pytest
from receiptkit import NONCE, PROMPT, TOKENS, signed, statement_of
from refusals import refused
from rosterkit import NOW, authority, clock, cluster, make_authority, make_cluster

from sealring.client.question import Question
from sealring.client.receipts import SealedReceipts
from sealring.client.types import Delta, ToolCall
from sealring.mesh.receipt.digests import sampled_digest
from sealring.mesh.receipt.statement import binding
from sealring.mesh.roster import check_roster
from sealring.testing import PaperCluster
from sealring.v1 import inference_pb2 as inference

__all__ = ["authority", "clock", "cluster", "make_authority", "make_cluster"]
"""Fixtures."""

PIECE = Delta("there was", 3, reasoning="hm", tool_calls=(ToolCall("look", '{"b": 1, "a": [2]}', "x"),))


def checked(cluster: PaperCluster, tokens: list[int], before: int = 0, **changes: Any) -> inference.Receipt:
    """The receipt of an honest statement with some fields changed, for a client that got `tokens` behind
    `before` ones of an earlier envelope."""
    envelope = cluster.sign()
    roster = check_roster(envelope, cluster.authority.root, now=NOW)
    receipt = signed(cluster, envelope, statement_of(cluster, envelope, **changes))
    request = inference.GenerateRequest(model="demo", max_tokens=20)
    question = Question(request=request, prompt=PROMPT, timeout=60.0, prefix_salt=b"", receipt_nonce=NONCE)
    brought = inference.GetRosterResponse(roster=envelope)
    receipts = SealedReceipts(question, roster, brought, roster.rings[0].id)
    receipts.take(0, receipt.head)
    return receipts.checked(0, receipt.tail, [PIECE], before, tokens, "stop", 3)


@pytest.mark.parametrize("epoch", [4, 5, 900])
def test_the_epoch_is_the_one_that_the_head_has_signed(cluster: PaperCluster, epoch: int) -> None:
    """A gateway begins a sealed answer in one epoch, and may compute it in a later one."""
    envelope = cluster.sign()
    one = statement_of(cluster, envelope)
    sampled = sampled_digest(binding(NONCE, one.request, one.roster_hash, one.ring, epoch), TOKENS)
    assert not checked(cluster, TOKENS, epoch=epoch, sampled=sampled).head.missing


def test_other_tokens_are_refused(cluster: PaperCluster) -> None:
    with refused("RECEIPT_OTHER_ANSWER"):
        checked(cluster, [*TOKENS[:-1], 12])


def test_the_client_knows_how_many_tokens_an_earlier_head_has_brought_it(cluster: PaperCluster) -> None:
    envelope = cluster.sign()
    one = statement_of(cluster, envelope)
    for given in (0, 2):
        rest = TOKENS[given:]
        found = checked(cluster, rest, given, given=given, sampled=sampled_digest(one.binding, rest))
        assert not found.head.missing
    with refused("RECEIPT_EARLIER"):
        checked(cluster, TOKENS, 0, given=2)
