"""The check of a receipt, offline: from the root hash down to both signatures.

root hash -> root metadata -> roster (by its times when the answer began) -> the ring and its keys -> the
head's signature -> the tail's -> what the client knows: nonce, request, answer -> no token of an earlier
epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from sealring.mesh.clock import SKEW_SECONDS
from sealring.mesh.crypto.identity import verify
from sealring.mesh.crypto.keys import Label
from sealring.mesh.errors import ReceiptError, ReceiptUndecided, RosterError, SealringError
from sealring.mesh.pki.root import decode_chain, follow_chain
from sealring.mesh.receipt.statement import HeadStatement, ReceiptMember, parse_statement, tail_statement
from sealring.mesh.roster.model import Ring, Roster
from sealring.mesh.roster.reader import check_roster
from sealring.v1 import inference_pb2 as inference

MAX_SECONDS = 24 * 3600
"""No answer takes longer; with more the times are wrong."""


@dataclass(frozen=True)
class Known:
    """What a client knows of its request. What is None is not compared.

    `given` are the tokens of earlier epochs, for which nobody has signed: any gateway can make some up, and
    have a ring go on from there. A client that got them from their own heads knows how many they were.
    """

    nonce: bytes | None = None
    request: bytes | None = None
    text: bytes | None = None
    reasoning: bytes | None = None
    calls: bytes | None = None
    order: bytes | None = None
    choice: int | None = None
    finish: str | None = None
    tokens: int | None = None
    given: int | None = 0
    sampled: bytes | None = None
    ring: str | None = None
    deployment: str | None = None
    model_digest: bytes | None = None


@dataclass(frozen=True)
class Proven:
    """What a receipt proves: the statement, and the ring by the roster that it names."""

    statement: HeadStatement
    roster: Roster
    ring: Ring

    @property
    def levels(self) -> dict[str, str]:
        """The trust level of each member, by id."""
        return {place.id: str(self.roster.member(place.id).level) for place in self.ring.members}


def verify_receipt(
    receipt: inference.Receipt, root_sha256: bytes, known: Known, *, later: Roster | None = None
) -> Proven:
    """Checks everything in a receipt, its roster and root metadata too, and returns what it proves.

    `later` is a newer verified roster of the cluster: it has to show of every member that nobody revoked it
    before the answer ended. Raises ReceiptError (RECEIPT_*), ReceiptUndecided where it does not show that.
    """
    _require(receipt.head, "head")
    statement = parse_statement(receipt.head.statement)
    proven = check_receipt(receipt, _roster(receipt, statement, root_sha256), known)
    if later is not None:
        _check_revoked(statement, max(statement.finished, receipt.tail.finished), proven.roster, later)
    return proven


def check_receipt(receipt: inference.Receipt, roster: Roster, known: Known) -> Proven:
    """As `verify_receipt`, by a roster that is verified already. Raises ReceiptError (RECEIPT_*)."""
    _require(receipt.head, "head")
    statement = parse_statement(receipt.head.statement)
    named = statement.cluster, statement.roster_version, statement.roster_hash
    if named != (roster.cluster, roster.version, roster.hash):
        raise _refused("the head names another roster", "RECEIPT_ROSTER")
    ring = _ring(statement, roster)
    _check_times(statement)
    head, tail = ring.members[0].id, ring.members[-1].id
    _check_signature(roster, head, statement.encode(), receipt.head.signature, "head")
    if head != tail:
        _require(receipt.tail, "tail")
        end = receipt.tail.finished
        # By its own clock, which may be minutes behind the head's, and behind the roster: that one is the
        # client's, and the tail still serves by an older one.
        if abs(end - statement.opened) > MAX_SECONDS * 1000:
            raise _refused("the tail's time does not fit the head's", "RECEIPT_TIMES")
        signed = tail_statement(statement, end).encode()
        _check_signature(roster, tail, signed, receipt.tail.signature, "tail")
    if receipt.choice != statement.choice:
        raise _other("choice")
    _compare(statement, known)
    return Proven(statement, roster, ring)


def check_together(proven: Sequence[Proven]) -> None:
    """Requires that each receipt is of another choice, and that the head has opened them at once.

    A gateway could show one choice twice, or a choice of another run that it likes better.

    Raises ReceiptError (RECEIPT_TWICE, RECEIPT_MIXED).
    """
    rows, openings = set(), dict[tuple[bytes, bytes], tuple[str, int, int, int]]()
    for statement in (one.statement for one in proven):
        rows.add((statement.ring, statement.epoch, statement.row))
        first = statement.row - statement.choice
        opening = statement.ring, statement.epoch, first, statement.opened
        if openings.setdefault((statement.nonce, statement.request), opening) != opening:
            raise _refused("two choices of the answer are of different runs", "RECEIPT_MIXED")
    if len(rows) < len(proven):
        raise _refused("two answers have the same receipt", "RECEIPT_TWICE")


def _require(part: inference.HeadReceipt | inference.TailReceipt, who: str) -> None:
    if part.missing or not part.signature:
        raise ReceiptError(
            f"the {who} of the ring has not signed ({part.missing or 'UNSIGNED'})",
            reason="RECEIPT_MISSING",
            hint="the answer may be right all the same; ask again if it has to be proved",
        )


def _roster(receipt: inference.Receipt, statement: HeadStatement, root_sha256: bytes) -> Roster:
    """The roster that the head names, valid when the answer began."""
    if not receipt.roster or not receipt.root_metadata:
        raise ReceiptError(
            "the receipt names a roster and does not bring it",
            hint="give the roster of that version, and the root metadata",
            reason="RECEIPT_ROSTER",
        )
    try:
        root = follow_chain(decode_chain(receipt.root_metadata), root_sha256)
        roster = check_roster(receipt.roster, root, now=statement.opened / 1000, ever=True)
    except RosterError as error:
        raise ReceiptError(
            f"the receipt's roster is not believed: {error.message} ({error.reason})",
            hint=error.hint,
            reason="RECEIPT_ROSTER",
            roster=error.reason,
        ) from None
    return roster


def _ring(statement: HeadStatement, roster: Roster) -> Ring:
    """The ring that the head names, as the roster has it."""
    try:
        ring = roster.ring(statement.ring)
    except SealringError:
        raise _refused("the receipt's ring is not in the roster", "RECEIPT_RING") from None
    places = tuple(ReceiptMember(one.id, one.layers, roster.member(one.id).trust) for one in ring.members)
    stated = statement.members, statement.deployment, statement.model_digest
    if stated != (places, ring.deployment, ring.model_digest):
        raise _refused("the head describes another ring than the roster", "RECEIPT_RING")
    return ring


def _check_times(statement: HeadStatement) -> None:
    took = statement.finished - statement.opened
    if not -SKEW_SECONDS * 1000 <= took <= MAX_SECONDS * 1000:
        raise _refused("the answer ended before it began, or took days", "RECEIPT_TIMES")


def _check_signature(roster: Roster, member: str, statement: bytes, signature: bytes, who: str) -> None:
    try:
        verify(roster.member(member).identity_key, Label.RECEIPT, statement, signature)
    except SealringError:
        raise _refused(f"the {who}'s signature does not verify", "RECEIPT_SIGNATURE") from None


def _check_revoked(statement: HeadStatement, ended_at: int, roster: Roster, later: Roster) -> None:
    """`ended_at` is the later time of both that were signed: the tail may say that it signed after the head.

    A member counts by its enrolment: it may have been evicted, and joined again.

    A roster lists few revocations, and for a while. So a member that it lists neither way is undecided.
    """
    if later.cluster != statement.cluster or later.version < statement.roster_version:
        raise ReceiptError(
            "the later roster is of another cluster, or older",
            hint="give a newer roster of the cluster that the receipt names",
            reason="RECEIPT_ROSTER",
        )
    if later.version == statement.roster_version and later.hash != statement.roster_hash:
        raise _refused("two rosters of one version were signed", "RECEIPT_ROSTER")
    ended = {(entry.id, entry.enrolled): entry.at for entry in later.revoked}
    there = {(member.id, member.enrolled) for member in later.members}
    undecided = ""
    for place in statement.members:
        enrolment = place.id, roster.member(place.id).enrolled
        at = ended.get(enrolment)
        if at is not None and at * 1000 <= ended_at:
            raise _refused(
                "a member of the ring was revoked before the answer ended", "RECEIPT_REVOKED", member=place.id
            )
        if at is None and (enrolment not in there or later.issued * 1000 < ended_at):
            undecided = place.id
    if undecided:
        raise ReceiptUndecided(
            f"undecided: the newer roster does not show whether {undecided} was revoked before the answer "
            "ended",
            hint="give one that was signed after the answer ended, and soon: it names revocations while "
            "their certificates are valid, and no more than 100",
            member=undecided,
        )


_WHAT = {
    "nonce": "nonce",
    "ring": "ring",
    "request": "request",
    "choice": "choice",
    "deployment": "model",
    "model_digest": "model",
}
"""Words for the fields of Known; all others are of the answer."""


def _compare(statement: HeadStatement, known: Known) -> None:
    """Raises ReceiptError (RECEIPT_OTHER_*) unless the statement is of what the client knows."""
    for name in (field.name for field in fields(Known)):
        if name != "given" and getattr(known, name) not in (None, getattr(statement, name)):
            raise _other(_WHAT.get(name, "answer"), name)
    if known.given not in (None, statement.given):
        named = ", ".join(
            f"epoch {one.epoch or 'unknown'} to token {one.tokens}" for one in statement.earlier
        )
        raise ReceiptError(
            f"nobody has signed for the first {statement.given} of its {statement.tokens} tokens: the "
            f"gateway says that they are of earlier epochs ({named or 'which are not named'})",
            hint="the receipt holds for the others; ask again if the whole has to be proved",
            reason="RECEIPT_EARLIER",
            tokens=statement.tokens,
            given=statement.given,
        )


def _other(what: str, differs: str = "") -> ReceiptError:
    detail = f": its {differs} differs" if differs not in ("", what) else ""
    return ReceiptError(
        f"the receipt is for another {what}{detail}",
        hint="give the request and the answer that belong to this receipt, as they were sent",
        reason=f"RECEIPT_OTHER_{what.upper()}",
    )


def _refused(why: str, reason: str, **metadata: object) -> ReceiptError:
    """The error for a receipt that proves nothing, whatever the client compares it with."""
    return ReceiptError(why, hint="do not rely on the answer: ask again", reason=reason, **metadata)
