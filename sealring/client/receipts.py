"""Receipts of sealed answers: what the head sealed for the client, what the tail signed, and their check.

An answer whose members did not sign is given to its user visibly without a receipt. A receipt that is wrong
is an error: somebody lies.
"""

from __future__ import annotations

from collections.abc import Sequence

from sealring.client.question import Question
from sealring.client.types import Delta
from sealring.mesh.receipt.digests import AnswerHash, request_digest, sampled_digest, vector_text
from sealring.mesh.receipt.statement import binding, parse_statement
from sealring.mesh.receipt.verify import Known, check_receipt
from sealring.mesh.roster.model import Roster
from sealring.v1 import inference_pb2 as inference

NOT_SIGNED = "NOT_SIGNED"
"""The head is of a release that signs nothing, or died before it signed. Or the gateway has ended the answer,
or kept the receipt to itself."""


class SealedReceipts:
    """The receipts of one envelope's answers."""

    def __init__(
        self, question: Question, roster: Roster, signed: inference.GetRosterResponse, ring: str
    ) -> None:
        """`signed`: the roster as the gateway gave it, for receipts that are checked by others."""
        self._question, self._roster, self._ring = question, roster, ring
        self._signed = signed
        self._heads: dict[int, inference.HeadReceipt] = {}

    def __contains__(self, choice: int) -> bool:
        return choice in self._heads

    def take(self, choice: int, head: inference.HeadReceipt) -> None:
        """Takes the head's receipt for one choice of the question."""
        self._heads[choice] = head

    def checked(
        self,
        choice: int,
        tail: inference.TailReceipt | None,
        pieces: Sequence[Delta],
        given: int,
        sampled: Sequence[int],
        finish: str,
        tokens: int,
    ) -> inference.Receipt:
        """The receipt for a choice that has ended, which says why where nobody has signed.

        `tail` is what the gateway brought; `sampled` are the tokens that this envelope has brought, behind
        `given` ones of earlier envelopes.
        Raises ReceiptError (RECEIPT_*) for one that is wrong.
        """
        receipt = inference.Receipt(
            choice=choice,
            head=self._heads.get(choice, inference.HeadReceipt(missing=NOT_SIGNED)),
            roster=self._signed.roster,
            root_metadata=self._signed.root_metadata,
        )
        if tail is not None:
            receipt.tail.CopyFrom(tail)
        elif len(self._roster.ring(self._ring).members) > 1:
            receipt.tail.missing = NOT_SIGNED
        if receipt.head.missing or receipt.tail.missing:
            return receipt
        answer, nonce = AnswerHash(), self._question.receipt_nonce
        for piece in pieces:
            calls = [inference.ToolCall(name=one.name, arguments=one.arguments) for one in piece.tool_calls]
            answer.add(piece.text or vector_text(piece.vector), piece.reasoning, calls)
        digests = answer.digests()
        request = request_digest(self._question.prompt, self._question.request.max_tokens)
        # The epoch is what the head has signed: a gateway may have begun the envelope in one, and computed it
        # in the next.
        epoch = parse_statement(receipt.head.statement).epoch
        bound = binding(nonce, request, self._roster.hash, self._ring, epoch)
        check_receipt(
            receipt,
            self._roster,
            Known(
                nonce=nonce,
                request=request,
                text=digests.text,
                reasoning=digests.reasoning,
                calls=digests.calls,
                order=digests.order,
                choice=choice,
                finish=finish,
                tokens=tokens,
                given=given,
                ring=self._ring,
                sampled=sampled_digest(bound, sampled),
            ),
        )
        return receipt


def unsigned(choice: int) -> inference.Receipt:
    """The receipt of an answer that ended in an attempt that failed afterwards."""
    return inference.Receipt(choice=choice, head=inference.HeadReceipt(missing=NOT_SIGNED))
