"""Receipts in JSON, whole and with parts that are missing; what is out of its bounds is malformed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from refusals import refused

from sealring.mesh.crypto import MAX_SIGNATURE_BYTES, encode_base64
from sealring.mesh.errors import ReceiptError
from sealring.mesh.pki import MAX_CHAIN_BYTES
from sealring.mesh.receipt.form import MAX_RECEIPTS, receipts_json, receipts_of
from sealring.mesh.receipt.statement import MAX_STATEMENT_BYTES
from sealring.mesh.ring import MAX_CHOICES
from sealring.v1 import inference_pb2 as inference

SIGNED = inference.HeadReceipt(statement=b"s", signature=b"h")


def receipt(**parts: Any) -> inference.Receipt:
    return inference.Receipt(**{"head": SIGNED, "roster": b"roster", "root_metadata": b"root"} | parts)


def test_parts_that_are_missing_are_told_and_read_again() -> None:
    told = [
        receipt(),
        receipt(choice=MAX_CHOICES - 1, tail=inference.TailReceipt(finished=1 << 53, signature=b"t")),
        receipt(roster=b"other", tail=inference.TailReceipt(missing="NO_ANSWER")),
        receipt(head=inference.HeadReceipt(missing="x" * 64)),
        receipt(
            head=inference.HeadReceipt(
                statement=bytes(MAX_STATEMENT_BYTES), signature=bytes(MAX_SIGNATURE_BYTES)
            )
        ),
    ]
    value = receipts_json(told)
    assert receipts_of(value) == told
    assert len(value["rosters"]) == 2
    assert value["choices"][3]["head"] == {"missing": "x" * 64}
    assert "tail" not in value["choices"][0]


@pytest.mark.parametrize(
    ("at", "wrong"),
    [
        (("choices", 0, "choice"), (-1, MAX_CHOICES, True, 0.0, "0", None)),
        (("choices", 0, "roster"), (-1, 1, True, 1 << 70)),
        (("choices", 0, "tail", "finished"), (-1, (1 << 53) + 1, 5.0, None)),
        (("choices", 0, "tail"), (None, [], {}, {"missing": "A", "finished": 5})),
        (("choices", 0, "head"), (None, {}, {"missing": ""}, {"missing": "x" * 65}, {"missing": "a b"})),
        (("choices", 0, "head", "missing"), ("LATE", None, 5)),
        (("choices", 0, "head", "signature"), (encode_base64(bytes(MAX_SIGNATURE_BYTES + 1)), 5, "=")),
        (("choices", 0, "head", "statement"), (encode_base64(bytes(MAX_STATEMENT_BYTES + 1)), None)),
        (("rosters", 0, "root_metadata"), (encode_base64(bytes(MAX_CHAIN_BYTES + 1)), None)),
        (("rosters", 0, "roster"), (encode_base64(bytes((2 << 20) + 1)),)),
        (("choices",), ([], {}, None, 5, [receipts_json([receipt()])["choices"][0]] * (MAX_RECEIPTS + 1))),
        (("rosters",), ([], [{}], None, 5)),
    ],
)
def test_what_is_out_of_its_bounds_is_malformed(at: tuple[Any, ...], wrong: tuple[Any, ...]) -> None:
    true = receipts_json([receipt(tail=inference.TailReceipt(finished=5, signature=b"t"))])
    assert len(receipts_of(true)) == 1
    for part in wrong:
        value = copy.deepcopy(true)
        holder: Any = value
        for name in at[:-1]:
            holder = holder[name]
        holder[at[-1]] = part
        with refused("RECEIPT_MALFORMED", ReceiptError):
            receipts_of(value)
