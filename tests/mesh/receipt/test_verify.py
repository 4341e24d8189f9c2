"""Receipts that are forged, replayed, cut, or of another roster, model or answer: each is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from receiptkit import NONCE, PROMPT, TOKENS, signed, statement_of
from refusals import refused
from rosterkit import NOW

from sealring.mesh.crypto import Label, SoftwareSigner
from sealring.mesh.errors import ReceiptError
from sealring.mesh.receipt.digests import AnswerHash, request_digest, sampled_digest
from sealring.mesh.receipt.form import receipts_json, receipts_of
from sealring.mesh.receipt.statement import Earlier, parse_statement, tail_statement
from sealring.mesh.receipt.verify import Known, check_receipt, check_together, verify_receipt
from sealring.mesh.roster import Revoked, check_roster
from sealring.testing.authority import make_member, make_ring
from sealring.v1 import inference_pb2 as inference


def pin(cluster: Any) -> bytes:
    return bytes(cluster.authority.root.fingerprint)


def known(**changes: Any) -> Known:
    answer = AnswerHash()
    answer.add("there", "hm")
    answer.add(" was")
    answer.add("", "", [inference.ToolCall(id="x", name="look", arguments='{"a":[2],"b":1}')])
    told = answer.digests()
    every: dict[str, Any] = {
        "text": told.text,
        "reasoning": told.reasoning,
        "calls": told.calls,
        "order": told.order,
        "nonce": NONCE,
        "request": request_digest(PROMPT, 20),
        "choice": 0,
        "finish": "stop",
        "tokens": 3,
        "deployment": "demo",
        "model_digest": b"\x33" * 32,
    }
    return Known(**every | changes)


def test_an_honest_receipt_proves_the_request_the_answer_and_the_ring(cluster: Any) -> None:
    envelope = cluster.sign()
    statement = statement_of(cluster, envelope)
    receipt = signed(cluster, envelope, statement)
    expected = known(sampled=sampled_digest(statement.binding, TOKENS))
    proven = verify_receipt(receipt, pin(cluster), expected)
    assert proven.statement == statement
    assert [proven.levels[place.id] for place in statement.members] == ["software"] * 3
    assert receipts_of(receipts_json([receipt, receipt])) == [receipt, receipt]


def test_a_ring_of_one_needs_no_second_signature(make_cluster: Callable[..., Any]) -> None:
    cluster = make_cluster(1)
    envelope = cluster.sign()
    receipt = signed(cluster, envelope, statement_of(cluster, envelope))
    receipt.ClearField("tail")
    verify_receipt(receipt, pin(cluster), known())


def test_times_and_choices_count_where_no_tail_signs_them(make_cluster: Callable[..., Any]) -> None:
    cluster = make_cluster(1)
    envelope = cluster.sign()
    for reason, changes in (
        ("RECEIPT_TIMES", {"finished": (NOW - 61) * 1000}),
        ("RECEIPT_TIMES", {"finished": (NOW + 86_401) * 1000}),
        ("", {"finished": (NOW - 60) * 1000}),
        ("", {"finished": (NOW + 86_400) * 1000}),
    ):
        receipt = signed(cluster, envelope, statement_of(cluster, envelope, **changes))
        receipt.ClearField("tail")
        if reason:
            with refused(reason, ReceiptError):
                verify_receipt(receipt, pin(cluster), known())
        else:
            verify_receipt(receipt, pin(cluster), known())
    receipt = signed(cluster, envelope, statement_of(cluster, envelope))
    receipt.choice = 1
    with refused("RECEIPT_OTHER_CHOICE", ReceiptError):  # the gateway calls it another one than the head
        verify_receipt(receipt, pin(cluster), known(choice=None))


def test_a_tail_signs_within_a_day_of_the_head(cluster: Any) -> None:
    """Its clock may be behind the head's, and behind the roster that the client has: the tail takes that one
    minutes later, and serves by the one before."""
    envelope = cluster.sign()
    statement = statement_of(cluster, envelope)
    day = 86_400_000
    for reason, apart in (("RECEIPT_TIMES", -day - 1), ("", -day), ("", day), ("RECEIPT_TIMES", day + 1)):
        receipt = signed(cluster, envelope, statement)
        receipt.tail.finished = statement.opened + apart
        last = tail_statement(statement, receipt.tail.finished).encode()
        receipt.tail.signature = cluster.signers[-1].sign(Label.RECEIPT, last)
        if reason:
            with refused(reason, ReceiptError):
                verify_receipt(receipt, pin(cluster), known())
        else:
            verify_receipt(receipt, pin(cluster), known())


def test_tokens_of_earlier_epochs_are_proved_to_nobody_who_has_not_got_them(cluster: Any) -> None:
    """A gateway can make up how an answer begins, and have an honest ring go on from there."""
    envelope = cluster.sign()
    earlier = (Earlier("demo-0", 2, 1), Earlier("demo-0", 3, 2))
    for named in (earlier, ()):
        receipt = signed(cluster, envelope, statement_of(cluster, envelope, given=2, earlier=named))
        with pytest.raises(ReceiptError) as caught:
            verify_receipt(receipt, pin(cluster), known())
        assert caught.value.reason == "RECEIPT_EARLIER"
        assert (caught.value.metadata["given"], caught.value.metadata["tokens"]) == ("2", "3")
        for other in (1, 3):
            with refused("RECEIPT_EARLIER", ReceiptError):
                verify_receipt(receipt, pin(cluster), known(given=other))
        assert verify_receipt(receipt, pin(cluster), known(given=2)).statement.earlier == named
    with refused("RECEIPT_OTHER_ANSWER", ReceiptError):  # what else is wrong counts first
        verify_receipt(receipt, pin(cluster), known(text=bytes(32)))


def test_one_receipt_is_not_shown_for_two_answers(cluster: Any) -> None:
    envelope = cluster.sign()
    one, other = (
        verify_receipt(
            signed(cluster, envelope, statement_of(cluster, envelope, **changes)), pin(cluster), found
        )
        for changes, found in (({}, known()), ({"row": 10, "choice": 1}, known(choice=1)))
    )
    check_together([one, other])
    for changes in ({"row": 11}, {"row": 11, "epoch": 5}, {"opened": NOW * 1000 + 1}):
        run = {"row": 10, "choice": 1} | changes
        mixed = verify_receipt(
            signed(cluster, envelope, statement_of(cluster, envelope, **run)), pin(cluster), known(choice=1)
        )
        with refused("RECEIPT_MIXED", ReceiptError):
            check_together([one, mixed])
    with refused("RECEIPT_TWICE", ReceiptError):
        check_together([one, other, one])


def test_other_prompts_and_other_nonces_may_have_runs_and_epochs_of_their_own(cluster: Any) -> None:
    """Rows are counted anew in each epoch."""
    envelope = cluster.sign()
    other = b"\x05" * 32
    proven = [
        verify_receipt(
            signed(cluster, envelope, statement_of(cluster, envelope, **changes)),
            pin(cluster),
            Known(),
        )
        for changes in ({}, {"request": other, "epoch": 5}, {"nonce": other, "epoch": 6})
    ]
    check_together(proven)


def test_two_requests_with_one_nonce_have_receipts_that_do_not_mix(cluster: Any) -> None:
    """One question is asked twice with one nonce: the row tells the answers apart."""
    envelope = cluster.sign()
    first, second = (
        signed(cluster, envelope, statement_of(cluster, envelope, row=row, sampled=bytes([row]) * 32))
        for row in (9, 10)
    )
    mixed = inference.Receipt()
    mixed.CopyFrom(first)
    mixed.tail.CopyFrom(second.tail)
    verify_receipt(first, pin(cluster), known())
    with refused("RECEIPT_SIGNATURE", ReceiptError):
        verify_receipt(mixed, pin(cluster), known())


def test_a_head_alone_can_sign_another_text_for_the_same_tokens(cluster: Any) -> None:
    """A limit, which docs/receipts.md names: the tail vouches for tokens, and only the head reads text."""
    envelope = cluster.sign()
    honest = statement_of(cluster, envelope)
    lie = signed(cluster, envelope, dataclasses.replace(honest, text=b"\x05" * 32))
    lie.tail.CopyFrom(signed(cluster, envelope, honest).tail)
    verify_receipt(lie, pin(cluster), known(text=b"\x05" * 32))


FORGED: list[tuple[str, dict[str, Any]]] = [
    ("RECEIPT_RING", {"ring": "ring-1"}),
    ("RECEIPT_RING", {"model_digest": b"\x34" * 32}),
    ("RECEIPT_RING", {"deployment": "other"}),
    ("RECEIPT_ROSTER", {"roster_hash": b"\x01" * 32}),
    ("RECEIPT_ROSTER", {"roster_version": 2}),
    ("RECEIPT_ROSTER", {"cluster": "other"}),
    ("RECEIPT_ROSTER", {"opened": (NOW + 700) * 1000, "finished": (NOW + 701) * 1000}),
    ("RECEIPT_ROSTER", {"opened": (NOW - 70) * 1000}),
    ("RECEIPT_TIMES", {"finished": (NOW - 3600) * 1000}),
    ("RECEIPT_TIMES", {"finished": (NOW + 90_000) * 1000}),
    ("RECEIPT_OTHER_NONCE", {"nonce": b"\x05" * 32}),
    ("RECEIPT_OTHER_REQUEST", {"request": b"\x05" * 32}),
    ("RECEIPT_OTHER_ANSWER", {"text": b"\x05" * 32}),
    ("RECEIPT_OTHER_ANSWER", {"reasoning": b"\x05" * 32}),
    ("RECEIPT_OTHER_ANSWER", {"calls": b"\x05" * 32}),
    ("RECEIPT_OTHER_ANSWER", {"order": b"\x05" * 32}),
    ("RECEIPT_OTHER_ANSWER", {"finish": "length"}),
    ("RECEIPT_OTHER_ANSWER", {"tokens": 4}),
    ("RECEIPT_OTHER_CHOICE", {"choice": 1}),
    ("RECEIPT_EARLIER", {"given": 1}),
]


@pytest.mark.parametrize(("reason", "changes"), FORGED)
def test_members_that_sign_for_something_else_are_refused(
    cluster: Any, reason: str, changes: dict[str, Any]
) -> None:
    envelope = cluster.sign()
    receipt = signed(cluster, envelope, statement_of(cluster, envelope, **changes))
    with refused(reason, ReceiptError):
        verify_receipt(receipt, pin(cluster), known())


def test_a_head_that_inflates_its_trust_or_moves_layers_is_refused(cluster: Any) -> None:
    envelope = cluster.sign()
    honest = statement_of(cluster, envelope)
    first, *others = honest.members
    for change in ({"trust": 30}, {"layers": (0, 4)}, {"id": others[0].id}):
        members = (dataclasses.replace(first, **change), *others)
        receipt = signed(cluster, envelope, dataclasses.replace(honest, members=members))
        with refused("RECEIPT_RING", ReceiptError):
            verify_receipt(receipt, pin(cluster), known())


def test_a_ring_that_its_client_has_not_chosen_is_refused(cluster: Any) -> None:
    """One machine may be head of two rings, and sign for either."""
    envelope = cluster.sign()
    receipt = signed(cluster, envelope, statement_of(cluster, envelope))
    verify_receipt(receipt, pin(cluster), known(ring="demo-0"))
    with refused("RECEIPT_OTHER_RING", ReceiptError):
        verify_receipt(receipt, pin(cluster), known(ring="ring-1"))


def test_what_differs_is_said(cluster: Any) -> None:
    envelope = cluster.sign()
    receipt = signed(cluster, envelope, statement_of(cluster, envelope))
    for changes, reason, said in (
        ({"model_digest": b"\x05" * 32}, "RECEIPT_OTHER_MODEL", "another model: its model_digest differs"),
        ({"deployment": "big"}, "RECEIPT_OTHER_MODEL", "another model: its deployment differs"),
        ({"order": b"\x05" * 32}, "RECEIPT_OTHER_ANSWER", "another answer: its order differs"),
        ({"nonce": b"\x05" * 32}, "RECEIPT_OTHER_NONCE", "another nonce (hint"),
    ):
        with pytest.raises(ReceiptError) as caught:
            verify_receipt(receipt, pin(cluster), known(**changes))
        assert caught.value.reason == reason
        assert said in str(caught.value)


def test_only_the_head_and_the_tail_of_that_ring_can_sign(cluster: Any) -> None:
    envelope = cluster.sign()
    statement = statement_of(cluster, envelope)
    stranger, middle = SoftwareSigner.generate(), cluster.signers[1]
    for head, tail in ((stranger, None), (None, stranger), (middle, None), (None, middle)):
        with refused("RECEIPT_SIGNATURE", ReceiptError):
            verify_receipt(signed(cluster, envelope, statement, head=head, tail=tail), pin(cluster), known())


def test_a_signature_for_another_use_is_no_receipt(cluster: Any) -> None:
    envelope = cluster.sign()
    statement = statement_of(cluster, envelope)
    for label in Label:
        if label is not Label.RECEIPT:
            receipt = signed(cluster, envelope, statement)
            receipt.head.signature = cluster.signers[0].sign(label, statement.encode())
            with refused("RECEIPT_SIGNATURE", ReceiptError):
                verify_receipt(receipt, pin(cluster), known())


def test_the_tail_of_one_answer_does_not_vouch_for_another(cluster: Any) -> None:
    envelope = cluster.sign()
    honest = statement_of(cluster, envelope)
    other = signed(cluster, envelope, dataclasses.replace(honest, nonce=b"\x06" * 32))
    for changes in ({}, {"row": 10}, {"sampled": b"\x07" * 32}, {"given": 1}):
        receipt = signed(cluster, envelope, dataclasses.replace(honest, **changes))
        receipt.tail.CopyFrom(other.tail)
        with refused("RECEIPT_SIGNATURE", ReceiptError):
            verify_receipt(receipt, pin(cluster), known())


def test_a_receipt_that_was_cut_proves_nothing(cluster: Any) -> None:
    envelope = cluster.sign()
    for part in ("head", "tail", "roster", "root_metadata"):
        receipt = signed(cluster, envelope, statement_of(cluster, envelope))
        receipt.ClearField(part)
        if part in ("head", "tail"):
            with refused("RECEIPT_MISSING", ReceiptError):
                check_receipt(receipt, cluster.verified(), known())
        with pytest.raises(ReceiptError, match="does not bring it" if part[0] == "r" else "has not signed"):
            verify_receipt(receipt, pin(cluster), known())


@pytest.mark.parametrize("who", ["head", "tail"])
def test_a_member_that_has_not_signed_by_its_gateways_word_has_not(cluster: Any, who: str) -> None:
    """A signature beside that word counts for nothing."""
    envelope = cluster.sign()
    receipt = signed(cluster, envelope, statement_of(cluster, envelope))
    getattr(receipt, who).missing = "RECEIPT_LATE"
    with pytest.raises(ReceiptError, match=rf"the {who} of the ring has not signed \(RECEIPT_LATE\)"):
        verify_receipt(receipt, pin(cluster), known())


def test_rosters_of_other_clusters_and_of_other_times_are_refused(
    cluster: Any, make_cluster: Callable[..., Any]
) -> None:
    envelope = cluster.sign()
    receipt = signed(cluster, envelope, statement_of(cluster, envelope))
    other = make_cluster(3, cluster="other")
    with refused("RECEIPT_ROSTER", ReceiptError):
        verify_receipt(receipt, pin(other), known())
    for roster in (other.sign(), cluster.sign(version=2)):
        replaced = inference.Receipt()
        replaced.CopyFrom(receipt)
        replaced.roster = roster
        with refused("RECEIPT_ROSTER", ReceiptError):
            verify_receipt(replaced, pin(cluster), known())


def test_two_rosters_of_one_version_are_refused_and_so_are_older_and_foreign_ones(cluster: Any) -> None:
    envelope = cluster.sign(version=2)
    receipt = signed(cluster, envelope, statement_of(cluster, envelope))
    two, old, new = (cluster.verified(version=version, issued=NOW - 1) for version in (2, 1, 3))
    for later in (two, old, dataclasses.replace(new, cluster="other")):
        with refused("RECEIPT_ROSTER", ReceiptError):
            verify_receipt(receipt, pin(cluster), known(), later=later)
    same = check_roster(envelope, cluster.authority.root, now=NOW)
    with refused("RECEIPT_UNDECIDED", ReceiptError):
        verify_receipt(receipt, pin(cluster), known(), later=same)


ENDED = NOW + 30
"""When the answer ended, by the statement."""

JOINED = 1
"""When its members had joined."""


@pytest.mark.parametrize(
    ("reason", "ends", "back", "issued"),
    [
        # it was evicted, before the answer, during it, at its end, after it
        ("RECEIPT_REVOKED", {JOINED: NOW - 5}, None, ENDED + 20),
        ("RECEIPT_REVOKED", {JOINED: NOW + 10}, None, ENDED + 20),
        ("RECEIPT_REVOKED", {JOINED: ENDED}, None, ENDED + 20),
        ("", {JOINED: ENDED + 1}, None, ENDED + 20),
        # and has joined again
        ("RECEIPT_REVOKED", {JOINED: NOW + 10}, NOW + 11, ENDED + 20),
        ("", {JOINED: ENDED + 1}, ENDED + 2, ENDED + 20),
        # and was evicted again
        ("RECEIPT_REVOKED", {JOINED: NOW + 10, NOW + 11: ENDED + 1}, None, ENDED + 20),
        ("", {JOINED: ENDED + 1, ENDED + 2: ENDED + 3}, None, ENDED + 20),
        # the roster does not name that end any more
        ("RECEIPT_UNDECIDED", {}, None, ENDED + 20),
        ("RECEIPT_UNDECIDED", {}, NOW + 11, ENDED + 20),
        ("RECEIPT_UNDECIDED", {NOW + 11: ENDED + 1}, None, ENDED + 20),
        # it has been a member all the time, or since it was evicted earlier, or until the answer ended
        ("", {}, JOINED, ENDED + 20),
        ("", {0: 0}, JOINED, ENDED + 20),
        ("", {}, JOINED, ENDED + 1),
        ("RECEIPT_UNDECIDED", {}, JOINED, ENDED - 1),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_member_that_was_revoked_before_the_answer_ended_is_not_believed(
    cluster: Any, reason: str, ends: dict[int, int], back: int | None, issued: int, place: int
) -> None:
    """A list of revocations is bounded: what it does not say is undecided, and does not hold."""
    envelope = cluster.sign()
    statement = statement_of(cluster, envelope, opened=NOW * 1000, finished=ENDED * 1000)
    receipt = signed(cluster, envelope, statement)
    verify_receipt(receipt, pin(cluster), known())
    signer = cluster.signers[place]
    others = [make_member(one) for one in cluster.signers if one is not signer]
    who = make_member(signer)
    later = cluster.verified(
        version=2,
        issued=issued,
        expires=issued + 60,
        members=(*others, *([dataclasses.replace(who, enrolled=back)] if back is not None else [])),
        rings=(make_ring(others),),
        revoked=tuple(Revoked(who.id, who.identity_key, since, at) for since, at in ends.items()),
    )
    if not reason:
        assert verify_receipt(receipt, pin(cluster), known(), later=later).statement == statement
        return
    with refused(reason, ReceiptError):
        verify_receipt(receipt, pin(cluster), known(), later=later)


def test_a_member_that_was_revoked_counts_before_one_that_is_undecided(cluster: Any) -> None:
    envelope = cluster.sign()
    receipt = signed(cluster, envelope, statement_of(cluster, envelope))
    head, middle, tail = (make_member(one) for one in cluster.signers)
    for who, ended in ((head, tail), (tail, head)):
        later = cluster.verified(
            version=2,
            members=(middle,),
            rings=(make_ring([middle]),),
            revoked=(Revoked(ended.id, ended.identity_key, ended.enrolled, NOW),),
        )
        with refused("RECEIPT_REVOKED", ReceiptError):
            verify_receipt(receipt, pin(cluster), known(), later=later)
        assert who.id not in {one.id for one in later.revoked}


def test_a_tail_that_signed_after_it_was_revoked_is_not_believed(cluster: Any) -> None:
    """The head says that the answer had ended before. The tail signs its own time, too."""
    envelope = cluster.sign()
    statement = statement_of(cluster, envelope, opened=NOW * 1000, finished=ENDED * 1000)
    receipt = signed(cluster, envelope, statement)
    receipt.tail.finished = (ENDED + 9) * 1000
    last = tail_statement(statement, receipt.tail.finished).encode()
    receipt.tail.signature = cluster.signers[-1].sign(Label.RECEIPT, last)
    *others, who = (make_member(one) for one in cluster.signers)

    def later(issued: int, *revoked: Revoked) -> Any:
        there = others if revoked else [*others, who]
        more = {"members": tuple(there), "rings": (make_ring(there),), "revoked": revoked}
        return cluster.verified(version=2, issued=issued, expires=issued + 60, **more)

    for reason, roster in (
        ("RECEIPT_REVOKED", later(ENDED + 20, Revoked(who.id, who.identity_key, JOINED, ENDED + 5))),
        ("RECEIPT_UNDECIDED", later(ENDED + 5)),
    ):
        with refused(reason, ReceiptError):
            verify_receipt(receipt, pin(cluster), known(), later=roster)
    verify_receipt(receipt, pin(cluster), known(), later=later(ENDED + 9))


@pytest.mark.parametrize("size", [1, 3])
def test_a_head_counts_until_the_answer_ended_whenever_the_tail_had_signed(
    make_cluster: Callable[..., Any], size: int
) -> None:
    cluster = make_cluster(size)
    envelope = cluster.sign()
    statement = statement_of(cluster, envelope, opened=NOW * 1000, finished=ENDED * 1000)
    receipt = signed(cluster, envelope, statement)
    receipt.tail.finished = NOW * 1000
    last = tail_statement(statement, receipt.tail.finished).encode()
    receipt.tail.signature = cluster.signers[-1].sign(Label.RECEIPT, last)
    if size == 1:
        receipt.ClearField("tail")
    head = make_member(cluster.signers[0])
    others = [make_member(SoftwareSigner.generate())]
    later = cluster.verified(
        version=2,
        issued=ENDED + 20,
        expires=ENDED + 80,
        members=tuple(others),
        rings=(make_ring(others),),
        revoked=(Revoked(head.id, head.identity_key, JOINED, ENDED - 1),),
    )
    with refused("RECEIPT_REVOKED", ReceiptError):
        verify_receipt(receipt, pin(cluster), known(), later=later)


@pytest.fixture
def honest(cluster: Any) -> inference.Receipt:
    envelope = cluster.sign()
    return signed(cluster, envelope, statement_of(cluster, envelope))


PARTS = ["head.statement", "head.signature", "tail.signature", "roster", "root_metadata"]


@given(part=st.sampled_from(PARTS), bit=st.integers(0, 1 << 20))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_bit_of_a_receipt_can_be_flipped(
    cluster: Any, honest: inference.Receipt, part: str, bit: int
) -> None:
    receipt = inference.Receipt()
    receipt.CopyFrom(honest)
    *outer, name = part.split(".")
    holder = getattr(receipt, outer[0]) if outer else receipt
    flipped = bytearray(getattr(holder, name))
    flipped[bit // 8 % len(flipped)] ^= 1 << bit % 8
    setattr(holder, name, bytes(flipped))
    with pytest.raises(ReceiptError):
        verify_receipt(receipt, pin(cluster), known())


@given(cut=st.floats(0, 1, exclude_max=True))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_statement_that_is_cut_anywhere_is_malformed(honest: inference.Receipt, cut: float) -> None:
    data = honest.head.statement
    assert parse_statement(data).encode() == data
    with refused("RECEIPT_MALFORMED", ReceiptError):
        parse_statement(data[: int(cut * len(data))])


@given(st.recursive(st.none() | st.integers() | st.text(max_size=8), lambda each: st.lists(each, max_size=3)))
def test_receipts_of_strangers_are_read_or_refused(value: Any) -> None:
    for outer in (
        value,
        {"choices": value, "rosters": value},
        {"choices": [{"head": value}], "rosters": [{}]},
    ):
        with refused("RECEIPT_MALFORMED", ReceiptError):
            receipts_of(outer)
