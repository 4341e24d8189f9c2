"""Sealed prompts at the head: opened on their way to the engine, the answers sealed on their way back.

The engine sees no difference. A prompt is opened only for the ring that its sender verified. The answer of a
row that came sealed leaves the daemon sealed or not at all, however a gateway uses row numbers.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.errors import (
    EnvelopeError,
    FailedPrecondition,
    InvalidInput,
    ResourceExhausted,
    SealringError,
    Unavailable,
)
from sealring.mesh.prompt.sealed import ReplayGuard, ReplySealer, RequestInfo, SealingKey
from sealring.mesh.roster.model import RingMember, Roster
from sealring.node.daemon.plan import EpochPlan
from sealring.v1 import control_pb2, engine_pb2, inference_pb2

CHUNK_BYTES = 64
"""The body of a chunk is padded to a multiple of this, and by as much again for each log-probability in it:
otherwise its length would reveal the length of the tokens."""

MAX_UNIT_BYTES = 64 << 10
"""The largest padding unit, which the log-probabilities of a whole prompt reach."""

_MAX_CLIENT_BYTES = 32
MAX_ROSTERS = 256
MAX_ROWS = 8192
"""Rows that may be open on a control stream that has carried a sealed one."""


@dataclass(frozen=True)
class _View:
    """This node and its rings in one roster."""

    rings: dict[str, tuple[tuple[RingMember, ...], int]]
    """Members and trust, by the name of the ring."""

    sealing_key: bytes
    roster: Roster


class Unsealer:
    """Opens sealed prompts; one per daemon, because request ids are single use at the head."""

    def __init__(self, key: SealingKey, own_id: str, *, clock: Clock = wall_clock) -> None:
        self._key = key
        self._own_id = own_id
        self._clock = clock
        self._guard = ReplayGuard(clock=clock)
        self._views: OrderedDict[bytes, _View] = OrderedDict()

    def learn(self, roster: Roster) -> None:
        """Takes the newest verified roster; clients may seal by it from now on."""
        rings = roster.rings_of(self._own_id)
        if not rings:
            self._views.clear()
            return
        key = roster.member(self._own_id).sealing_key
        places = {ring.id: (ring.members, ring.min_trust) for ring in rings}
        self._views[roster.hash] = _View(places, key, roster)
        self._views.move_to_end(roster.hash)
        while len(self._views) > MAX_ROSTERS:
            self._views.popitem(last=False)

    def open(
        self, open_row: control_pb2.OpenRow, plan: EpochPlan
    ) -> tuple[inference_pb2.SealedPrompt, SealedReply]:
        """The opened prompt, and the sealer of its answer.

        Raises Unavailable (SEALED_BY_OTHER_ROSTER), EnvelopeError (ENVELOPE_*), ResourceExhausted
        (REPLAY_GUARD_FULL), FailedPrecondition (TRUST_BELOW_FLOOR), InvalidInput (BAD_REQUEST_INFO).
        """
        to = open_row.envelope.sealed_for
        info = RequestInfo(plan.deployment, to.request_id, to.expires, to.roster_hash)
        trust = self._current_trust(info.roster_hash, plan)
        opened = self._key.open_request(
            open_row.envelope.sealed,
            info,
            self._guard,
            epoch=plan.epoch,
            client=open_row.client[:_MAX_CLIENT_BYTES].hex(),
        )
        try:
            body = _sealed_prompt(opened.body, open_row, trust)
        except SealringError:
            opened.unclaim()
            raise
        return body, SealedReply(opened.reply, open_row.row, open_row.choices or 1, opened.unclaim)

    def roster(self, named: bytes, plan: EpochPlan) -> Roster:
        """The roster with this hash, or the newest one where that has another ring: an answer may go on in a
        ring that has moved since it was asked for.

        Raises Unavailable (SEALED_BY_OTHER_ROSTER) where none has rings of this node.
        """
        view = self._views.get(named)
        moved = view is None or view.rings.get(plan.ring, ((), 0))[0] != plan.members
        if view is None or moved or view.roster.expired(self._clock()):
            view = next(reversed(self._views.values()), None)
        if view is None:
            raise _other_roster()
        return view.roster

    def _current_trust(self, roster_hash: bytes, plan: EpochPlan) -> int:
        """The ring's trust in the newest roster, if its members are those that the sender verified."""
        named = self._views.get(roster_hash)
        if named is None or named.roster.expired(self._clock()):
            raise _other_roster()
        before, now = (
            view.rings.get(plan.ring, ((), 0)) for view in (named, next(reversed(self._views.values())))
        )
        same = (
            before[0] == now[0] == plan.members
            and named.sealing_key == self._key.public_key
            and before[1] <= now[1]
        )
        if not same:
            raise _other_roster()
        return now[1]


def _sealed_prompt(data: bytes, open_row: control_pb2.OpenRow, trust: int) -> inference_pb2.SealedPrompt:
    """The prompt, if it agrees with the row in clear. Raises EnvelopeError, FailedPrecondition."""
    try:
        body = inference_pb2.SealedPrompt.FromString(data)
    except DecodeError:
        raise EnvelopeError("sealed request holds no prompt") from None
    if body.max_tokens != open_row.max_tokens:
        raise EnvelopeError("max_tokens is not what the client sealed", reason="ENVELOPE_CHANGED")
    if (body.choices or 1) != (open_row.choices or 1):
        raise EnvelopeError("the number of choices is not what the client sealed", reason="ENVELOPE_CHANGED")
    if trust < body.min_trust:
        raise FailedPrecondition(
            f"the request demands a trust of {body.min_trust} and the ring has {trust}",
            hint="lower min_trust, or ask for a model on members of a higher trust level",
            reason="TRUST_BELOW_FLOOR",
            param="min_trust",
            min_trust=trust,
        )
    return body


class SealedReply:
    """The reply to one sealed prompt. Its choices are consecutive rows from `row` on."""

    def __init__(
        self, sealer: ReplySealer, row: int, choices: int, unclaim: Callable[[], None] = lambda: None
    ) -> None:
        """`unclaim` releases the request's id when the row is refused."""
        self.prompt_tokens = 0
        self.unclaim = unclaim
        self._row = row
        self._unfinished = choices
        self._begun = False
        self._sealer = sealer
        self.receipts = False
        """Whether a chunk with the receipt of each choice comes last."""

    def seal(self, output: control_pb2.RowOutput) -> None:
        """Replaces the content of an output by the next sealed chunk."""
        delta = inference_pb2.SealedDelta(
            text=output.delta.text,
            tokens=output.delta.tokens,
            logprobs=output.delta.logprobs,
            choice=output.row - self._row,
            token=output.token,
            held=output.held,
            parsed=output.delta.parsed if output.delta.HasField("parsed") else None,
        )
        _clear(output)
        if not self._begun:  # an answer in Anthropic's form begins with it
            self._begun, delta.prompt_tokens = True, self.prompt_tokens
        if output.finish:
            delta.finish, delta.prompt_tokens = output.finish, self.prompt_tokens
            self._unfinished -= not self.receipts
        output.delta.sealed = self._sealer.seal(padded(delta), last=not self._unfinished)

    def seal_receipt(self, row: int, receipt: inference_pb2.HeadReceipt) -> bytes:
        """The chunk with the receipt of one choice, its last."""
        self._unfinished -= 1
        delta = inference_pb2.SealedDelta(choice=row - self._row, receipt=receipt)
        return self._sealer.seal(padded(delta), last=not self._unfinished)


@dataclass(slots=True, eq=False)
class _Opened:
    """Rows of one request. `begun` says that one of them has produced output; each row leaves by itself."""

    rows: range
    reply: SealedReply | None
    begun: bool = False


class SealedRows:
    """The open rows of one control stream: which are sealed, which are clear.

    Rows before the first sealed one are clear. After it, the output of an unknown row is emptied.
    """

    def __init__(self) -> None:
        self._last = 0
        self._first_sealed = 0
        self._rows: dict[int, _Opened] = {}
        self._leaving: deque[tuple[int, int]] = deque()

    def check(self, row: int, choices: int = 1) -> None:
        """Raises InvalidInput (BAD_MESSAGE) unless the `choices` row numbers from `row` on are new."""
        if row <= self._last:
            raise InvalidInput("row numbers do not rise", reason="BAD_MESSAGE")
        self._last = row + choices - 1

    def add(self, row: int, reply: SealedReply | None, choices: int = 1) -> None:
        """Adds rows on their way to the engine; `reply` is None for clear ones. Raises ResourceExhausted."""
        if reply is not None and not self._first_sealed:
            self._first_sealed = row
        if self._first_sealed:
            if len(self._rows) + choices > MAX_ROWS:
                raise ResourceExhausted("too many rows are open", reason="TOO_MANY_ROWS")
            opened = _Opened(range(row, row + choices), reply)
            self._rows.update(dict.fromkeys(opened.rows, opened))

    def discard(self, row: int) -> None:
        """Forgets a row that no later step names. Output that it still produces is emptied."""
        opened = self._rows.pop(row, None)
        if opened is not None and not opened.begun:
            for other in opened.rows:
                self._rows.pop(other, None)

    def evict(self, step: control_pb2.Step) -> None:
        """Notes the rows that leave with a step. Output of earlier steps is still on its way."""
        if self._rows:
            for change in step.changes:
                if change.WhichOneof("change") == "evict":
                    self._leaving.append((step.number, change.evict.row))

    def seal(self, event: bytes) -> bytes:
        """A serialized EngineEvent as it may leave the daemon: unchanged until a sealed row was opened."""
        if not self._first_sealed:
            return event
        parsed = engine_pb2.EngineEvent.FromString(event)
        kind = parsed.WhichOneof("event")
        if kind == "done":
            self._done(parsed.done)
            return parsed.SerializeToString()
        if kind == "opened" and (opened := self._rows.get(parsed.opened.row)) is not None:
            if opened.reply is not None:
                opened.reply.prompt_tokens = parsed.opened.prompt_tokens - parsed.opened.answered
        elif kind == "refused":
            refused = self._rows.get(parsed.refused.row)
            if refused is not None and refused.reply is not None and not refused.begun:
                refused.reply.unclaim()
            self.discard(parsed.refused.row)
        return event

    def _done(self, done: control_pb2.StepDone) -> None:
        for output in done.outputs:
            if output.row < self._first_sealed:
                continue
            opened = self._rows.get(output.row)
            if opened is None:
                _clear(output)
                continue
            opened.begun = True
            if opened.reply is not None:
                opened.reply.seal(output)
        while self._leaving and self._leaving[0][0] <= done.step:
            self.discard(self._leaving.popleft()[1])


def _clear(output: control_pb2.RowOutput) -> None:
    """Leaves nothing that a prompt or an answer says."""
    left = inference_pb2.Delta(tokens=output.delta.tokens)
    names = {name: getattr(output, name) for name in ("row", "finish", "prefixes", "ends")}
    output.CopyFrom(control_pb2.RowOutput(delta=left, **names))


def padded(delta: inference_pb2.SealedDelta) -> bytes:
    """The serialized delta, padded to a multiple of its unit."""
    unit = CHUNK_BYTES * (1 + sum(1 + len(one.top) for one in (*delta.logprobs, *delta.held)))
    unit = min(unit, MAX_UNIT_BYTES)
    missing = -delta.ByteSize() % unit
    if missing:
        while (length := field_length(missing)) is None:
            missing += unit
        delta.padding = bytes(length)
    return delta.SerializeToString()


def field_length(size: int) -> int | None:
    """The length of a bytes field that takes `size` bytes with its tag and length; None if no length does."""
    for prefix in (1, 2, 3):
        length = size - 1 - prefix
        if length > 0 and -(-length.bit_length() // 7) == prefix:
            return length
    return None


def _other_roster() -> Unavailable:
    return Unavailable(
        "the prompt was sealed under another roster than the ring uses",
        hint="fetch the roster and seal again",
        reason="SEALED_BY_OTHER_ROSTER",
    )
