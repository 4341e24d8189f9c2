"""Receipts in a gateway: held until both members have signed, and never for longer than they may take."""

from __future__ import annotations

from sealring.gateway.rings.receipts import LATE_SECONDS, RECENT, Receipts, RecentRosters
from sealring.gateway.scheduler import Request
from sealring.mesh.receipt.statement import HeadStatement, ReceiptMember
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

HEAD = inference.HeadReceipt(statement=b"s", signature=b"h")
TAIL = inference.TailReceipt(finished=1, signature=b"t")


def opened(ranks: int = 2, choices: int = 1, *, sealed: bool = False) -> tuple[Receipts, Request]:
    receipts = Receipts()
    receipts.begin_epoch(ranks)
    content = {"sealed": b"x"} if sealed else {"clear": inference.Prompt(text="x")}
    request = Request("one", "key", 9, inference.Envelope(**content), choices=choices)
    receipts.opened(5, request, None)
    return receipts, request


def head(row: int = 5, rank: int = 0) -> control.RowReceipt:
    return control.RowReceipt(row=row, head=HEAD, rank=rank)


def tail(row: int = 5, rank: int = 1) -> control.RowReceipt:
    return control.RowReceipt(row=row, tail=TAIL, rank=rank)


def test_an_answer_ends_when_head_and_tail_have_signed_for_each_choice() -> None:
    receipts, request = opened(choices=2)
    for part in (tail(6), head(5), head(6)):
        assert receipts.take(part) is not None
    receipts.hold(request, inference.Finished(), 0.0)
    assert receipts.complete("one") is None
    receipts.take(tail(5))
    over = receipts.complete("one")
    assert over is not None
    expected = [inference.Receipt(choice=choice, head=HEAD, tail=TAIL) for choice in (0, 1)]
    assert list(over[1].receipts) == expected
    assert "one" not in receipts


def test_a_ring_of_one_has_no_tail() -> None:
    receipts, request = opened(ranks=1)
    receipts.take(head())
    receipts.hold(request, inference.Finished(), 0.0)
    assert receipts.complete("one") is not None


def test_only_head_and_tail_are_heard() -> None:
    receipts, _ = opened(ranks=3)
    for part in (head(rank=1), head(rank=2), tail(rank=0), tail(rank=1), head(row=6)):
        assert receipts.take(part) is None
    assert receipts.take(control.RowReceipt(row=5, sealed=b"x")) is None, "the prompt came in clear"
    sealed, _ = opened(sealed=True)
    assert sealed.take(head()) is None, "the prompt came sealed"


def test_an_answer_that_a_member_does_not_sign_ends_visibly_without() -> None:
    for part, missing in ((head(), ("", "EPOCH_ENDED")), (tail(), ("EPOCH_ENDED", ""))):
        receipts, request = opened()
        receipts.take(part)
        receipts.hold(request, inference.Finished(), 0.0)
        ((_, finished),) = receipts.give_up("EPOCH_ENDED")
        (receipt,) = finished.receipts
        assert (receipt.head.missing, receipt.tail.missing) == missing


def test_an_answer_that_the_gateway_ends_waits_for_nobody() -> None:
    receipts, request = opened()
    receipts.unsigned(5)
    receipts.hold(request, inference.Finished(), 0.0)
    over = receipts.complete("one")
    assert over is not None
    assert over[1].receipts[0].head.missing == "ENDED_BY_GATEWAY"


def test_nobody_waits_for_longer_than_members_may_take() -> None:
    receipts, request = opened()
    receipts.hold(request, inference.Finished(), 10.0)
    assert receipts.late(10.0 + LATE_SECONDS - 1) == []
    ((_, finished),) = receipts.late(10.0 + LATE_SECONDS)
    assert finished.receipts[0].head.missing == "RECEIPT_LATE"


def test_the_roster_that_the_head_names_comes_along() -> None:
    named, some = bytes([7]) * 32, bytes(32)
    statement = HeadStatement(
        cluster="demo",
        roster_version=1,
        roster_hash=named,
        ring="demo-0",
        epoch=1,
        deployment="demo",
        model_digest=some,
        members=(ReceiptMember("m", (0, 1), 10),),
        row=5,
        choice=0,
        nonce=some,
        request=some,
        text=some,
        reasoning=some,
        calls=some,
        order=some,
        finish="stop",
        prompt_tokens=1,
        tokens=1,
        given=0,
        sampled=some,
        earlier=(),
        opened=1,
        finished=2,
    )
    receipt = inference.Receipt(head=inference.HeadReceipt(statement=statement.encode(), signature=b"h"))
    rosters = RecentRosters()
    rosters.remember(named, (b"roster", b"root"))
    for number in range(RECENT - 1):
        rosters.remember(number.to_bytes(32, "big"), (b"other", b"other"))
    rosters.attach([receipt])
    assert (receipt.roster, receipt.root_metadata) == (b"roster", b"root")
    rosters.remember(bytes([9]) * 32, (b"other", b"other"))
    rosters.attach([receipt])
    assert not receipt.roster
    rosters.attach([inference.Receipt(head=HEAD)])  # of a head that is not honest
