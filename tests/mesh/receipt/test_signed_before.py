"""Receipts that earlier commits have signed, with their rosters; `signed` has them by commit."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from receiptkit import NONCE, PROMPT, TOKENS
from refusals import refused

from sealring.mesh.errors import ReceiptError, RosterError
from sealring.mesh.pki import decode_chain, verify_root_chain
from sealring.mesh.receipt.digests import AnswerHash, request_digest, sampled_digest
from sealring.mesh.receipt.form import receipts_of
from sealring.mesh.receipt.verify import Known, verify_receipt
from sealring.mesh.roster import check_roster
from sealring.v1 import inference_pb2 as inference

FILES = sorted(Path(__file__).with_name("signed").glob("*.json"))


def answered() -> dict[str, bytes]:
    """The answer of each of them, of which `receiptkit` has the parts."""
    answer = AnswerHash()
    answer.add("there was", "hm", [inference.ToolCall(name="look", arguments='{"b": 1, "a": [2]}')])
    return {name: getattr(answer.digests(), name) for name in ("text", "reasoning", "calls", "order")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_receipt_of_an_earlier_commit_verifies_offline(file: Path) -> None:
    kept: dict[str, Any] = json.loads(file.read_text())
    pin = bytes.fromhex(kept["root_sha256"])
    (receipt,) = receipts_of(kept["receipt"])
    with refused("RECEIPT_OTHER_ANSWER", ReceiptError):  # a head of today signs for the order, too
        verify_receipt(receipt, pin, Known(**answered()))
    known = Known(
        **answered() | {"order": None}, nonce=NONCE, request=request_digest(PROMPT, 20), tokens=len(TOKENS)
    )
    proven = verify_receipt(receipt, pin, known)
    assert proven.statement.encode() == receipt.head.statement
    assert proven.statement.sampled == sampled_digest(proven.statement.binding, TOKENS)
    assert [member.level for member in proven.roster.members] == ["software"] * 3
    for changes in ({"text": bytes(32)}, {"nonce": bytes(32)}):
        with pytest.raises(ReceiptError):
            verify_receipt(receipt, pin, Known(**{**answered(), "order": None, **changes}))
    for part in ("head", "tail"):
        forged = copy.deepcopy(receipt)
        signature = bytearray(getattr(forged, part).signature)
        signature[9] ^= 1
        getattr(forged, part).signature = bytes(signature)
        with refused("RECEIPT_SIGNATURE", ReceiptError):
            verify_receipt(forged, pin, Known())


def test_a_running_machine_takes_no_roster_that_does_not_say_since_when_members_are_enrolled() -> None:
    kept = json.loads(FILES[0].read_text())
    (receipt,) = receipts_of(kept["receipt"])
    opened = json.loads(receipt.head.statement)["opened"] / 1000
    pin = bytes.fromhex(kept["root_sha256"])
    root = verify_root_chain(decode_chain(receipt.root_metadata), pin, now=opened)
    roster = check_roster(receipt.roster, root, now=opened, ever=True)
    assert {member.enrolled for member in roster.members} == {0}
    with refused("ROSTER_MALFORMED", RosterError):
        check_roster(receipt.roster, root, now=opened)
