"""Receipts on their way through a gateway: from head and tail to the client, beside the rosters they name.

The gateway can read receipts of answers in clear, and change none of them unnoticed.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from sealring.gateway.scheduler.request import Request
from sealring.mesh.errors import ReceiptError
from sealring.mesh.receipt.statement import parse_statement
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

RECENT = 16
"""Rosters that are remembered: a head may name another than the newest, and answers take their time."""

LATE_SECONDS = 20.0
"""The time that members have to sign once an answer has ended. An enclave takes tens of milliseconds, and its
helper at most 10 s."""


class RecentRosters:
    """The newest signed rosters, for receipts that name them."""

    def __init__(self) -> None:
        self.newest = b""
        self._signed: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()

    def remember(self, roster_hash: bytes, signed: tuple[bytes, bytes]) -> None:
        """Takes a roster's envelope and its root metadata."""
        self.newest = roster_hash
        self._signed[roster_hash] = signed
        while len(self._signed) > RECENT:
            self._signed.popitem(last=False)

    def attach(self, receipts: Iterable[inference.Receipt]) -> None:
        """Puts the rosters that heads name beside their receipts. One that is not known stays away."""
        for receipt in receipts:
            with contextlib.suppress(ReceiptError):
                named = parse_statement(receipt.head.statement).roster_hash
                receipt.roster, receipt.root_metadata = self._signed.get(named, (b"", b""))


@dataclass(slots=True)
class _Held:
    """A request whose answers have ended and whose receipts are not all there. `since` is in seconds."""

    request: Request
    finished: inference.Finished
    since: float


class Receipts:
    """The receipts of one ring's requests. Those that have come stay with the request."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Request, int]] = {}
        self._held: dict[str, _Held] = {}
        self._ranks = 1

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def begin_epoch(self, ranks: int) -> None:
        """An epoch of a ring of `ranks` members begins."""
        self._rows.clear()
        self._ranks = ranks

    def opened(self, row: int, request: Request, resume: inference.Resume | None) -> None:
        """A request is given to the head: all of it, or the answer that is resumed."""
        choices = range(request.choices) if resume is None else [resume.choice]
        if resume is not None:  # the head may have signed for the row that gave way
            self._rows = {row: of for row, of in self._rows.items() if of != (request, resume.choice)}
        for number, choice in enumerate(choices, row):
            self._rows[number] = request, choice
            request.progress.receipts[choice] = inference.Receipt(choice=choice)

    def unsigned(self, row: int) -> None:
        """The gateway has ended the row: its head does not know of an end, and signs nothing."""
        if row in self._rows:
            request, choice = self._rows.pop(row)
            request.progress.receipts[choice].head.missing = "ENDED_BY_GATEWAY"

    def take(self, part: control.RowReceipt) -> tuple[Request, int] | None:
        """Takes what a member has signed, and returns what it is of; None where nobody waits for it."""
        request, choice = self._rows.get(part.row, (None, 0))
        if request is None:
            return None
        receipt = request.progress.receipts[choice]
        kind = part.WhichOneof("part")
        if kind == "tail" and 0 < part.rank == self._ranks - 1:
            receipt.tail.CopyFrom(part.tail)
        elif kind == "head" and part.rank == 0 and not request.sealed:
            receipt.head.CopyFrom(part.head)
        elif kind == "sealed" and part.rank == 0 and request.sealed:
            receipt.head.SetInParent()
        else:
            return None
        return request, choice

    def hold(self, request: Request, finished: inference.Finished, now: float) -> None:
        """All answers of a request have ended."""
        self._held[request.id] = _Held(request, finished, now)

    def drop(self, request_id: str) -> None:
        """Nobody waits for the request any more."""
        self._held.pop(request_id, None)
        self._rows = {row: of for row, of in self._rows.items() if of[0].id != request_id}

    def complete(self, request_id: str) -> tuple[Request, inference.Finished] | None:
        """The end of a request that is held, with its receipts, once all are there."""
        held = self._held.get(request_id)
        if held is None or not all(
            self._whole(held.request, choice) for choice in range(held.request.choices)
        ):
            return None
        return self._release(held, "")

    def give_up(
        self, reason: str, *, before: float | None = None
    ) -> list[tuple[Request, inference.Finished]]:
        """The ends of requests that are held, those from `before` or earlier, with the receipts that came."""
        held = [each for each in self._held.values() if before is None or each.since <= before]
        return [self._release(each, reason) for each in held]

    def late(self, now: float) -> list[tuple[Request, inference.Finished]]:
        """As `give_up`, of those for which members have had LATE_SECONDS."""
        return self.give_up("RECEIPT_LATE", before=now - LATE_SECONDS)

    def _whole(self, request: Request, choice: int) -> bool:
        receipt = request.progress.receipts.get(choice)
        if receipt is None or not receipt.HasField("head"):
            return False
        return bool(receipt.head.missing) or self._ranks == 1 or receipt.HasField("tail")

    def _release(self, held: _Held, reason: str) -> tuple[Request, inference.Finished]:
        request, finished = held.request, held.finished
        del self._held[request.id]
        self._rows = {row: of for row, of in self._rows.items() if of[0] is not request}
        for choice in range(request.choices):
            receipt = request.progress.receipts.setdefault(choice, inference.Receipt(choice=choice))
            if not receipt.HasField("head"):
                receipt.head.missing = reason
            elif not self._whole(request, choice):
                receipt.tail.missing = reason
            finished.receipts.append(receipt)
        return request, finished
