"""Receipts as the members of a small cluster sign them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rosterkit import NOW

from sealring.api.chat import ask_chat
from sealring.mesh.crypto import Label, SoftwareSigner
from sealring.mesh.pki import encode_chain
from sealring.mesh.receipt.digests import AnswerHash, request_digest, sampled_digest
from sealring.mesh.receipt.form import NAME, receipts_json
from sealring.mesh.receipt.statement import HeadStatement, ReceiptMember, binding, tail_statement
from sealring.mesh.roster import check_roster
from sealring.testing import PaperCluster
from sealring.v1 import inference_pb2 as inference

NONCE = bytes(range(32))
PROMPT = inference.Prompt(text="Once upon a time", stop=["\n"])
TOKENS = [5, 7, 11]
BODY = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}


def statement_of(cluster: PaperCluster, envelope: bytes, /, **changes: Any) -> HeadStatement:
    """What an honest head of the cluster's ring states, with some fields changed."""
    roster = check_roster(envelope, cluster.authority.root, now=NOW)
    ring = roster.rings[0]
    request, answer = request_digest(PROMPT, 20), AnswerHash()
    answer.add("there was", "hm", [inference.ToolCall(name="look", arguments='{"b": 1, "a": [2]}')])
    told = answer.digests()
    statement = HeadStatement(
        cluster=roster.cluster,
        roster_version=roster.version,
        roster_hash=roster.hash,
        ring=ring.id,
        epoch=4,
        deployment=ring.deployment,
        model_digest=ring.model_digest,
        members=tuple(ReceiptMember(one.id, one.layers, roster.member(one.id).trust) for one in ring.members),
        row=9,
        choice=0,
        nonce=NONCE,
        request=request,
        text=told.text,
        reasoning=told.reasoning,
        calls=told.calls,
        order=told.order,
        finish="stop",
        prompt_tokens=4,
        tokens=3,
        given=0,
        sampled=sampled_digest(binding(NONCE, request, roster.hash, ring.id, 4), TOKENS),
        earlier=(),
        opened=NOW * 1000,
        finished=NOW * 1000 + 900,
    )
    return dataclasses.replace(statement, **changes)


def signed(
    cluster: PaperCluster,
    envelope: bytes,
    statement: HeadStatement,
    *,
    head: SoftwareSigner | None = None,
    tail: SoftwareSigner | None = None,
) -> inference.Receipt:
    """The receipt of a statement, signed by the ring's head and tail, or by others."""
    data, finished = statement.encode(), statement.finished + 5
    last = tail_statement(statement, finished).encode()
    return inference.Receipt(
        choice=statement.choice,
        head=inference.HeadReceipt(
            statement=data, signature=(head or cluster.signers[0]).sign(Label.RECEIPT, data)
        ),
        tail=inference.TailReceipt(
            finished=finished, signature=(tail or cluster.signers[-1]).sign(Label.RECEIPT, last)
        ),
        roster=envelope,
        root_metadata=encode_chain(cluster.authority.root.chain),
    )


def written(home: Path, cluster: Any, body: dict[str, Any] = BODY, **changes: Any) -> None:
    """Writes an answer with a receipt, what asked for it, and the receipt alone into a folder."""
    asked, answer = ask_chat(BODY, "").request, AnswerHash()
    answer.add("Hello!")
    told = answer.digests()
    envelope = cluster.sign()
    named = {
        "request": request_digest(asked.envelope.clear, asked.max_tokens),
        "text": told.text,
        "reasoning": told.reasoning,
        "calls": told.calls,
        "order": told.order,
    }
    statement = statement_of(cluster, envelope, **named | changes)
    message = {"role": "assistant", "content": "Hello!"}
    whole = {
        **{"object": "chat.completion", "model": "demo", "id": "chatcmpl-1", "created": 1},
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        NAME: receipts_json([signed(cluster, envelope, statement)]),
    }
    for name, value in (("answer", whole), ("body", body), ("bare", whole[NAME])):
        (home / f"{name}.json").write_text(json.dumps(value))
