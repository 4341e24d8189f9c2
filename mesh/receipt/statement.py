"""The two statements of a receipt, as bytes: the head's over request and answer, the tail's over the tokens.

The head signs what it has read and sent. The tail knows neither: it signs the tokens that it has sampled,
under a binding that the head gave it. The binding covers the client's nonce, the request, the roster, the
ring and the epoch, so both statements are of the same answer. A statement is canonical JSON, signed by the
identity key under the label *receipt*.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

from sealring.mesh.crypto.encoding import (
    Fields,
    FormatError,
    Json,
    canonical_json,
    pack_fields,
    parse_json_object,
)
from sealring.mesh.errors import InvalidInput, ReceiptError
from sealring.mesh.receipt.digests import HASH_BYTES
from sealring.mesh.ring.composition import MAX_CHOICES

MIN_NONCE_BYTES, MAX_NONCE_BYTES = 16, 64
MAX_STATEMENT_BYTES = 64 << 10
MAX_MEMBERS = 512
MAX_EARLIER = 64
"""Earlier epochs that a receipt names at most; of more the first ones are left out."""

SPEC_VERSION = 1
_HEAD, _TAIL = "receipt", "receipt of a tail"
_BINDING = b"sealring/v1 receipt binding"
_U32 = (1 << 32) - 1


@dataclass(frozen=True)
class ReceiptMember:
    """A member of the ring: its layers as [first, end), and its trust score in the roster."""

    id: str
    layers: tuple[int, int]
    trust: int


@dataclass(frozen=True)
class Earlier:
    """An epoch that began the answer, with the number of tokens at its end. Whoever asked the head to go on
    says so; nobody has signed for these tokens."""

    ring: str
    epoch: int
    tokens: int


@dataclass(frozen=True)
class HeadStatement:
    """What the head signs for one choice. Hashes are 32 bytes; times are milliseconds since 1970.

    `request`, `text`, `reasoning`, `calls`, `order` and `sampled` are those of `mesh/receipt/digests.py`. Of
    the `tokens` of the answer `given` came from earlier epochs. `finish` is `stop` or `length`. Heads of
    protocol 10 sign for no `order`: then it is empty.
    """

    cluster: str
    roster_version: int
    roster_hash: bytes
    ring: str
    epoch: int
    deployment: str
    model_digest: bytes
    members: tuple[ReceiptMember, ...]
    row: int
    choice: int
    nonce: bytes
    request: bytes
    text: bytes
    reasoning: bytes
    calls: bytes
    order: bytes
    finish: str
    prompt_tokens: int
    tokens: int
    given: int
    sampled: bytes
    earlier: tuple[Earlier, ...]
    opened: int
    finished: int

    @property
    def binding(self) -> bytes:
        """What ties the tail's statement to this one, 32 bytes."""
        return binding(self.nonce, self.request, self.roster_hash, self.ring, self.epoch)

    def encode(self) -> bytes:
        """The bytes that the head signs."""
        return canonical_json({"type": _HEAD, "spec_version": SPEC_VERSION, **_contents(self)})


@dataclass(frozen=True)
class TailStatement:
    """The content that the tail signs: for the row that the head gave it with this binding, it has sampled
    `tokens` less `given` tokens, whose hash is `sampled`."""

    cluster: str
    ring: str
    epoch: int
    row: int
    binding: bytes
    member: str
    layers: tuple[int, int]
    model_digest: bytes
    given: int
    tokens: int
    sampled: bytes
    finished: int

    def encode(self) -> bytes:
        """The bytes that the tail signs."""
        return canonical_json({"type": _TAIL, "spec_version": SPEC_VERSION, **_contents(self)})


def tail_statement(head: HeadStatement, finished: int) -> TailStatement:
    """What the tail has to have signed, by the head's statement and the time that the tail names."""
    tail = head.members[-1]
    return TailStatement(
        head.cluster,
        head.ring,
        head.epoch,
        head.row,
        head.binding,
        tail.id,
        tail.layers,
        head.model_digest,
        head.given,
        head.tokens,
        head.sampled,
        finished,
    )


def binding(nonce: bytes, request: bytes, roster_hash: bytes, ring: str, epoch: int) -> bytes:
    """The bytes by which head and tail sign for one request in one epoch, 32 bytes."""
    bound = pack_fields(_BINDING, nonce, request, roster_hash, ring.encode(), epoch.to_bytes(8, "big"))
    return hashlib.sha256(bound).digest()


def parse_statement(data: bytes) -> HeadStatement:
    """The head's statement. Raises ReceiptError (RECEIPT_MALFORMED) for bytes that `encode` does not make."""
    try:
        said = parse_json_object(data, max_bytes=MAX_STATEMENT_BYTES)
        names = [field.name for field in fields(HeadStatement) if field.name != "order" or "order" in said]
        found = Fields(said, ("type", "spec_version", *names))
        if found.text("type") != _HEAD or found.integer("spec_version") != SPEC_VERSION:
            raise FormatError("it is of another type or version")
        statement = HeadStatement(
            cluster=found.text("cluster"),
            roster_version=found.integer("roster_version"),
            roster_hash=_hash(found, "roster_hash"),
            ring=found.text("ring"),
            epoch=found.integer("epoch"),
            deployment=found.text("deployment"),
            model_digest=_hash(found, "model_digest"),
            members=tuple(
                _place(item) for item in found.items("members", min_items=1, max_items=MAX_MEMBERS)
            ),
            row=found.integer("row"),
            choice=found.integer("choice", high=MAX_CHOICES - 1),
            nonce=found.binary("nonce", sizes=tuple(range(MIN_NONCE_BYTES, MAX_NONCE_BYTES + 1))),
            request=_hash(found, "request"),
            text=_hash(found, "text"),
            reasoning=_hash(found, "reasoning"),
            calls=_hash(found, "calls"),
            order=_hash(found, "order") if "order" in said else b"",
            finish=found.text("finish"),
            prompt_tokens=found.integer("prompt_tokens", high=_U32),
            tokens=found.integer("tokens", high=_U32),
            given=found.integer("given", high=_U32),
            sampled=_hash(found, "sampled"),
            earlier=tuple(_earlier(item) for item in found.items("earlier", max_items=MAX_EARLIER)),
            opened=found.integer("opened"),
            finished=found.integer("finished"),
        )
    except FormatError as error:
        raise _malformed(str(error)) from None
    if statement.encode() != data:
        raise _malformed("it is not in its canonical form")
    if statement.finish not in ("stop", "length") or statement.given > statement.tokens:
        raise _malformed("its figures cannot be")
    return statement


def check_nonce(nonce: bytes) -> None:
    """Raises InvalidInput (BAD_NONCE)."""
    if not MIN_NONCE_BYTES <= len(nonce) <= MAX_NONCE_BYTES:
        raise InvalidInput(
            f"a receipt's nonce has {MIN_NONCE_BYTES} to {MAX_NONCE_BYTES} bytes",
            hint="draw 16 random bytes for each request",
            reason="BAD_NONCE",
            param="receipt",
        )


def _contents(statement: HeadStatement | TailStatement) -> dict[str, object]:
    found = {field.name: getattr(statement, field.name) for field in fields(statement)}
    return {name: value for name, value in found.items() if name != "order" or value}


def _hash(found: Fields, name: str) -> bytes:
    return found.binary(name, sizes=(HASH_BYTES,))


def _place(item: Json) -> ReceiptMember:
    found = Fields(item, ("id", "layers", "trust"))
    low, high = found.each("layers", min_items=2, max_items=2)
    return ReceiptMember(
        found.text("id"), (low.integer("item"), high.integer("item")), found.integer("trust", high=_U32)
    )


def _earlier(item: Json) -> Earlier:
    found = Fields(item, ("ring", "epoch", "tokens"))
    return Earlier(found.text("ring"), found.integer("epoch"), found.integer("tokens", high=_U32))


def _malformed(why: str) -> ReceiptError:
    return ReceiptError(
        f"the head's statement is malformed: {why}",
        hint="do not rely on the answer: ask again",
        reason="RECEIPT_MALFORMED",
    )
