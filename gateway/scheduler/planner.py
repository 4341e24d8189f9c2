"""The steps of one epoch: the order in which rows are prefilled, stepped, admitted and evicted.

Lanes take turns, and each has at most two steps announced. While any run, prefill keeps to a budget
(gateway.scheduler.budget); when nothing decodes, prefill steps go back to back. While the first token of a
row is on its way, chunks are already as short as beside that row. Evictions that belong to no lane's own step
ride on the next step of any kind.

A step that samples nothing sends nothing back round the ring. It is done when the head says so, by StepDone
or by the number of steps that it has executed, or when the tokens of a later step are back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sealring.gateway.scheduler.board import Board
from sealring.gateway.scheduler.budget import MANY, PrefillBudget
from sealring.gateway.scheduler.drafting import Drafting, Rates
from sealring.gateway.scheduler.facts import RingFacts
from sealring.gateway.scheduler.lane import ANNOUNCED, Lane
from sealring.gateway.scheduler.memory import Ledger
from sealring.gateway.scheduler.prefill import PrefillLine
from sealring.gateway.scheduler.prefixes import PrefixCache
from sealring.gateway.scheduler.recalls import Recalls
from sealring.gateway.scheduler.request import Row
from sealring.mesh.errors import InvalidInput
from sealring.v1 import control_pb2 as control

AHEAD = 0.05
"""Seconds of prefill steps, one step at least, that the head has before it while nothing decodes. So it never
waits for the gateway, whose answer takes some milliseconds. A prompt that comes waits for them."""


@dataclass(slots=True, eq=False)
class Announced:
    """A step that is not done. `first` get their first token.

    `owed` counts the outputs that may still come, by row: one of each, or with drafts one for each token. So
    a head's outputs are bounded by what members were asked to compute.
    """

    number: int
    lane: Lane | None
    owed: dict[int, int] = field(default_factory=dict)
    first: Sequence[Row] = ()
    follows: bool = False  # a step of the same lane that was under way, so that they are a round apart
    drafts: int = 0
    guesses: int = 0  # that are made ahead, and come with its tokens
    seconds: float = 0.0  # of a prefill step in a stage, by the table
    brought: dict[int, int] = field(default_factory=dict)  # tokens by row, with drafts
    before: tuple[int, float] = (0, 0.0)  # prefill steps that were announced, and their seconds by the table

    @property
    def sampled(self) -> bool:
        return self.lane is not None or bool(self.first)

    def bring(self, outputs: Sequence[control.RowOutput]) -> None:
        """Counts outputs that have come."""
        for output in outputs if self.drafts else ():
            self.brought[output.row] = self.brought.get(output.row, 0) + 1


class StepPlanner:
    """Rows that have their memory enter by `start` and leave by `close`; `steps` yields what to announce."""

    def __init__(self, ring: RingFacts) -> None:
        self.ledger = Ledger(ring)
        self.board = Board(ring)
        self._ring = ring
        self._lanes: OrderedDict[int, Lane] = OrderedDict()  # by turns; one that is empty may get rows again
        self.prefixes = PrefixCache(
            self.ledger,
            self.board,
            ring.prefixes,
            ring.kept,
            ring.mark_every,
            stores=ring.recalls,
            prompts_alone=ring.prompts_alone,
        )
        self.recalls = Recalls(ring, self.prefixes)
        self._line = PrefillLine(self.prefixes.prepare, ring.prefill_chunk, ring.costs.chunk, self.board.held)
        self._budget = PrefillBudget(ring.costs, ring.prefill_chunk, ring.stages)
        self._drafting = Drafting(ring, self.board)
        self._before = (0, 0.0)
        self._rounds = 0.0
        self._under_way: dict[int, Announced] = {}  # by rising number

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    @property
    def unstarted(self) -> list[Row]:
        """Rows with memory of which no chunk has been announced."""
        return self._line.unstarted

    def start(self, row: Row) -> None:
        """Puts a row that has its memory in line."""
        self._line.add(row)

    def take_back(self, row: Row) -> None:
        """Takes its memory from a row of which no chunk has been announced, as if it had not entered."""
        self._line.discard(row)
        self.prefixes.forget(row)
        for each in row.group:
            self.ledger.release(each.number)

    def close(self, row: Row) -> None:
        """Takes no more tokens of the row; a step of its lane evicts it."""
        row.closed = True
        if row.number not in self.ledger:
            return
        self._line.discard(row)
        lane = self._lane(row)
        if not row.begun:
            self.prefixes.forget(row)
            self.ledger.release(row.number)
        elif row.number not in lane.rows:  # else it leaves with a step of its lane
            lane.ready = [each for each in lane.ready if each is not row]
            self._drop(row)

    def finished(self, row: Row, tokens: int, last: control.RowOutput) -> None:
        """A row has ended with `tokens` tokens generated; what it has computed is kept. `last` as in
        RowOutput. Raises InvalidInput (BAD_PREFIXES)."""
        self.prefixes.finished(row, self.board.counts(row.number), tokens, last)

    def due(self, number: int) -> Announced:
        """The step whose outputs come next. Raises InvalidInput (BAD_STEP) unless it has this number."""
        step = self._under_way.get(number)
        if step is None or self._earliest(step) is not step:
            raise InvalidInput(f"step {number} is not the one that is due", reason="BAD_STEP")
        return step

    def _earliest(self, step: Announced) -> Announced:
        """The first step under way that samples something; `step` itself where that samples nothing."""
        if not step.sampled:
            return step
        return next((each for each in self._under_way.values() if each.sampled), step)

    def done(self, number: int, now: float, *, rates: Rates, refuted: bool = False) -> Announced | None:
        """Takes a step as done, and with it all earlier ones that sample nothing; `now` is in seconds.
        `rates` are the probabilities that the next guess is right; `refuted`: as in StepDone.

        Returns None for a step that was done already. Raises InvalidInput (BAD_STEP) for one that was never
        announced, or is out of order.
        """
        step = self._under_way.get(number)
        if step is None:
            if 0 < number <= self.board.last_step:
                return None  # it was taken as done before
            raise InvalidInput(f"step {number} is not under way", reason="BAD_STEP")
        earliest = self._earliest(step)
        if earliest is not step:
            raise InvalidInput(f"step {number} was done before step {earliest.number}", reason="BAD_STEP")
        self.executed(number)
        self._under_way.pop(number, None)
        if step.lane is not None:
            running = self._running()
            if step.drafts:
                self._drafting.done(step.brought, running, now, rates=rates, refuted=refuted)
            else:
                self._plain(step, step.lane, running, now, rates)
            step.lane.done_at, step.lane.before = now, step.before
        return step

    def _plain(self, step: Announced, lane: Lane, running: Sequence[Lane], now: float, rates: Rates) -> None:
        """Learns from a decode step without drafts that is done."""
        prefills, seconds = step.before[0] - lane.before[0], step.before[1] - lane.before[1]
        lane.outstanding -= 1
        alone = step.follows and not prefills and self.ledger.rows == 1
        guesses = step.guesses
        self._drafting.plain(lane, running, now, follows=alone, rates=rates, guesses=guesses)
        if step.follows:
            self._budget.measure(max(0.0, now - lane.done_at), prefills, seconds, _sizes(running))

    def executed(self, number: int) -> None:
        """The head has executed all steps up to this one: those that sample nothing are done."""
        for step in list(self._under_way.values()):
            if step.number > number:
                return
            if not step.sampled:
                del self._under_way[step.number]

    def tokens_out(self, step: Announced) -> None:
        """Must follow once the outputs of a step that is done have been looked at, and rows closed.

        Raises InvalidInput (BAD_STEP) where one has brought fewer tokens than its steps: it would outgrow
        its memory on every member, or never end.
        """
        if step.lane is not None and step.lane.overdue:
            raise InvalidInput(
                f"step {step.number} brought too few tokens",
                reason="BAD_STEP",
                hint="gateway and head disagree; the epoch must end",
            )
        for row in step.first:
            if not row.closed:
                lane = self._lane(row)
                if not lane.running:
                    self._lanes.move_to_end(lane.number)
                lane.ready.append(row)

    def _running(self) -> list[Lane]:
        """The lanes of which somebody wants a token, in the order of their turns."""
        return [lane for lane in self._lanes.values() if lane.running]

    def sweep(self) -> None:
        """Frees lanes of which nothing more is wanted."""
        for lane in self._lanes.values():
            if lane.spent:
                lane.changed()
                for row in list(lane.rows.values()):
                    self._drop(row)

    def wanting(self) -> Iterator[Row]:
        """Rows near their limit that could go on with more memory, by the turns of their lanes."""
        for lane in self._lanes.values():
            yield from lane.wanting()

    def steps(self, waiting: int, *, pressed: bool) -> Iterator[control.Step]:
        """Everything that can be announced now. `waiting` requests have not begun; `pressed`: rows lack
        memory that those which have ended would free."""
        while step := self._next_prefill(waiting) or self._next_decode(waiting, pressed):
            yield step
        # members read blocks into the place of what is dropped before; an epoch's first step always drops
        due, board = self.recalls.due, self.board
        drops = due and (board.changes or not self.prefixes.has_room() or not board.last_step)
        if drops or (not self.under_way and board.evicts):
            yield self._announce(self._step([]))

    def _next_prefill(self, waiting: int) -> control.Step | None:
        tokens = self._chunk_tokens(waiting) if len(self._line) else 0
        if not tokens:
            return None
        self._line.prepare()
        while self.prefixes.make_room():
            self._line.prepare()  # what they expected is dropped
        step = self._step([])  # before the chunk is taken: it may drop the prefix that the chunk begins with
        pausing = self._budget.pausing
        row, chunk = self._line.take(tokens, pausing=pausing, planned=not pausing and bool(self._running()))
        if chunk.start == row.reused:
            row.request.progress.begin(row.reused)
            chunk.takes = self.prefixes.begin(row)
        chunk.taps = self._drafting.taps and row.drafts > 0 and self.ledger.rows + waiting == 1
        step.prefill.chunks.append(chunk)
        self._announce(step)
        self.prefixes.cut(row)
        steps, prefill = self._before
        seconds = self._ring.costs.chunk(chunk.end - chunk.start)
        self._before = steps + 1, prefill + seconds
        first = row.group if chunk.end == row.prompt_tokens else ()
        for each in first:
            each.begun, each.reused = True, row.reused
        owed = {each.number: 1 for each in first}
        self._under_way[step.number] = Announced(step.number, None, owed, first, seconds=seconds)
        return step

    def _chunk_tokens(self, waiting: int) -> int:
        """The most tokens that a chunk may have now; 0 for no chunk."""
        prompts, tokens, left = len(self._line), self._line.tokens, self._line.left
        if running := self._running():
            return self._budget.take(self._rounds, _sizes(running), prompts, tokens, waiting, left)
        ahead = self._ahead()
        if sum(ahead) >= AHEAD or len(ahead) >= MANY:
            return 0
        if self._line.idle:
            return self._budget.brief(AHEAD)
        soon = sum(not row.closed for step in self._under_way.values() for row in step.first)
        return self._budget.before(soon, prompts, tokens, waiting, left)

    def _ahead(self) -> list[float]:
        """Seconds of each prefill step that the head has not begun.

        It says so of steps that sample nothing. Of those that sample, as many are taken to be begun as there
        are stages.
        """
        prefills = [step for step in self._under_way.values() if step.lane is None]
        sampling = [step for step in prefills if step.sampled]
        waiting = [step for step in prefills if not step.sampled] + sampling[self._ring.stages :]
        return [step.seconds for step in waiting]

    def _next_decode(self, waiting: int, pressed: bool) -> control.Step | None:
        running = self._running()
        paused = self._budget.pausing and any(step.lane is None for step in self._under_way.values())
        for lane in running:
            if lane.outstanding >= (1 if paused else ANNOUNCED):
                return None
            step = self._decode(lane, running, waiting, pressed)
            if step is not None:
                self._rounds += 1 / len(running)
                self._lanes.move_to_end(lane.number)
                return step
        return None

    def _decode(
        self, lane: Lane, running: Sequence[Lane], waiting: int, pressed: bool
    ) -> control.Step | None:
        rows = self.ledger.rows + waiting
        plan = self._drafting.wanted(lane, running, rows)
        if plan is None:
            return None
        leaving, joining = lane.leaving(), lane.ready
        if lane.must_change(leaving, pressed or self.prefixes.has_pending):
            lane.ready = []
            lane.changed()
        else:
            leaving, joining = [], []
        step = self._step(leaving, joining)
        step.decode.lane, step.decode.drafts = lane.number, plan.drafts
        step.decode.asks = self._drafting.asks(lane, running, rows)
        step.decode.taps = self._drafting.taps and rows == 1 and step.decode.asks
        step.decode.guesses = guesses = self._drafting.guesses(lane, running, rows, plan)
        if plan.drafts or guesses:
            step.decode.source = plan.source if plan.drafts else self._drafting.ahead
        self._under_way[step.number] = Announced(
            step.number,
            lane,
            dict.fromkeys(lane.rows, 1 + plan.drafts),
            follows=lane.outstanding > 0,
            drafts=plan.drafts,
            guesses=guesses,
            before=self._before,
        )
        if plan.drafts:
            self._drafting.announced(lane, plan, guesses)
        else:
            lane.outstanding += 1
        return self._announce(step)

    def _step(self, leaving: list[Row], joining: Sequence[Row] = ()) -> control.Step:
        """The next step, to be given work, once the changes that are due are planned: settles, evictions,
        prefixes, admissions."""
        self._drafting.settle(self.prefixes.keeps_end)
        for row in leaving:
            self._drop(row)  # first: what is kept of it takes its place
        self.prefixes.make_room()
        for row in joining:
            self.board.admit(row, self.ledger.lane_of(row.number))
        return control.Step(number=self.board.last_step + 1)

    def _announce(self, step: control.Step) -> control.Step:
        self.board.announce(step)
        return step

    def _lane(self, row: Row) -> Lane:
        number = self.ledger.lane_of(row.number)
        if number not in self._lanes:
            self._lanes[number] = Lane(number, self.board)
        return self._lanes[number]

    def _drop(self, row: Row) -> None:
        self.ledger.release(row.number)
        self.prefixes.left(row)
        self.board.evict(row)


def _sizes(lanes: Sequence[Lane]) -> list[int]:
    """Rows of each lane; one at least, because those of a lane may still be joining."""
    return [max(1, len(lane.rows)) for lane in lanes] or [1]
