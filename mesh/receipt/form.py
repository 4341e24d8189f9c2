"""Receipts as JSON: in the answers of the HTTP APIs, and in files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sealring.mesh.crypto.dsse import SIGNATURE_BYTES
from sealring.mesh.crypto.encoding import FormatError, decode_base64, encode_base64
from sealring.mesh.crypto.identity import MAX_SIGNATURE_BYTES
from sealring.mesh.errors import ReceiptError
from sealring.mesh.pki.root import MAX_CHAIN_BYTES
from sealring.mesh.receipt.statement import MAX_STATEMENT_BYTES
from sealring.mesh.ring.composition import MAX_CHOICES
from sealring.v1 import inference_pb2 as inference

NAME = "sealring_receipt"
"""The field of an answer that holds its receipts."""

MAX_RECEIPTS = 1024
"""The most receipts of one answer: a request may have several prompts."""

_MAX_ROSTER_BYTES = 2 << 20
_MAX_SIGNATURE = max(SIGNATURE_BYTES, MAX_SIGNATURE_BYTES)
_MAX_REASON = 64
_MAX_TIME = 1 << 53


def receipts_json(receipts: Sequence[inference.Receipt]) -> dict[str, Any]:
    """The receipts of an answer, one for each choice, in their order.

    Their roster and root metadata, which are mostly the same, stand once.
    """
    rosters = list(dict.fromkeys((each.roster, each.root_metadata) for each in receipts))
    return {
        "choices": [
            {
                "choice": each.choice,
                "roster": rosters.index((each.roster, each.root_metadata)),
                "head": _head(each.head),
                **({"tail": _tail(each.tail)} if each.HasField("tail") else {}),
            }
            for each in receipts
        ],
        "rosters": [
            {"roster": encode_base64(roster), "root_metadata": encode_base64(root)}
            for roster, root in rosters
        ],
    }


def receipts_of(value: Any) -> list[inference.Receipt]:
    """The inverse of `receipts_json`. Raises ReceiptError (RECEIPT_MALFORMED)."""
    try:
        rosters = [
            (_bytes(each, "roster", _MAX_ROSTER_BYTES), _bytes(each, "root_metadata", MAX_CHAIN_BYTES))
            for each in _list(value, "rosters")
        ]
        found = [_receipt(each, rosters) for each in _list(value, "choices")]
        if receipts_json(found) != value:
            raise FormatError("it has something else in it")
        return found
    except FormatError as error:
        raise ReceiptError(
            f"the receipt is malformed: {error}",
            hint=f"give the whole answer, or what its field {NAME} holds, as it came",
            reason="RECEIPT_MALFORMED",
        ) from None


def _head(head: inference.HeadReceipt) -> dict[str, Any]:
    if head.missing:
        return {"missing": head.missing}
    return {"statement": encode_base64(head.statement), "signature": encode_base64(head.signature)}


def _tail(tail: inference.TailReceipt) -> dict[str, Any]:
    if tail.missing:
        return {"missing": tail.missing}
    return {"finished": tail.finished, "signature": encode_base64(tail.signature)}


def _receipt(value: Any, rosters: Sequence[tuple[bytes, bytes]]) -> inference.Receipt:
    receipt = inference.Receipt(choice=_number(value, "choice", MAX_CHOICES - 1))
    place = _number(value, "roster", MAX_RECEIPTS)
    if place >= len(rosters):
        raise FormatError("it names no roster")
    receipt.roster, receipt.root_metadata = rosters[place]
    head = _object(value.get("head"))
    if "missing" in head:
        receipt.head.missing = _reason(head)
    else:
        receipt.head.statement = _bytes(head, "statement", MAX_STATEMENT_BYTES)
        receipt.head.signature = _bytes(head, "signature", _MAX_SIGNATURE)
    if "tail" in value:
        tail = _object(value["tail"])
        if "missing" in tail:
            receipt.tail.missing = _reason(tail)
        else:
            receipt.tail.finished = _number(tail, "finished", _MAX_TIME)
            receipt.tail.signature = _bytes(tail, "signature", _MAX_SIGNATURE)
    return receipt


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError("a part is not an object")
    return value


def _list(value: Any, name: str) -> list[dict[str, Any]]:
    found = _object(value).get(name)
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_RECEIPTS:
        raise FormatError(f"{name} is not a list of the right length")
    return [_object(each) for each in found]


def _number(value: dict[str, Any], name: str, high: int) -> int:
    found = value.get(name)
    if type(found) is not int or not 0 <= found <= high:
        raise FormatError(f"{name} is not a number within its bounds")
    return found


def _bytes(value: dict[str, Any], name: str, most: int) -> bytes:
    found = value.get(name)
    if not isinstance(found, str):
        raise FormatError(f"{name} is not base64")
    return decode_base64(found, max_bytes=most)


def _reason(value: dict[str, Any]) -> str:
    found = value["missing"]
    if not isinstance(found, str) or not 0 < len(found) <= _MAX_REASON or not found.isidentifier():
        raise FormatError("a reason is malformed")
    return found
