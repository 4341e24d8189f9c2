"""The rows in each lane: state that the gateway and every member of a ring compute in the same way.

A pure state machine over the totally ordered steps of one epoch. `apply` validates a step against the state,
changes the state, and returns the step's work and its records on the ring. All members run this code, and the
digest of the result goes into the associated data of every record. Members that disagree therefore fail at
the first record instead of computing garbage.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sealring.mesh.ring.bad_step import bad_step
from sealring.mesh.ring.kept_prefixes import KeptPrefixes, Origin
from sealring.mesh.ring.lane_rows import LaneRows
from sealring.mesh.ring.prefix_names import NAME_BYTES
from sealring.v1 import control_pb2 as control

MAX_LANES = 512
MAX_CHUNKS = 64
MAX_PARAMS_BYTES = 1 << 20
MAX_CHOICES = 8
MAX_CHANGES = 8192
MAX_DRAFTS = 15
"""Draft tokens of a row in one step."""
MAX_DRAFTED = 16
"""Tokens that a step with drafts computes, of all its rows: memory for their logits is reserved."""
MAX_GAPS = 16_384
"""Gaps between the numbers of rows that have begun: a row whose prompt is read for long begins after later
ones, and a row that is refused never begins. With more a gateway could fill the members' memory. A ring
begins fewer rows while one prompt is read, which takes minutes at most."""
MAX_UNSETTLED = 128
"""Tokens of a row that steps with drafts may compute before a step settles them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a row's prompt; `last` when they end it and a token is sampled.

    A row's first chunk that starts above 0 has the first `start` tokens of the kept `prefix`. If it `takes`
    that, nothing else can begin with it any more. With `taps`, hidden states travel as in a ResolvedStep.
    """

    row: int
    start: int
    end: int
    last: bool
    params_bytes: int
    prefix: int = 0
    choices: int = 1
    takes: bool = False
    taps: bool = False

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
    """A row that is removed; `lane` is None if it was still in prefill, else `index` is its place there."""

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
    """The end of a row's open drafts: `accepted` sampled tokens count, and the last `surplus` tokens in the
    row's caches are cut."""

    row: int
    lane: int
    accepted: int
    surplus: int


@dataclass(frozen=True, slots=True)
class Keeping:
    """A prefix of the `held` tokens of a row that is kept under a number.

    `lane` is None while the row is in prefill, else `index` is its place there. `marks` are shorter lengths
    at which it can be reused as well, where caches cannot be cut. If it is `cut`, the row has a mark at its
    end.
    """

    prefix: int
    origin: Origin
    held: int
    lane: int | None
    index: int
    marks: tuple[int, ...] = ()
    cut: bool = False

    @property
    def row(self) -> int:
        return self.origin.row

    @property
    def tokens(self) -> int:
        return self.origin.tokens


@dataclass(frozen=True, slots=True)
class Adopting:
    """A prefix of an earlier epoch that is kept in this one, with `marks` as of a Keeping."""

    prefix: int
    origin: Origin
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Marking:
    """A row in prefill is marked at the `tokens` that it holds."""

    row: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Unmarking:
    """The `marks` of a row, or of a kept prefix, are given up; the other is 0."""

    row: int
    prefix: int
    marks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dropping:
    """A kept prefix that is dropped."""

    prefix: int


@dataclass(frozen=True, slots=True)
class Restoring:
    """A prefix that all members have read from disk, as `recall` of this epoch, and that is kept from now
    on. `name` is that of its tokens in the chain that was recalled."""

    prefix: int
    origin: Origin
    recall: int
    name: bytes

    @property
    def tokens(self) -> int:
        return self.origin.tokens


_RECALLED = 1 << 63
"""Origins of restored prefixes have the number of the recall above this one in the place of a row."""

_KEPT = (Keeping, Dropping, Restoring, Marking, Unmarking)
_ORDER = ((Adopting,), (Settling,), _KEPT, (Admission, Eviction))
Change: TypeAlias = (
    Admission | Eviction | Keeping | Adopting | Dropping | Settling | Restoring | Marking | Unmarking
)


@dataclass(frozen=True, slots=True)
class ResolvedStep:
    """One step with everything that a member derives from it.

    `changes` are in order: adoptions, settled rows, keeps and drops, all others. At most one of `chunks` and
    `rows` is non-empty. `sampled` are the rows that get a token, in the order of the token record on the
    closing edge (uint32 [len(sampled)]); a row with `drafts` appears once more for each, row by row. A step
    that `continues` computes a draft in place of its one row's last token. With `asks`, the gateway requests
    the likelihood that each source guesses the rows' next tokens. Behind each row's tokens the tail guesses
    as many as `guesses` says, which come round with them, row by row. `source` (`DraftSource`) made the
    drafts, and makes these guesses; 0 where there are none. With `taps`, what the layers return that a
    drafter at the tail reads travels there with the state of the one row. `digest` is 32 bytes over the
    composition after the changes and this step's work.
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
    source: control.DraftSource.ValueType = control.DRAFT_SOURCE_UNSPECIFIED
    guesses: int = 0
    taps: bool = False


_Work: TypeAlias = tuple[tuple[Chunk, ...], tuple[int, ...], tuple[int, ...], bool]
"""A step's chunks, its rows, the rows that get a token, and whether it continues drafts."""


class _Unused:
    """Numbers that can each be taken once, in any order. Beyond MAX_GAPS gaps, the numbers of the lowest gaps
    can no longer be taken."""

    def __init__(self) -> None:
        self._highest = 0
        self._gaps: list[tuple[int, int]] = []  # first and last number below the highest, rising

    def take(self, first: int, last: int) -> bool:
        """Takes the numbers `first` to `last`; False where one of them cannot be taken."""
        if first > self._highest:
            self._replace(len(self._gaps), 0, (self._highest + 1, first - 1))
            self._highest = last
            return True
        place = bisect_right(self._gaps, (first, self._highest)) - 1
        if place < 0 or self._gaps[place][1] < last:
            return False
        low, high = self._gaps[place]
        self._replace(place, 1, (low, first - 1), (last + 1, high))
        return True

    def _replace(self, place: int, count: int, *gaps: tuple[int, int]) -> None:
        self._gaps[place : place + count] = [(low, high) for low, high in gaps if low <= high]
        del self._gaps[: max(0, len(self._gaps) - MAX_GAPS)]


class Composition:
    """Rows in prefill, rows in `lanes` and `kept` prefixes of one epoch. Not thread safe.

    Others read `lanes` and `kept`; only steps and their changes change them.
    """

    def __init__(self, *, epoch: int, max_rows: int, prefill_chunk: int) -> None:
        self._epoch = epoch
        self._max_rows = max_rows
        self._prefill_chunk = prefill_chunk
        self._last_step = 0
        self._prefilling: dict[int, tuple[int, int]] = {}  # row -> (done, prompt tokens)
        self._choices: dict[int, int] = {}  # row in prefill -> 1 + its copies
        self._copies = 0  # still to be made
        self._unused = _Unused()
        self.lanes = LaneRows()
        self.kept = KeptPrefixes()
        self._digest_of_rows: bytes | None = None
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens in caches: of rows in prefill, of kept prefixes, and of lanes, where each row takes as much
        as the longest of its lane."""
        return self._tokens

    @property
    def marks(self) -> int:
        """The marks of rows and of kept prefixes; one that several have counts once."""
        return self.kept.marks.count

    def held(self, row: int) -> int:
        """Tokens in the caches of a row, also those that are not settled; 0 for an unknown row."""
        done, _ = self._prefilling.get(row, (0, 0))
        return done or self.lanes.held(row)

    @property
    def last_step(self) -> int:
        return self._last_step

    def prefilling(self) -> dict[int, tuple[int, int]]:
        """Row -> (tokens done, tokens of the prompt), for rows in no lane."""
        return dict(self._prefilling)

    @property
    def rows(self) -> int:
        """Rows that hold memory, or will once their prompt is prefilled."""
        return len(self._prefilling) + self._copies + len(self.lanes)

    def apply(self, step: control.Step) -> ResolvedStep:
        """Applies `step` to the state.

        Raises InvalidInput (BAD_STEP) if the step does not follow from the state. The state is then unusable
        and the epoch must end.
        """
        if step.number != self._last_step + 1:
            raise bad_step(f"step {step.number} follows step {self._last_step}")
        check_count(len(step.changes))
        changes = tuple(self.change(change) for change in step.changes)
        ranks = [rank(change) for change in changes]
        if ranks != sorted(ranks):
            raise bad_step("a prefix is adopted, kept or dropped after other changes of a step")
        chunks, rows, sampled, continues = self.work(step, changed=bool(changes))
        lane, decode = step.decode.lane if rows else None, step.decode
        return ResolvedStep(
            step.number,
            self._digest(lane, chunks, decode, changes),
            changes,
            chunks,
            lane,
            rows,
            sampled,
            decode.drafts,
            continues,
            decode.asks,
            decode.source,
            decode.guesses,
            decode.taps,
        )

    def work(self, step: control.Step, *, changed: bool) -> _Work:
        """Applies the work of a step whose changes are made, if there were any. Raises as `apply`."""
        self._last_step = step.number
        work = step.WhichOneof("work")
        chunks: tuple[Chunk, ...] = ()
        rows: tuple[int, ...] = ()
        sampled: tuple[int, ...] = ()
        continues = False
        if work == "prefill":
            self._digest_of_rows = None
            chunks = self._prefill(step.prefill.chunks)
            sampled = tuple(row for chunk in chunks for row in chunk.sampled)
        elif work == "decode":
            rows, sampled, continues = self._decode(step.decode)
            self._tokens += len(rows) * (1 + step.decode.drafts)
        if changed or chunks:
            alone = sum(done for done, _ in self._prefilling.values())
            self._tokens = alone + self.kept.tokens + self.lanes.tokens()
        return chunks, rows, sampled, continues

    def _decode(self, decode: control.Decode) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """The rows of a decode step, those that get a token, and whether it continues drafts."""
        lane, drafts = decode.lane, decode.drafts
        rows = self.lanes.of(lane)
        if not rows:
            raise bad_step(f"lane {lane} has no rows to decode")
        if decode.guesses and len(rows) * (1 + decode.guesses) > MAX_DRAFTED:
            raise bad_step(f"{decode.guesses} guesses for {len(rows)} rows are too many")
        if decode.taps and len(rows) > 1:
            raise bad_step(f"hidden states of {len(rows)} rows do not travel")
        if (drafts or decode.guesses) and not decode.source:
            raise bad_step("drafts are of no source")
        if drafts and len(rows) * (1 + drafts) > MAX_DRAFTED:
            raise bad_step(f"{drafts} drafts for {len(rows)} rows are too many")
        continues = bool(drafts and self.lanes.unsettled(rows[0]))
        sampled = self.lanes.decode(lane, drafts)
        for row in rows if drafts else ():
            if self.lanes.unsettled(row) > MAX_UNSETTLED:
                raise bad_step(f"row {row} has {self.lanes.unsettled(row)} tokens that are not settled")
        return rows, sampled, continues

    def change(self, change: control.Change) -> Change:
        """Makes one change of the step to come, which refers to the rows as the previous step left them.
        Raises as `apply`."""
        self._digest_of_rows = None
        kind = change.WhichOneof("change")
        if kind == "admit":
            return self._admit(change.admit.row, change.admit.lane)
        if kind == "evict":
            return self._evict(change.evict.row)
        if kind == "settle":
            row, tokens = change.settle.row, change.settle.tokens
            return Settling(row, *self.lanes.settle(row, tokens))
        if kind == "keep":
            return self._keep(change.keep)
        if kind == "adopt":
            return self._adopt(change.adopt)
        if kind == "drop":
            self.kept.give_up(change.drop.prefix)
            return Dropping(change.drop.prefix)
        if kind == "restore":
            return self._restore(change.restore)
        if kind == "mark":
            return self._mark(change.mark.row, change.mark.tokens)
        if kind == "unmark":
            row, prefix, marks = change.unmark.row, change.unmark.prefix, tuple(change.unmark.marks)
            self.kept.unmark(row, prefix, marks)
            return Unmarking(row, prefix, marks)
        raise bad_step("a change is empty")

    def _keep(self, keep: control.Keep) -> Keeping:
        held = self.held(keep.row)
        if not 1 <= keep.tokens <= held:
            raise bad_step(f"row {keep.row} does not hold {keep.tokens} tokens")
        origin, whole = Origin(self._epoch, keep.row, keep.tokens), keep.tokens == held
        marks, cut = self.kept.keep(keep.prefix, origin, keep.marks, whole=whole)
        lane, index = self.lanes.place(keep.row) or (None, 0)
        return Keeping(keep.prefix, origin, held, lane, index, marks, cut)

    def _adopt(self, adopt: control.Adopt) -> Adopting:
        origin = Origin(adopt.epoch, adopt.row, adopt.tokens)
        if self._last_step or origin.epoch >= self._epoch or not origin.tokens:
            raise bad_step(f"prefix {adopt.prefix} cannot be adopted")
        return Adopting(adopt.prefix, origin, self.kept.adopt(adopt.prefix, origin, adopt.marks))

    def _mark(self, row: int, tokens: int) -> Marking:
        done, _ = self._prefilling.get(row, (0, 0))
        if not done or done != tokens:
            raise bad_step(f"row {row} cannot be marked at {tokens} tokens")
        self.kept.mark(row, tokens)
        return Marking(row, tokens)

    def _restore(self, restore: control.Restore) -> Restoring:
        if restore.recall >= _RECALLED or not restore.tokens or len(restore.name) != NAME_BYTES:
            raise bad_step(f"prefix {restore.prefix} cannot be restored")
        origin = Origin(self._epoch, _RECALLED + restore.recall, restore.tokens)
        self.kept.restore(restore.prefix, origin, restore.name)
        return Restoring(restore.prefix, origin, restore.recall, restore.name)

    def _admit(self, row: int, lane: int) -> Admission:
        place = self._prefilling.pop(row, None)
        if place is None or place[0] != place[1]:
            raise bad_step(f"row {row} is not ready to be admitted")
        if lane >= MAX_LANES:
            raise bad_step(f"lane {lane} is above {MAX_LANES - 1}")
        self.lanes.admit(row, lane, place[1])
        return Admission(row, lane)

    def _evict(self, row: int) -> Eviction:
        self.kept.evicted(row)
        if row in self._prefilling:
            del self._prefilling[row]
            self._copies -= self._choices.pop(row, 1) - 1
            return Eviction(row, None, 0)
        return Eviction(row, *self.lanes.leave(row))

    def _prefill(self, chunks: Sequence[control.Chunk]) -> tuple[Chunk, ...]:
        if not 1 <= len(chunks) <= MAX_CHUNKS:
            raise bad_step(f"a prefill has {len(chunks)} chunks")
        if len({chunk.row for chunk in chunks}) != len(chunks):
            raise bad_step("a prefill names a row twice")
        return tuple(self._chunk(chunk) for chunk in chunks)

    def _chunk(self, chunk: control.Chunk) -> Chunk:
        if chunk.start == 0 or chunk.prefix:
            self._begin(chunk)
        elif chunk.params_bytes or chunk.choices or chunk.takes:
            raise bad_step("parameters, choices and a prefix come with the first chunk only")
        total = chunk.prompt_tokens
        if self._prefilling.get(chunk.row) != (chunk.start, total):
            raise bad_step(f"chunk of row {chunk.row} does not continue its prompt")
        if not chunk.start < chunk.end <= total or chunk.end - chunk.start > self._prefill_chunk:
            raise bad_step(f"chunk of row {chunk.row} has a length that is not allowed")
        if chunk.params_bytes > MAX_PARAMS_BYTES:
            raise bad_step(f"parameters of row {chunk.row} are too long")
        self._prefilling[chunk.row] = (chunk.end, total)
        last = chunk.end == total
        choices = self._choices.get(chunk.row, 1)
        if last:
            self._copy(chunk.row, total)
        return Chunk(
            *(chunk.row, chunk.start, chunk.end, last, chunk.params_bytes, chunk.prefix, choices),
            chunk.takes,
            chunk.taps,
        )

    def _copy(self, row: int, total: int) -> None:
        choices = self._choices.pop(row, 1)
        self._copies -= choices - 1
        for copy in range(row + 1, row + choices):
            self._prefilling[copy] = (total, total)

    def _begin(self, chunk: control.Chunk) -> None:
        choices = chunk.choices or 1
        if choices > MAX_CHOICES:
            raise bad_step(f"row {chunk.row} has more than {MAX_CHOICES} choices")
        if self.rows + choices > self._max_rows:
            raise bad_step(f"row {chunk.row} is one more than the {self._max_rows} rows of this ring")
        if chunk.prefix and not 1 <= chunk.start <= self.kept.held(chunk.prefix):
            raise bad_step(f"prefix {chunk.prefix} does not hold the first tokens of row {chunk.row}")
        if not self._unused.take(chunk.row, chunk.row + choices - 1):
            raise bad_step(f"row {chunk.row} is not a new row")
        if chunk.takes and not chunk.prefix:
            raise bad_step(f"row {chunk.row} takes no prefix")
        if chunk.prefix:
            self.kept.begin(chunk.row, chunk.prefix, chunk.start, takes=chunk.takes)
        self._choices[chunk.row] = choices
        self._copies += choices - 1
        self._prefilling[chunk.row] = (chunk.start, chunk.prompt_tokens)

    def _digest(
        self,
        lane: int | None,
        chunks: tuple[Chunk, ...],
        decode: control.Decode,
        changes: tuple[Change, ...],
    ) -> bytes:
        digest = hashlib.sha256(b"sealring composition v6")
        settled = [change for change in changes if isinstance(change, Settling)]
        place = -1 if lane is None else lane
        head = self._epoch, self._last_step, place, decode.drafts, len(settled), len(chunks)
        digest.update(struct.pack(">QQiIII", *head))
        if decode.taps:
            digest.update(b"taps")
        for change in settled:
            digest.update(struct.pack(">QI", change.row, change.surplus))
        for chunk in chunks:
            digest.update(
                struct.pack(">QIIIQ", chunk.row, chunk.start, chunk.end, chunk.params_bytes, chunk.prefix)
            )
            digest.update(struct.pack(">I", chunk.choices) + b"taps" * chunk.taps)
        digest.update(self._rows_digest())
        digest.update(self.kept.digest())
        return digest.digest()

    def _rows_digest(self) -> bytes:
        """Hash of the rows' places; cached for most steps, in which no row is admitted, evicted or
        prefilled."""
        if self._digest_of_rows is None:
            digest = hashlib.sha256(self.lanes.packed())
            digest.update(struct.pack(">I", len(self._prefilling)))
            for row in sorted(self._prefilling):
                digest.update(struct.pack(">QII", row, *self._prefilling[row]))
                digest.update(struct.pack(">I", self._choices.get(row, 1)))
            self._digest_of_rows = digest.digest()
        return self._digest_of_rows


def check_count(changes: int) -> None:
    """Raises InvalidInput (BAD_STEP) for more changes than a step may have."""
    if changes > MAX_CHANGES:
        raise bad_step(f"a step has more than {MAX_CHANGES} changes")


def rank(change: Change) -> int:
    """The place of a change among those of its step: a keep comes before the rows change places."""
    return next(at for at, kinds in enumerate(_ORDER) if isinstance(change, kinds))
