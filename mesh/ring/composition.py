"""Which rows are in which lane: state that the gateway and every member of a ring compute in the same way.

A pure state machine over the totally ordered steps of one epoch. `apply` validates a step against the
state so far, changes the state, and tells what the step computes and which records it puts on the ring.
All members run this same code, and the digest of the result goes into the associated data of every
record, so members that disagree fail at the first record instead of computing garbage.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from sealring.mesh.errors import InvalidInput
from sealring.v1 import control_pb2 as control

MAX_LANES = 512
MAX_CHUNKS = 64
MAX_PARAMS_BYTES = 1 << 20
MAX_PREFIXES = 1024
MAX_CHOICES = 8
MAX_CHANGES = 8192
MAX_DRAFTS = 15
"""Tokens that one step may guess."""
MAX_UNSETTLED = 128
"""Tokens of a row that steps with drafts may compute before the members are told how many of them count."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a row's prompt; `last` when they end it and a token is sampled.

    A row's first chunk that starts above 0 takes the first `start` tokens from the kept `prefix`.
    """

    row: int
    start: int
    end: int
    last: bool
    params_bytes: int
    prefix: int = 0
    choices: int = 1

    @property
    def sampled(self) -> range:
        """The rows that get their first token: this one, and its copies that begin with it."""
        return range(self.row, self.row + self.choices if self.last else self.row)

    @property
    def first(self) -> bool:
        return self.start == 0 or self.prefix != 0

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Eviction:
    """A row that goes; `lane` is None when it was still being prefilled, else `index` is its place."""

    row: int
    lane: int | None
    index: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A prefilled row that is appended to a lane."""

    row: int
    lane: int


@dataclass(frozen=True, slots=True)
class Settling:
    """Of the tokens that steps with drafts sampled for a row, so many are `accepted`; of those that they put
    into the row's caches, the last `surplus` go."""

    row: int
    lane: int
    accepted: int
    surplus: int


class Origin(NamedTuple):
    """What a kept prefix is, for all members and in all epochs: the first tokens of a row of an epoch."""

    epoch: int
    row: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Keeping:
    """The first of the `held` tokens of a row that are kept under a number.

    `lane` is None while the row is in prefill, else `index` is its place.
    """

    prefix: int
    origin: Origin
    held: int
    lane: int | None
    index: int

    @property
    def row(self) -> int:
        return self.origin.row

    @property
    def tokens(self) -> int:
        return self.origin.tokens


@dataclass(frozen=True, slots=True)
class Adopting:
    """A prefix of an earlier epoch that is kept in this one."""

    prefix: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class Dropping:
    """A kept prefix that goes."""

    prefix: int


_ORDER = ((Adopting,), (Settling,), (Keeping, Dropping), (Admission, Eviction))
Change: TypeAlias = Admission | Eviction | Keeping | Adopting | Dropping | Settling


@dataclass(frozen=True, slots=True)
class ResolvedStep:
    """One step with everything that a member derives from it.

    `changes` are in order: adoptions, settled rows, keeps and drops, all others. Exactly one of
    `chunks` and `rows` is non-empty, or neither. `sampled` are the rows that get a token, in the order of the
    token record on the closing edge (uint32 [len(sampled)]); a row with `drafts` is there once more for each.
    Where the step `continues`, it computes a draft in place of the row's last token. `asks`: the gateway
    wants to know how likely the head could guess its one row's next token.
    `digest` is 32 bytes over the composition after the changes and this step's work.
    """

    number: int
    digest: bytes
    changes: tuple[Change, ...]
    chunks: tuple[Chunk, ...]
    lane: int | None
    rows: tuple[int, ...]
    sampled: tuple[int, ...]
    drafts: int = 0
    continues: bool = False
    asks: bool = False


class Composition:
    """Rows in prefill, rows in lanes and kept prefixes of one epoch. Not thread safe."""

    def __init__(self, *, epoch: int, max_rows: int, prefill_chunk: int) -> None:
        self._epoch = epoch
        self._max_rows = max_rows
        self._prefill_chunk = prefill_chunk
        self._last_step = 0
        self._prefilling: dict[int, tuple[int, int]] = {}  # row -> (done, prompt tokens)
        self._choices: dict[int, int] = {}  # row in prefill -> itself and the copies that it will have
        self._copies = 0  # that are still to be made
        self._lanes: dict[int, list[int]] = {}
        self._lane_of: dict[int, int] = {}
        self._lane_steps: dict[int, int] = {}
        self._lane_base: dict[int, int] = {}  # row in a lane -> its tokens less the steps of its lane
        self._drafted: dict[int, int] = {}  # row that is not settled -> tokens since then
        self._prefixes: dict[int, Origin] = {}
        self._highest_row = 0
        self._highest_prefix = 0
        self._digest_of_rows: bytes | None = None
        self._digest_of_prefixes: bytes | None = None
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens that caches hold: of rows in prefill, of kept prefixes, and of each lane its rows times the
        longest of them, since a lane's caches are as long as its longest row for all."""
        return self._tokens

    @property
    def last_step(self) -> int:
        return self._last_step

    def lane_rows(self, lane: int) -> tuple[int, ...]:
        """The rows of a lane in order; empty when there is no such lane."""
        return tuple(self._lanes.get(lane, ()))

    def lanes(self) -> dict[int, tuple[int, ...]]:
        return {lane: tuple(rows) for lane, rows in sorted(self._lanes.items())}

    def prefilling(self) -> dict[int, tuple[int, int]]:
        """Row -> (tokens done, tokens of the prompt), for rows in no lane."""
        return dict(self._prefilling)

    def prefixes(self) -> dict[int, int]:
        """Kept prefix -> its tokens."""
        return {prefix: origin.tokens for prefix, origin in self._prefixes.items()}

    @property
    def rows(self) -> int:
        """Rows that hold memory, or will once their prompt is prefilled."""
        return len(self._prefilling) + self._copies + len(self._lane_of)

    def apply(self, step: control.Step) -> ResolvedStep:
        """Executes the bookkeeping of `step`.

        Raises InvalidInput with reason BAD_STEP when the step does not follow from the state; the state
        is then unusable and the epoch must end.
        """
        if step.number != self._last_step + 1:
            raise _bad(f"step {step.number} follows step {self._last_step}")
        if len(step.changes) > MAX_CHANGES:
            raise _bad(f"step {step.number} has more than {MAX_CHANGES} changes")
        self._last_step = step.number
        changes = tuple(self._change(change) for change in step.changes)
        _check_order(changes)
        work = step.WhichOneof("work")
        if changes or work == "prefill":
            self._digest_of_rows = None
        chunks: tuple[Chunk, ...] = ()
        lane: int | None = None
        rows: tuple[int, ...] = ()
        drafts, continues, asks = 0, False, False
        if work == "prefill":
            chunks = self._prefill(step.prefill.chunks)
            sampled = tuple(row for chunk in chunks for row in chunk.sampled)
        elif work == "decode":
            lane = step.decode.lane
            rows = self.lane_rows(lane)
            if not rows:
                raise _bad(f"lane {lane} has no rows to decode")
            drafts, asks = step.decode.drafts, step.decode.asks and len(rows) == 1
            if drafts:
                continues = rows[0] in self._drafted
                sampled = self._draft(rows, drafts)
            else:
                sampled = rows
                self._check_settled(rows[0])
            self._lane_steps[lane] = self._lane_steps.get(lane, 0) + 1 + drafts
        else:
            sampled = ()
        self._tokens = self._count() if changes or chunks else self._tokens + len(rows) * (1 + drafts)
        digest = self._digest(lane, chunks, drafts, changes)
        return ResolvedStep(
            step.number, digest, changes, chunks, lane, rows, sampled, drafts, continues, asks
        )

    def _draft(self, rows: tuple[int, ...], drafts: int) -> tuple[int, ...]:
        if len(rows) != 1 or drafts > MAX_DRAFTS:
            raise _bad(f"{drafts} drafts for {len(rows)} rows are too many")
        unsettled = self._drafted.get(rows[0], 0) + 1 + drafts
        if unsettled > MAX_UNSETTLED:
            raise _bad(f"row {rows[0]} has {unsettled} tokens that are not settled")
        self._drafted[rows[0]] = unsettled
        return rows * (1 + drafts)

    def _check_settled(self, row: int) -> None:
        if row in self._drafted:
            raise _bad(f"row {row} has drafts that are not settled")

    def _settle(self, row: int, tokens: int) -> Settling:
        computed = self._drafted.pop(row, 0)
        if not computed:
            raise _bad(f"row {row} has no drafts to settle")
        lane = self._lane_of[row]
        surplus = self._held(row, lane) - tokens
        if not 0 <= surplus < computed:
            raise _bad(f"row {row} cannot hold {tokens} tokens")
        self._lane_base[row] -= surplus
        return Settling(row, lane, computed - surplus, surplus)

    def _count(self) -> int:
        alone = sum(done for done, _ in self._prefilling.values())
        alone += sum(origin.tokens for origin in self._prefixes.values())
        return alone + sum(
            len(rows) * max(self._held(row, lane) for row in rows) for lane, rows in self._lanes.items()
        )

    def _change(self, change: control.Change) -> Change:
        kind = change.WhichOneof("change")
        if kind == "admit":
            return self._admit(change.admit.row, change.admit.lane)
        if kind == "evict":
            return self._evict(change.evict.row)
        if kind == "settle":
            return self._settle(change.settle.row, change.settle.tokens)
        self._digest_of_prefixes = None
        if kind == "keep":
            return self._keep(change.keep)
        if kind == "adopt":
            adopt = change.adopt
            return self._adopt(adopt.prefix, Origin(adopt.epoch, adopt.row, adopt.tokens))
        if kind == "drop":
            if self._prefixes.pop(change.drop.prefix, None) is None:
                raise _bad(f"prefix {change.drop.prefix} is not here to be dropped")
            return Dropping(change.drop.prefix)
        raise _bad("a change says nothing")

    def _keep(self, keep: control.Keep) -> Keeping:
        lane = self._lane_of.get(keep.row)
        if lane is None:
            index, held = 0, self._prefilling[keep.row][0] if keep.row in self._prefilling else 0
        else:
            index = self._lanes[lane].index(keep.row)
            held = self._held(keep.row, lane)
        if not 1 <= keep.tokens <= held:
            raise _bad(f"row {keep.row} does not hold {keep.tokens} tokens")
        origin = Origin(self._epoch, keep.row, keep.tokens)
        self._add_prefix(keep.prefix, origin)
        return Keeping(keep.prefix, origin, held, lane, index)

    def _adopt(self, prefix: int, origin: Origin) -> Adopting:
        if self._last_step != 1 or origin.epoch >= self._epoch or not origin.tokens:
            raise _bad(f"prefix {prefix} cannot be adopted")
        self._add_prefix(prefix, origin)
        return Adopting(prefix, origin)

    def _add_prefix(self, prefix: int, origin: Origin) -> None:
        if prefix <= self._highest_prefix:
            raise _bad(f"prefix {prefix} is not a new prefix")
        if len(self._prefixes) >= MAX_PREFIXES:
            raise _bad(f"prefix {prefix} is one more than {MAX_PREFIXES}")
        self._highest_prefix = prefix
        self._prefixes[prefix] = origin

    def _admit(self, row: int, lane: int) -> Admission:
        place = self._prefilling.pop(row, None)
        if place is None or place[0] != place[1]:
            raise _bad(f"row {row} is not ready to be admitted")
        if lane >= MAX_LANES:
            raise _bad(f"lane {lane} is above {MAX_LANES - 1}")
        for other in self._lanes.get(lane, ()):
            self._check_settled(other)
        self._lanes.setdefault(lane, []).append(row)
        self._lane_of[row] = lane
        self._lane_base[row] = place[1] - self._lane_steps.get(lane, 0)
        return Admission(row, lane)

    def _held(self, row: int, lane: int) -> int:
        """Tokens of a row in a lane that are in its cache."""
        return self._lane_base[row] + self._lane_steps.get(lane, 0)

    def _evict(self, row: int) -> Eviction:
        if row in self._prefilling:
            del self._prefilling[row]
            self._copies -= self._choices.pop(row, 1) - 1
            return Eviction(row, None, 0)
        lane = self._lane_of.get(row)
        if lane is None:
            raise _bad(f"row {row} is not here to be evicted")
        return Eviction(row, lane, self._leave(row, lane))

    def _leave(self, row: int, lane: int) -> int:
        """Takes a row out of its lane; returns the place that it had."""
        del self._lane_of[row]
        del self._lane_base[row]
        self._drafted.pop(row, None)
        rows = self._lanes[lane]
        index = rows.index(row)
        rows.pop(index)
        if not rows:
            del self._lanes[lane]
        return index

    def _prefill(self, chunks: Sequence[control.Chunk]) -> tuple[Chunk, ...]:
        if not 1 <= len(chunks) <= MAX_CHUNKS:
            raise _bad(f"a prefill has {len(chunks)} chunks")
        if len({chunk.row for chunk in chunks}) != len(chunks):
            raise _bad("a prefill names a row twice")
        return tuple(self._chunk(chunk) for chunk in chunks)

    def _chunk(self, chunk: control.Chunk) -> Chunk:
        if chunk.start == 0 or chunk.prefix:
            self._begin(chunk)
        elif chunk.params_bytes or chunk.choices:
            raise _bad("parameters and choices travel with the first chunk only")
        total = chunk.prompt_tokens
        if self._prefilling.get(chunk.row) != (chunk.start, total):
            raise _bad(f"chunk of row {chunk.row} does not continue its prompt")
        if not chunk.start < chunk.end <= total or chunk.end - chunk.start > self._prefill_chunk:
            raise _bad(f"chunk of row {chunk.row} has a length that is not allowed")
        if chunk.params_bytes > MAX_PARAMS_BYTES:
            raise _bad(f"parameters of row {chunk.row} are too long")
        self._prefilling[chunk.row] = (chunk.end, total)
        last = chunk.end == total
        choices = self._choices.get(chunk.row, 1)
        if last:
            self._copy(chunk.row, total)
        return Chunk(chunk.row, chunk.start, chunk.end, last, chunk.params_bytes, chunk.prefix, choices)

    def _copy(self, row: int, total: int) -> None:
        choices = self._choices.pop(row, 1)
        self._copies -= choices - 1
        for copy in range(row + 1, row + choices):
            self._prefilling[copy] = (total, total)

    def _begin(self, chunk: control.Chunk) -> None:
        if chunk.row <= self._highest_row:
            raise _bad(f"row {chunk.row} is not a new row")
        choices = chunk.choices or 1
        if choices > MAX_CHOICES:
            raise _bad(f"row {chunk.row} has more than {MAX_CHOICES} choices")
        if self.rows + choices > self._max_rows:
            raise _bad(f"row {chunk.row} is one more than the {self._max_rows} rows of this ring")
        if chunk.prefix and not 1 <= chunk.start <= self.prefixes().get(chunk.prefix, 0):
            raise _bad(f"prefix {chunk.prefix} does not hold the first tokens of row {chunk.row}")
        self._highest_row = chunk.row + choices - 1
        self._choices[chunk.row] = choices
        self._copies += choices - 1
        self._prefilling[chunk.row] = (chunk.start, chunk.prompt_tokens)

    def _digest(
        self, lane: int | None, chunks: tuple[Chunk, ...], drafts: int, changes: tuple[Change, ...]
    ) -> bytes:
        digest = hashlib.sha256(b"sealring composition v5")
        settled = [change for change in changes if isinstance(change, Settling)]
        head = (self._epoch, self._last_step, -1 if lane is None else lane, drafts, len(settled), len(chunks))
        digest.update(struct.pack(">QQiIII", *head))
        for change in settled:
            digest.update(struct.pack(">QI", change.row, change.surplus))
        for chunk in chunks:
            digest.update(
                struct.pack(">QIIIQ", chunk.row, chunk.start, chunk.end, chunk.params_bytes, chunk.prefix)
            )
            digest.update(struct.pack(">I", chunk.choices))
        digest.update(self._rows_digest())
        digest.update(self._prefixes_digest())
        return digest.digest()

    def _rows_digest(self) -> bytes:
        """Of who is where; kept while nobody comes, goes or is prefilled, which is most steps."""
        if self._digest_of_rows is None:
            digest = hashlib.sha256(struct.pack(">I", len(self._lanes)))
            for number in sorted(self._lanes):
                rows = self._lanes[number]
                digest.update(struct.pack(f">II{len(rows)}Q", number, len(rows), *rows))
            digest.update(struct.pack(">I", len(self._prefilling)))
            for row in sorted(self._prefilling):
                digest.update(struct.pack(">QII", row, *self._prefilling[row]))
                digest.update(struct.pack(">I", self._choices.get(row, 1)))
            self._digest_of_rows = digest.digest()
        return self._digest_of_rows

    def _prefixes_digest(self) -> bytes:
        """Of what is kept, and of which rows: or members could be made to keep different ones."""
        if self._digest_of_prefixes is None:
            digest = hashlib.sha256(struct.pack(">I", len(self._prefixes)))
            for prefix in sorted(self._prefixes):
                digest.update(struct.pack(">QQQI", prefix, *self._prefixes[prefix]))
            self._digest_of_prefixes = digest.digest()
        return self._digest_of_prefixes


def _check_order(changes: Sequence[Change]) -> None:
    """A keep is of the rows as the step before left them."""
    kinds = [next(at for at, kinds in enumerate(_ORDER) if isinstance(change, kinds)) for change in changes]
    if kinds != sorted(kinds):
        raise _bad("a prefix is adopted, kept or dropped after other changes of a step")


def _bad(message: str) -> InvalidInput:
    return InvalidInput(message, reason="BAD_STEP", hint="gateway and members disagree; the epoch must end")
