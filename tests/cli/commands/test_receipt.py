"""Receipts that anybody can check from files; what is shown is in `tests/cli/transcripts`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from receiptkit import BODY, NONCE, written
from rosterkit import NOW

from sealring.mesh.pki import encode_chain
from sealring.mesh.receipt.form import NAME
from sealring.mesh.roster import Revoked
from sealring.testing.authority import make_member, make_ring

Sealring = Callable[..., Any]


@pytest.fixture
def made(make_signed_cluster: Callable[..., Any]) -> Any:
    return make_signed_cluster(3)


@pytest.fixture
def pin(home: Path, made: Any) -> str:
    written(home, made)
    return str(made.authority.root.fingerprint.hex())


def verify(pin: str, file: str, *more: str) -> tuple[str, ...]:
    return ("receipt", "verify", file, "--root-sha256", pin, *more)


@pytest.mark.parametrize(
    ("asked", "option", "holds"),
    [
        ("demo", (), True),
        ("openai/demo", (), True),
        ("", (), True),
        ("big", (), False),
        ("demo@" + "33" * 32, (), True),
        ("demo@" + "34" * 32, (), False),
        ("alias", ("--model", "demo"), True),
        ("demo", ("--model", "big"), False),
    ],
)
def test_another_model_than_the_one_that_was_asked_for_is_refused(
    here: Sealring, pin: str, home: Path, asked: str, option: tuple[str, ...], holds: bool
) -> None:
    """A gateway that lies gives the question to a smaller model; an alias is its word alone."""
    (home / "body.json").write_text(json.dumps(BODY | {"model": asked}))
    done = here(*verify(pin, "answer.json", "--request", "body.json", *option))
    assert (done.status == 0) is holds, done.err
    assert holds or "has signed, and not" in done.err


def test_an_answer_that_names_another_model_than_its_receipt_is_refused(
    here: Sealring, pin: str, home: Path
) -> None:
    file = home / "answer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": "big"}))
    assert "demo (digest" in here(*verify(pin, "answer.json")).err


def test_two_answers_with_one_receipt_are_refused(here: Sealring, pin: str, home: Path) -> None:
    """A gateway shows one answer twice, where two were asked for."""
    file = home / "answer.json"
    answer = json.loads(file.read_text())
    answer["choices"].append(answer["choices"][0] | {"index": 1})
    answer[NAME]["choices"] *= 2
    file.write_text(json.dumps(answer))
    (home / "bare.json").write_text(json.dumps(answer[NAME]))
    assert "two answers have the same receipt" in here(*verify(pin, "answer.json")).err
    (home / "text").write_text("Hello!")
    assert (
        "there is one text, and there are 2 receipts" in here(*verify(pin, "bare.json", "--text", "text")).err
    )
    (home / "body.json").write_text(json.dumps(BODY | {"n": 2}))
    done = here(*verify(pin, "answer.json", "--request", "body.json", "--json"))
    assert "RECEIPT_OTHER_REQUEST" in done.err or "RECEIPT_OTHER_CHOICE" in done.err


def test_a_streams_receipt_is_checked_with_its_text(here: Sealring, pin: str, home: Path) -> None:
    (home / "text").write_text("Hello!")
    (home / "other").write_text("Hello?")
    assert here(*verify(pin, "bare.json", "--text", "text")).status == 0
    assert "RECEIPT_OTHER_ANSWER" in here(*verify(pin, "bare.json", "--text", "other", "--json")).err
    (home / "binary").write_bytes(b"\xff")
    assert "BAD_OPTION" in here(*verify(pin, "answer.json", "--text", "text")).err
    assert "is not UTF-8 text" in here(*verify(pin, "bare.json", "--text", "binary")).err
    for more, said in (
        ((), "text and reasoning and tool calls"),
        (("--text", "text"), "reasoning and tool calls"),
    ):
        assert f"Not compared: its {said}." in here(*verify(pin, "bare.json", *more)).out


def test_a_streams_receipt_is_compared_with_its_request_by_the_api_that_was_asked(
    here: Sealring, pin: str, home: Path
) -> None:
    """The receipt alone does not say which, and the body of one API may be read by another one too: its
    client says it."""
    done = here(*verify(pin, "bare.json", "--request", "body.json", "--nonce", NONCE.hex()))
    assert "Its request is the one in the file, as /v1/chat/completions reads it, with the" in done.out, (
        done.err
    )
    (found,) = here(*verify(pin, "bare.json", "--request", "body.json", "--json")).data
    assert found["compared"] == ["request"]
    for other, api, reason in (
        ({"messages": [{"role": "user", "content": "Ho"}]}, "/v1/chat/completions", "RECEIPT_OTHER_REQUEST"),
        ({"nothing": 1}, "/v1/chat/completions", "UNKNOWN_FIELD"),
        ({"prompt": "Hi"}, "/v1/completions", "UNSUPPORTED_FIELD"),
        ({}, "sealring chat", "BAD_OPTION"),
        ({}, "/v1/chat", "BAD_OPTION"),
    ):
        (home / "body.json").write_text(json.dumps(BODY | other))
        done = here(*verify(pin, "bare.json", "--request", "body.json", "--api", api, "--json"))
        assert reason in done.err, done.err
    (home / "stream").write_text('data: {"choices": []}\n\ndata: [DONE]\n')
    assert "the value of sealring_receipt in its last event" in here(*verify(pin, "stream")).err


@pytest.mark.parametrize(
    ("api", "stream"),
    [
        ("/v1/chat/completions", 'data: {{"choices": []}}\n\ndata: {event}\n\ndata: [DONE]\n\n'),
        ("/v1/chat/completions", "data: {event}\n\n"),
        ("/v1/chat/completions", "{event}"),
        ("/v1/messages", 'event: message_stop\ndata: {{"type": "message_stop", {part}}}\n\n'),
        ("/v1/messages", '{{"type": "message_stop", {part}}}'),
        ("/v1/responses", '{{"type": "response.completed", "response": {event}}}'),
        ("/api/chat", '{{"done": false, "message": {{"content": "Hello!"}}}}\n{event}\n'),
        ("/api/chat", '{{"model": "demo", "done": true, "message": {{"content": "Hello!"}}, {part}}}'),
    ],
)
def test_a_stream_is_no_answer_and_its_user_is_told_what_to_give(
    here: Sealring, pin: str, home: Path, api: str, stream: str
) -> None:
    """Whole, as one of its events, or as what stands in one."""
    part = f'"{NAME}": {(home / "bare.json").read_text()}'
    event = f'{{"object": "chat.completion.chunk", "model": "demo", "choices": [], {part}}}'
    (home / "stream").write_text(stream.format(event=event, part=part))
    done = here(*verify(pin, "stream", "--api", api))
    assert done.status != 0
    assert done.out == ""
    assert "of a stream the value of sealring_receipt" in " ".join(done.err.split()), done.err


def test_an_answer_does_not_say_how_it_is_read(here: Sealring, pin: str, home: Path) -> None:
    """A gateway puts the true text where another API has it, and its own where this one has."""
    file = home / "answer.json"
    answer = json.loads(file.read_text())
    answer["choices"][0]["message"]["content"] = "Hullo!"
    del answer["object"]
    block = {"type": "text", "text": "Hello!"}
    for more in (
        {"answer": "Hello!"},
        {"type": "message", "content": [block], "stop_reason": "end_turn"},
        {"message": {"content": "Hello!"}, "done_reason": "stop"},
    ):
        file.write_text(json.dumps(answer | more))
        for api in ((), ("--api", "/v1/messages"), ("--api", "/api/chat"), ("--api", "sealring chat")):
            done = here(*verify(pin, "answer.json", *api))
            assert "RECEIPT_MALFORMED" in done.err, done.out
    whole = json.dumps(answer | {"object": "chat.completion"})
    file.write_text(whole.replace('"content"', '"content": "Hello!", "content"'))
    assert "has a name twice" in here(*verify(pin, "answer.json")).err


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


@pytest.mark.parametrize(
    ("status", "word", "changes"),
    [
        (0, "No member was evicted before the answer ended, by roster 2.", {}),
        (6, "RECEIPT_REVOKED", {"at": NOW - 5}),
        (6, "RECEIPT_REVOKED", {"at": NOW}),
        (0, "the receipt holds", {"at": NOW + 1}),
        (14, "undecided: the newer roster does not show whether", {"at": None}),
        (14, "undecided", {"at": None, "back": True}),
        (6, "RECEIPT_REVOKED", {"at": NOW - 5, "back": True}),
        (14, "undecided", {"issued": NOW}),
        (6, "RECEIPT_ROSTER", {"version": 0}),
    ],
)
def test_whether_a_member_was_evicted_is_said_only_as_far_as_a_roster_shows_it(
    here: Sealring,
    pin: str,
    home: Path,
    made: Any,
    host: Any,
    status: int,
    word: str,
    changes: dict[str, Any],
) -> None:
    """A roster names the end of an evicted member for a while. It may have joined again since."""
    host.now = lambda: NOW + 60.0
    members = [make_member(signer) for signer in made.signers]
    tail, asked = members[-1], dict(changes)
    named: dict[str, Any] = {"version": 1 + asked.pop("version", 1), "issued": asked.pop("issued", NOW + 1)}
    if asked:
        at, back = asked["at"], asked.get("back", False)
        kept = [*members[:-1], *([dataclasses.replace(tail, enrolled=NOW + 9)] if back else [])]
        ended = () if at is None else (Revoked(tail.id, tail.identity_key, tail.enrolled, at),)
        named |= {"members": tuple(kept), "rings": (make_ring(members[:-1]),), "revoked": ended}
    (home / "roster.dsse").write_bytes(made.sign(expires=NOW + 60, **named))
    (home / "root.dsse").write_bytes(encode_chain(made.authority.root.chain))
    newer = ("--roster", "roster.dsse", "--root-chain", "root.dsse")
    done = here(*verify(pin, "answer.json", *newer))
    assert done.status == status, done.err
    assert word in " ".join((done.out + done.err).split())
    assert "BAD_OPTION" in here(*verify(pin, "answer.json", *newer[:2])).err
    assert "Not compared: whether a member was evicted" in here(*verify(pin, "answer.json")).out


def test_the_order_is_not_compared_where_a_head_of_an_earlier_release_has_not_signed_for_it(
    here: Sealring, home: Path
) -> None:
    kept = json.loads((Path(__file__).parents[2] / "mesh/receipt/signed/62e62ae8.json").read_text())
    said = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "there was"},
        {"type": "tool_use", "id": "x", "name": "look", "input": {"a": [2], "b": 1}},
    ]
    answer = {"type": "message", "role": "assistant", "model": "demo", "content": said, NAME: kept["receipt"]}
    (home / "old.json").write_text(json.dumps(answer | {"stop_reason": "tool_use"}))
    done = here(*verify(kept["root_sha256"], "old.json", "--api", "/v1/messages"))
    assert (done.status, "text and reasoning and tool calls are as in the file" in done.out) == (0, True), (
        done.err
    )
    assert "the order of its texts" not in done.out
