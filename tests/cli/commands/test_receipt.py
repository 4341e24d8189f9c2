"""Receipts that anybody can check from files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from receiptkit import NONCE, signed, statement_of

from sealring.api.chat import ask_chat
from sealring.mesh.receipt.digests import AnswerHash, request_digest
from sealring.mesh.receipt.form import NAME, receipts_json
from sealring.mesh.receipt.statement import Earlier

Sealring = Callable[..., Any]
BODY = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}


@pytest.fixture
def pin(home: Path, make_signed_cluster: Callable[..., Any]) -> str:
    """Writes an answer with a receipt, and what asked for it."""
    cluster = make_signed_cluster(3)
    asked, answer = ask_chat(BODY, "").request, AnswerHash()
    answer.add("Hello!")
    told = answer.digests()
    envelope = cluster.sign()
    statement = statement_of(
        cluster,
        envelope,
        request=request_digest(asked.envelope.clear, asked.max_tokens),
        text=told.text,
        reasoning=told.reasoning,
        calls=told.calls,
        given=2,
        earlier=(Earlier("ring-0", 3, 2),),
    )
    message = {"role": "assistant", "content": "Hello!"}
    whole = {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        NAME: receipts_json([signed(cluster, envelope, statement)]),
    }
    for name, value in (("answer", whole), ("body", BODY), ("bare", whole[NAME])):
        (home / f"{name}.json").write_text(json.dumps(value))
    return str(cluster.authority.root.fingerprint.hex())


def verify(pin: str, file: str, *more: str) -> tuple[str, ...]:
    return ("receipt", "verify", file, "--root-sha256", pin, *more)


def test_a_receipt_is_checked_from_files_and_explained(here: Sealring, pin: str) -> None:
    done = here(*verify(pin, "answer.json", "--request", "body.json", "--nonce", NONCE.hex()))
    assert done.status == 0, done.err
    said = " ".join(done.out.split())
    for part in (
        "The head and the tail have signed",
        "Its request is the one in the file. Its answer is the one in the file.",
        "The first 2 of its 3 tokens are of earlier epochs, which have signed nothing: epoch 3 (to token 2).",
        "software: a key in a file (between them, signed nothing)",
        "Not proved: that they computed",
    ):
        assert part in said
    (found,) = here(*verify(pin, "answer.json", "--json")).data
    assert (found["deployment"], found["tokens"], len(found["members"])) == ("demo", 3, 3)


def test_a_streams_receipt_is_checked_with_its_text(here: Sealring, pin: str, home: Path) -> None:
    (home / "text").write_text("Hello!")
    (home / "other").write_text("Hello?")
    assert here(*verify(pin, "bare.json", "--text", "text")).status == 0
    assert "RECEIPT_OTHER_ANSWER" in here(*verify(pin, "bare.json", "--text", "other", "--json")).err
    (home / "binary").write_bytes(b"\xff")
    assert "is not UTF-8 text" in here(*verify(pin, "bare.json", "--text", "binary")).err
    assert "The answer was not compared." in here(*verify(pin, "bare.json")).out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("Hello!", "Hullo!", "answer"), "another answer"),
        (("Hi", "Ho", "body"), "another request"),
        ((NAME, "other", "answer"), "has no receipt"),
        (('"signature": "', '"signature": "AAAA', "answer"), "malformed|does not verify"),
    ],
)
def test_a_receipt_of_something_else_is_refused(
    here: Sealring, pin: str, home: Path, change: tuple[str, str, str], reason: str
) -> None:
    old, new, name = change
    file = home / f"{name}.json"
    file.write_text(file.read_text().replace(old, new))
    done = here(*verify(pin, "answer.json", "--request", "body.json"))
    assert done.status != 0
    assert any(one in done.err for one in reason.split("|")), done.err


def test_another_root_is_refused(here: Sealring, pin: str) -> None:
    done = here(*verify("ab" * 32, "answer.json"))
    assert done.status != 0
    assert "the receipt's roster is not believed" in done.err
