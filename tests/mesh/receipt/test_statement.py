"""The head's statement: one encoding, and nothing in it that cannot be."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from receiptkit import statement_of
from refusals import refused

from sealring.mesh.crypto import canonical_json
from sealring.mesh.errors import InvalidInput, ReceiptError
from sealring.mesh.receipt.statement import (
    MAX_NONCE_BYTES,
    MIN_NONCE_BYTES,
    HeadStatement,
    check_nonce,
    parse_statement,
)


@pytest.fixture
def statement(cluster: Any) -> HeadStatement:
    return statement_of(cluster, cluster.sign())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"type": "sealring receipt tail"}, "another type or version"),
        ({"spec_version": 2}, "another type or version"),
        ({"finish": "cancelled"}, "figures"),
        ({"tokens": 3, "given": 4}, "figures"),
        ({"members": []}, "members"),
        ({"more": 1}, "field"),
    ],
)
def test_a_statement_that_no_head_makes_is_refused(
    statement: HeadStatement, changes: dict[str, Any], why: str
) -> None:
    document = json.loads(statement.encode()) | changes
    with pytest.raises(ReceiptError, match=why) as error:
        parse_statement(canonical_json(document))
    assert error.value.reason == "RECEIPT_MALFORMED"


def test_a_statement_has_one_encoding(statement: HeadStatement) -> None:
    whole = dataclasses.replace(statement, tokens=3, given=3)
    assert parse_statement(whole.encode()) == whole
    with pytest.raises(ReceiptError, match="canonical"):
        parse_statement(json.dumps(json.loads(whole.encode())).encode())


def test_a_nonce_has_its_length() -> None:
    for length in (MIN_NONCE_BYTES, MAX_NONCE_BYTES):
        check_nonce(bytes(length))
    for length in (MIN_NONCE_BYTES - 1, MAX_NONCE_BYTES + 1):
        with refused("BAD_NONCE", InvalidInput):
            check_nonce(bytes(length))
