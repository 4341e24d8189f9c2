"""Receipts at a member: hashes of what its engine has sent or sampled, signed by its identity key.

Signing waits for an enclave, so it is done beside the event loop and once an answer has ended. A row whose
receipt cannot be signed has one that says why: the answer itself is not taken back.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from sealring.mesh.clock import Clock
from sealring.mesh.crypto.encoding import pack_fields
from sealring.mesh.crypto.identity import Signer
from sealring.mesh.crypto.keys import Label
from sealring.mesh.errors import InvalidInput, NotFound, SealringError
from sealring.mesh.receipt.digests import request_digest
from sealring.mesh.receipt.statement import (
    MAX_EARLIER,
    Earlier,
    HeadStatement,
    ReceiptMember,
    TailStatement,
    binding,
    check_nonce,
)
from sealring.mesh.roster.model import Roster
from sealring.node.daemon.plan import EpochPlan
from sealring.node.daemon.sealed_rows import SealedReply
from sealring.v1 import control_pb2, engine_pb2, inference_pb2

log = structlog.get_logger()

MAX_ROWS = 8192
"""Rows of one gateway for which the head may still have to sign; of more the oldest are forgotten."""

MAX_SIGNING = 256
"""Signatures that one stream may wait for. An enclave takes tens of milliseconds for each, and a challenge,
which waits among them, has 30 s."""

_FINISH: dict[int, str] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True)
class ReceiptKey:
    """What signs receipts: one for each daemon."""

    cluster: str
    member: str
    signer: Signer
    clock: Clock

    def now(self) -> int:
        """Milliseconds since 1970."""
        return int(self.clock() * 1000)

    async def sign(self, statement: bytes) -> bytes:
        """Raises a SealringError where the key is not available."""
        return await asyncio.to_thread(self.signer.sign, Label.RECEIPT, statement)


class SignedOnce:
    """The answers in clear that one epoch's head signs for, each once.

    Otherwise a gateway could ask again with one body and nonce until it likes the answer. Claims stand
    in a Bloom filter, whose size is fixed: at most one new answer in 100,000 is taken for an old one.
    Beyond MAX_CLAIMS nothing is signed in clear until the next epoch. Sealed requests have ReplayGuard.
    """

    MAX_CLAIMS = 1 << 20
    _BITS = 1 << 25

    def __init__(self) -> None:
        self._claims = 0
        self._filter = bytearray()

    def claim(self, nonce: bytes, request: bytes, choice: int) -> str:
        """Takes an answer, and returns why it is not to be signed for, or nothing."""
        if self._claims >= self.MAX_CLAIMS:
            return "EPOCH_HAS_SIGNED_ENOUGH"
        self._filter = self._filter or bytearray(self._BITS // 8)
        hashed = hashlib.sha256(pack_fields(nonce, request, choice.to_bytes(4, "big"))).digest()
        places = [place % self._BITS for place in struct.unpack(">8I", hashed)]
        if all(self._filter[place // 8] >> place % 8 & 1 for place in places):
            return "SIGNED_BEFORE"
        for place in places:
            self._filter[place // 8] |= 1 << place % 8
        self._claims += 1
        return ""


@dataclass(frozen=True)
class Asked:
    """A request that asks for receipts, as the head has read it. `reply` seals them; None in clear.

    `unsigned` says why a choice is not signed for.
    """

    nonce: bytes
    request: bytes
    roster: Roster
    earlier: tuple[Earlier, ...]
    choice: int
    first_row: int
    opened: int
    reply: SealedReply | None
    unsigned: Mapping[int, str]


class ReceiptRows:
    """The rows of one gateway's stream that ask for receipts."""

    def __init__(
        self,
        key: ReceiptKey,
        plan: EpochPlan,
        signed_once: SignedOnce,
        send: Callable[[control_pb2.RowReceipt], None],
    ) -> None:
        self._key, self._plan, self._signed_once, self._send = key, plan, signed_once, send
        self._asked: OrderedDict[int, Asked] = OrderedDict()
        self._signing: set[asyncio.Task[None]] = set()

    def open(
        self,
        open_row: control_pb2.OpenRow,
        prompt: inference_pb2.Prompt,
        nonce: bytes,
        roster: Roster,
        reply: SealedReply | None,
    ) -> bytes:
        """What binds the receipts of the row and its copies, 32 bytes. Raises InvalidInput (BAD_NONCE)."""
        check_nonce(nonce)
        resume, request = prompt.resume, request_digest(prompt, open_row.max_tokens)
        choices = range(resume.choice, resume.choice + (open_row.choices or 1))
        # The same request with and without `unnamed` is signed once: verifiers take either. They take none
        # that goes on, because nobody has signed for its first tokens.
        once = request_digest(prompt, open_row.max_tokens, unnamed=False) if reply is None else b""
        claims = {
            one: self._signed_once.claim(nonce, once, one)
            for one in choices
            if reply is None and not resume.tokens
        }
        asked = Asked(
            nonce,
            request,
            roster,
            tuple(Earlier(one.ring, one.epoch, one.tokens) for one in resume.earlier[-MAX_EARLIER:]),
            resume.choice,
            open_row.row,
            self._key.now(),
            reply,
            claims,
        )
        for row in range(open_row.row, open_row.row + len(choices)):
            self._asked[row] = asked
        while len(self._asked) > MAX_ROWS:
            self._asked.popitem(last=False)
        return binding(nonce, request, roster.hash, self._plan.ring, self._plan.epoch)

    def forget(self, row: int) -> None:
        """The row is refused or discarded."""
        self._asked.pop(row, None)

    def ended(self, digests: engine_pb2.RowDigests) -> None:
        """The engine says what is to be signed for a row."""
        asked = self._asked.pop(digests.row, None)
        if asked is None and self._plan.rank == 0:
            return
        task = asyncio.get_running_loop().create_task(self._sign(digests, asked))
        self._signing.add(task)
        task.add_done_callback(self._signing.discard)

    def close(self) -> None:
        """Signs nothing more."""
        for task in self._signing:
            task.cancel()

    async def _sign(self, digests: engine_pb2.RowDigests, asked: Asked | None) -> None:
        receipt = control_pb2.RowReceipt(row=digests.row)
        if asked is None:
            receipt.tail.CopyFrom(await self._tail(digests))
        elif asked.reply is None:
            receipt.head.CopyFrom(await self._head(digests, asked))
        else:
            head = await self._head(digests, asked)
            receipt.sealed = asked.reply.seal_receipt(digests.row, head)
        self._send(receipt)

    async def _head(self, digests: engine_pb2.RowDigests, asked: Asked) -> inference_pb2.HeadReceipt:
        if why := asked.unsigned.get(asked.choice + digests.row - asked.first_row):
            return inference_pb2.HeadReceipt(missing=why)
        try:
            statement = self._statement(digests, asked).encode()
            return inference_pb2.HeadReceipt(statement=statement, signature=await self._signature(statement))
        except SealringError as error:
            return inference_pb2.HeadReceipt(missing=_failed(error))

    async def _tail(self, digests: engine_pb2.RowDigests) -> inference_pb2.TailReceipt:
        if not digests.sampled:
            return inference_pb2.TailReceipt(missing="NOT_SAMPLED")
        plan, finished = self._plan, self._key.now()
        statement = TailStatement(
            self._key.cluster,
            plan.ring,
            plan.epoch,
            digests.row,
            digests.binding,
            self._key.member,
            plan.layers,
            bytes.fromhex(plan.model_digest),
            digests.given,
            digests.tokens,
            digests.sampled,
            finished,
        )
        try:
            signature = await self._signature(statement.encode())
        except SealringError as error:
            return inference_pb2.TailReceipt(missing=_failed(error))
        return inference_pb2.TailReceipt(finished=finished, signature=signature)

    async def _signature(self, statement: bytes) -> bytes:
        if len(self._signing) > MAX_SIGNING:
            raise InvalidInput("too many receipts wait for a signature", reason="TOO_MANY_RECEIPTS")
        return await self._key.sign(statement)

    def _statement(self, digests: engine_pb2.RowDigests, asked: Asked) -> HeadStatement:
        """Raises NotFound (NOT_IN_RING) where the roster that the client knows has another ring."""
        plan, roster = self._plan, asked.roster
        ring = roster.ring(plan.ring)
        if ring.members != plan.members or ring.model_digest.hex() != plan.model_digest:
            raise NotFound("the roster has another ring of this name", reason="RING_CHANGED")
        return HeadStatement(
            cluster=roster.cluster,
            roster_version=roster.version,
            roster_hash=roster.hash,
            ring=plan.ring,
            epoch=plan.epoch,
            deployment=plan.deployment,
            model_digest=ring.model_digest,
            members=tuple(
                ReceiptMember(one.id, one.layers, roster.member(one.id).trust) for one in ring.members
            ),
            row=digests.row,
            choice=asked.choice + digests.row - asked.first_row,
            nonce=asked.nonce,
            request=asked.request,
            text=digests.text,
            reasoning=digests.reasoning,
            calls=digests.calls,
            order=digests.order,
            finish=_FINISH.get(digests.finish, "stop"),
            prompt_tokens=digests.prompt_tokens,
            tokens=digests.tokens,
            given=digests.given,
            sampled=digests.sampled,
            earlier=asked.earlier,
            opened=asked.opened,
            finished=max(self._key.now(), asked.opened),  # the clock may have been set right meanwhile
        )


def _failed(error: SealringError) -> str:
    log.warning("receipt_not_signed", reason=error.reason, why=error.message)
    return error.reason
