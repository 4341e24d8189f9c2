"""The scheduler against a model ring that executes its steps with the members' own composition."""

from __future__ import annotations

import math
import zlib
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from requestkit import request_of
from ringfacts import member_with, ring_of

from sealring.gateway.scheduler import (
    LOOKUP,
    MAX_ATTEMPTS,
    NO_MODEL,
    AnnounceStep,
    Begin,
    Deliver,
    DiscardRow,
    Fail,
    Finish,
    OpenRow,
    Request,
    RingFacts,
    Scheduler,
    SourceFacts,
    StepCosts,
    rounded,
)
from sealring.gateway.scheduler.budget import MANY
from sealring.mesh.errors import EpochEnded, InvalidInput
from sealring.mesh.ring import (
    DRAFT_ROWS,
    MAX_RUNS,
    Adopting,
    Chunk,
    Composition,
    Dropping,
    Ends,
    Eviction,
    Keeping,
    Marking,
    Names,
    Origin,
    PrefixNames,
    ResolvedStep,
    Settling,
    Unmarking,
    ends,
)
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

CONTEXT = 4096


Content = tuple[int, int, str]
"""Which of some texts a prompt begins with, for how many tokens, and whose the rest is."""


Images = tuple[tuple[int, int], ...]
"""First token of each image of a prompt, and the token behind its last."""


IMAGES: list[Images] = [
    (),
    ((0, 60), (60, 64), (90, 91), (120, 136), (500, 700)),
    ((63, 65), (100, 300), (320, 512), (690, 710)),
    tuple((at, at + 15) for at in range(3, 1400, 16)),
    ((1, 1400),),
]
"""Those of each text come first. Some are longer than chunks or next to others, and prompts part in some."""


def images_of(text: int, shared: int, tokens: int, rest: Images) -> Images:
    """The images of a prompt: of its text, and of what follows. Prompts may part inside an image."""
    begin = tuple((start, end) for start, end in IMAGES[text] if start < shared and end <= tokens)
    after = max([shared, *(end for _, end in begin)])
    return begin + tuple((start, end) for start, end in rest if start >= after and end <= tokens)


def tokens_of(content: Content, tokens: int, after: int = 0) -> bytes:
    text, shared, rest = content
    begin, end = text.to_bytes(4, "big"), zlib.crc32(f"{text} {shared} {rest}".encode()).to_bytes(4, "big")
    return (begin * shared + end * max(0, tokens - shared))[4 * after : 4 * tokens]


KEY = bytes(32)


def token_of(request: str, choice: int, position: int) -> int:
    """What an answer says, whatever happens to its ring."""
    return hash((int(request[1:]), choice, position)) % 50_000


TOLD_AT_ONCE = 3
"""Tokens that are held back and then sent together, if a request asks for log-probabilities."""


def state_of(composition: Composition) -> object:
    lanes, prefilling = composition.lanes.all(), composition.prefilling()
    rows = [*prefilling, *(row for lane in lanes.values() for row in lane)]
    return (
        lanes,
        prefilling,
        [(row, composition.held(row), composition.lanes.unsettled(row)) for row in rows],
        composition.kept.all(),
        (composition.rows, composition.tokens, composition.marks),
    )


class ModelRing:
    """Executes steps in order with mesh.ring.composition; knows how long every answer is."""

    def __init__(
        self,
        facts: RingFacts,
        seed: int,
        earlier: dict[Origin, tuple[Content, int]],
        earlier_marks: dict[Origin, set[int]],
    ) -> None:
        self.facts = facts
        self.earlier = earlier
        self.earlier_marks = earlier_marks
        self.composition = Composition(epoch=seed, max_rows=facts.max_rows, prefill_chunk=facts.prefill_chunk)
        self.seed = seed
        self.opening: deque[OpenRow] = deque()
        self.known: dict[int, Request] = {}
        self.choices: dict[int, int] = {}
        self.held: dict[int, list[inference.TokenLogprob]] = {}
        self.answered: dict[int, int] = {}
        self.prompts: dict[int, int] = {}
        self.limits: dict[int, int] = {}
        self.stops: dict[int, int] = {}
        self.generated: dict[int, int] = {}
        self.finished: set[int] = set()
        self.running: deque[tuple[int, tuple[int, ...], int | None, int]] = deque()
        self.lengths: dict[int, int] = {}
        self.decodes_since_prefill: set[int] = set()
        self.prefilled_before = False
        self.work: list[tuple[str, int | None]] = []
        self.contents: dict[int, Content] = {}
        self.kept: dict[int, tuple[Content, int]] = {}
        self.origins: dict[int, Origin] = {}
        self.marks: dict[int, dict[int, object]] = {}  # of rows
        self.kept_marks: dict[int, dict[int, object]] = {}
        self.images: dict[int, Images] = {}
        self.named: dict[int, PrefixNames] = {}  # of rows whose prefixes the head names: no copies
        self.ends = Ends()
        self.wrong: set[int] = set()  # rows of which a draft was, since they were settled
        self.refuted: set[int] = set()  # steps behind which the head knows of a wrong one
        self.asked: set[int] = set()

    def execute(self, step: control.Step) -> None:
        resolved = self.composition.apply(step)
        self.digest = resolved.digest
        for change in resolved.changes:
            if isinstance(change, Eviction):
                self.marks.pop(change.row, None)
                self.lengths.pop(change.row)
            elif isinstance(change, Settling):
                self.lengths[change.row] -= change.surplus
                self.wrong.discard(change.row)
                said = self.generated[change.row] - self.answered[change.row]
                assert self.lengths[change.row] == self.prompts[change.row] + said - 1
            elif isinstance(change, Keeping):
                self.keep(change)
            elif isinstance(change, Adopting):
                self.kept[change.prefix] = self.earlier[change.origin]
                self.origins[change.prefix] = change.origin
                lengths = (*change.marks, change.origin.tokens)
                assert set(lengths) <= self.earlier_marks[change.origin]
                self.kept_marks[change.prefix] = {length: object() for length in lengths}
            elif isinstance(change, Marking):
                self.check_whole(change.row, change.tokens)
                assert change.tokens == self.lengths[change.row]
                self.marks.setdefault(change.row, {})[change.tokens] = object()
            elif isinstance(change, Unmarking):
                self.unmark(change)
            elif isinstance(change, Dropping):
                del self.kept[change.prefix], self.kept_marks[change.prefix]
        for chunk in resolved.chunks:
            self.lengths.update(dict.fromkeys(chunk.sampled or (chunk.row,), chunk.end))
            assert chunk.end <= self.prompts[chunk.row]
            self.check_whole(chunk.row, chunk.start, chunk.end)
            if chunk.prefix:
                self.reuse(chunk)
            if chunk.takes:
                del self.kept[chunk.prefix], self.kept_marks[chunk.prefix]
        for row in resolved.rows:
            self.lengths[row] += 1 + resolved.drafts
            limit = self.limits[row]
            assert self.lengths[row] <= self.prompts[row] + limit, "stepped again behind its limit"
        self.check_memory()
        if resolved.asks:
            assert self.facts.speculates
            self.asked.add(step.number)
        if resolved.chunks or resolved.rows:
            sampled = self.right(resolved) if resolved.drafts else resolved.sampled
            self.running.append((step.number, sampled, resolved.lane, resolved.drafts))
        if resolved.lane is not None:
            drafts = [drafts for _, _, lane, drafts in self.running if lane == resolved.lane]
            assert drafts.count(0) <= 2
            assert len(drafts) - drafts.count(0) < 2 * max(1, self.facts.runs)
        else:
            prefills = sum(1 for _, _, lane, _ in self.running if lane is None)
            assert prefills <= self.facts.stages + 4 * MANY  # lanes are two steps ahead at most

    def right(self, step: ResolvedStep) -> tuple[int, ...]:
        """Tokens that count: some drafts are right, and none behind a wrong one."""
        counted: list[int] = []
        for place, row in enumerate(step.rows):
            if row in self.wrong:
                continue
            drafts = step.drafts + step.continues
            right = min((step.number + place) * 7919 % 23, drafts)
            if right < drafts or step.number % 3 == 0:  # the guess behind all of these may be wrong too
                self.wrong.add(row)
                self.refuted.add(step.number)
            counted += [row] * (right + (not step.continues))
        return tuple(counted)

    def check_whole(self, row: int, *lengths: int) -> None:
        """A cut at these lengths divides no image."""
        for begin, end in self.images[row]:
            assert not any(begin < length < end for length in lengths)

    def keep(self, keeping: Keeping) -> None:
        self.check_whole(keeping.row, keeping.tokens, *keeping.marks)
        assert self.facts.prefixes != control.PREFIX_SUPPORT_UNSPECIFIED
        has = self.marks.get(keeping.row, {})
        if self.facts.prefixes == control.PREFIX_SUPPORT_EXACT:
            assert keeping.tokens == keeping.held or keeping.tokens in has
            assert keeping.tokens == self.lengths[keeping.row] or keeping.tokens in has
        self.kept[keeping.prefix] = (self.contents[keeping.row], keeping.tokens)
        self.origins[keeping.prefix] = keeping.origin
        marks = {length: has[length] for length in keeping.marks}
        marks[keeping.tokens] = has.get(keeping.tokens) or object()
        self.kept_marks[keeping.prefix] = marks
        if keeping.tokens == keeping.held:
            self.marks[keeping.row] = dict(marks)

    def unmark(self, change: Unmarking) -> None:
        holder = self.kept_marks[change.prefix] if change.prefix else self.marks[change.row]
        left = {length: mark for length, mark in holder.items() if length not in change.marks}
        if change.prefix:
            self.kept_marks[change.prefix] = left
        else:
            self.marks[change.row] = left

    def reuse(self, chunk: Chunk) -> None:
        """As the head and the engines check it."""
        content, _ = self.kept[chunk.prefix]
        assert tokens_of(content, chunk.start) == tokens_of(self.contents[chunk.row], chunk.start)
        assert chunk.start in self.named[chunk.row].names
        if self.facts.prefixes == control.PREFIX_SUPPORT_EXACT:
            marks = self.kept_marks[chunk.prefix]
            assert chunk.start in marks
            self.marks[chunk.row] = {length: mark for length, mark in marks.items() if length <= chunk.start}

    def names(self, row: int, tokens: int, after: int = 0) -> tuple[bytes, bytes]:
        """As the head names a row whose tokens behind `after` have come."""
        named = self.named.setdefault(row, PrefixNames(KEY, b"c"))
        return self.ends.extend(named, tokens_of(self.contents[row], tokens, after))

    def adoptable(self) -> tuple[tuple[Origin, Names], ...]:
        """What is kept of earlier epochs, and its names."""
        found = []
        for origin, (content, tokens) in sorted(self.earlier.items()):
            named = PrefixNames(KEY, b"c")
            marks = self.earlier_marks[origin]
            named.extend(tokens_of(content, tokens), {*ends(tokens), *marks})
            self.ends.remember(named, marks)
            exact = self.facts.prefixes == control.PREFIX_SUPPORT_EXACT
            pairs = sorted(named.names.items())
            found.append((origin, tuple(pair for pair in pairs if not exact or pair[0] in marks)))
        return tuple(found)

    def count_marks(self) -> int:
        """Marks of rows and prefixes, each once."""
        if self.facts.prefixes != control.PREFIX_SUPPORT_EXACT:
            return 0
        holders = (*self.marks.values(), *self.kept_marks.values())
        found = len({mark for marks in holders for mark in marks.values()})
        assert found == self.composition.marks
        return found

    def check_memory(self) -> None:
        lanes = self.composition.lanes.all().values()
        sizes = [[rounded(self.lengths[row]) for row in rows] for rows in lanes]
        loose = sum(rounded(self.lengths[row]) for row in self.composition.prefilling())
        tokens = sum(len(one) * max(one) for one in sizes) + loose
        for member in self.facts.members:
            used = tokens * member.kv_bytes_per_token + self.composition.rows * member.kv_bytes_per_row
            kept = sum(length * member.kv_bytes_per_token for _, length in self.kept.values())
            kept += 0 if member.mark_bytes else len(self.kept) * member.kv_bytes_per_row
            kept += self.count_marks() * member.mark_bytes
            assert used + kept <= member.kv_budget

    def finish_one(self) -> control.StepDone:
        """As the head does it: rows that have finished or are evicted by now are left out."""
        number, sampled, _, _ = self.running.popleft()
        done = control.StepDone(step=number, refuted=number in self.refuted)
        if number in self.asked and number % 5:
            for source in self.facts.sources:
                right = 90 if source == LOOKUP else 95 * (number % 2)
                done.rates.add(source=source, right=right)
        for row in sampled:
            if row in self.finished or row not in self.lengths:
                continue
            self.generated[row] += 1
            output = done.outputs.add(row=row, delta=inference.Delta(tokens=self.generated[row]))
            if self.generated[row] >= self.stops[row]:
                output.finish = inference.FINISH_REASON_STOP
                if row in self.named:
                    end = self.prompts[row] + output.delta.tokens - self.answered[row]
                    for start, length in ((self.prompts[row], end - 1), (end - 1, end)):
                        prefixes, more = self.names(row, length, start)
                        output.prefixes += prefixes
                        output.ends += more
                self.finished.add(row)
            self.tell(output)
        return done

    def tell(self, output: control.RowOutput) -> None:
        request = self.known[output.row]
        if request.sealed:
            output.delta.sealed = b"x"
            return
        output.delta.text = "x"
        output.token = token_of(request.id, self.choices[output.row], output.delta.tokens)
        if request.logprobs:
            held = self.held[output.row]
            held.append(inference.TokenLogprob(id=output.token))
            if output.finish or output.delta.tokens % TOLD_AT_ONCE == 0:
                output.delta.logprobs.extend(held)
                held.clear()
            output.held.extend(held)


PAIRS = StepCosts(rows=((1, 1.0), (2, 1.0), (3, 4.0), (8, 4.0)))
"""More lanes than stages: two rows cost what one does, and a third costs three more."""


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(queue_limit=12)
        self.ring: ModelRing | None = None
        self.epoch = 0
        self.earlier: dict[Origin, tuple[Content, int]] = {}
        self.earlier_marks: dict[Origin, set[int]] = {}
        self.now = 0.0
        self.count = 0
        self.open_requests: dict[str, Request] = {}
        self.ended: dict[str, object] = {}
        self.cancelled: set[str] = set()
        self.tokens: dict[tuple[str, int], int] = {}
        self.logprobs: dict[tuple[str, int], list[int]] = {}
        self.plans: dict[str, tuple[int, int]] = {}
        self.images: dict[str, Images] = {}
        self.contents: dict[str, Content] = {}
        self.facts_of: RingFacts | None = None
        self.newest: Request

    @initialize(
        stages=st.sampled_from([1, 1, 2, 3]),
        max_rows=st.sampled_from([8, 8, 3, 1]),
        chunk=st.sampled_from([64, 16, 256]),
        budget=st.sampled_from([4000, 20_000, 100_000, 600]),
        support=st.sampled_from(control.PrefixSupport.values()),
        speculate=st.booleans(),
        draft_runs=st.sampled_from([64, 2, 1, 0]),
        marks=st.sampled_from([0, 50, 4000]),
        costs=st.sampled_from([StepCosts(), PAIRS]),
        draft=st.sampled_from([0.0, 0.001]),
    )
    def start(
        self,
        stages: int,
        max_rows: int,
        chunk: int,
        budget: int,
        support: control.PrefixSupport.ValueType,
        speculate: bool,
        draft_runs: int,
        marks: int,
        costs: StepCosts,
        draft: float,
    ) -> None:
        if support == control.PREFIX_SUPPORT_EXACT:
            draft_runs = min(draft_runs, MAX_RUNS)  # with more, caches can be cut
        rows = [max(100 * rank, marks) for rank in range(stages)]  # a mark is a copy of what a row has
        members = [
            member_with(budget * 10, token=10 + rank, row=row, mark=marks) for rank, row in enumerate(rows)
        ]
        sources = {**NO_MODEL, control.DRAFT_SOURCE_MODEL: SourceFacts(draft, DRAFT_ROWS)}
        self.facts_of = ring_of(
            *members,
            rows=max_rows,
            chunk=chunk,
            prefixes=support,
            speculate=speculate,
            costs=costs,
            sources=sources,
            draft_runs=draft_runs,
        )

    @precondition(lambda self: self.ring is None)
    @rule()
    def attach(self) -> None:
        assert self.facts_of is not None
        self.epoch += 1
        facts = self.facts_of
        self.ring = ModelRing(facts, self.epoch, self.earlier, self.earlier_marks)
        facts = replace(facts, kept=self.ring.adoptable(), epoch=self.epoch)
        self.perform(self.scheduler.attach(facts))

    @rule(
        key=st.sampled_from("abc"),
        prompt=st.integers(1, 1500),
        max_tokens=st.sampled_from([0, 1, 2, 3, 17, 600]),
        stop=st.integers(1, 700),
        text=st.integers(0, 2),
        shared=st.sampled_from([0, 100, 700, 1500]),
        waits=st.sampled_from([(0, math.inf), (0, math.inf), (-10, math.inf), (10, 1.0), (0, 0.5)]),
        choices=st.sampled_from([1, 1, 2, 4]),
        kind=st.sampled_from(["", "", "tells", "sealed"]),
        images=st.sampled_from([(), *IMAGES]),
    )
    def submit(
        self,
        key: str,
        prompt: int,
        max_tokens: int,
        stop: int,
        text: int = 0,
        shared: int = 0,
        waits: tuple[int, float] = (0, math.inf),
        choices: int = 1,
        kind: str = "",
        images: Images = (),
    ) -> None:
        self.count += 1
        self.images[f"r{self.count}"] = images_of(text, min(prompt, shared), prompt, images)
        self.contents[f"r{self.count}"] = (text, min(prompt, shared), f"r{self.count}")
        priority, patience = waits
        request = request_of(
            f"r{self.count}",
            max_tokens,
            key,
            envelope=inference.Envelope(sealed=b"s") if kind == "sealed" else inference.Envelope(),
            choices=choices,
            logprobs=kind == "tells",
            priority=priority,
            patience=patience,
        )
        self.open_requests[request.id] = request
        self.plans[request.id] = (prompt, stop)
        self.newest = request
        self.perform(self.scheduler.submit(request, self.now))

    @rule(
        count=st.integers(2, 6),
        prompts=st.lists(st.integers(1, 60), min_size=6, max_size=6),
        limits=st.lists(st.integers(1, 40), min_size=6, max_size=6),
    )
    def submit_burst(self, count: int, prompts: list[int], limits: list[int]) -> None:
        """Several short requests at once, all tokenized: they share lanes."""
        for number in range(count):
            self.submit("abc"[number % 3], prompts[number], limits[number], 1000)
        self.read_all()

    def read_all(self) -> None:
        """The head has tokenized all that it was given."""
        while self.ring is not None and self.ring.opening:
            self.answer_open(False)

    @rule(
        key=st.sampled_from("abcd"),
        long=st.lists(st.integers(300, 1500), max_size=4),
        steps=st.integers(0, 40),
        read=st.booleans(),
    )
    def submit_short_beside_long(self, key: str, long: list[int], steps: int, read: bool) -> None:
        """Long rows of a key fill the memory, and a short one comes that is to begin soon or never."""
        for prompt in long:
            self.submit("a", prompt, 20, 1000)
        if read:
            self.read_all()
        if self.ring is not None and steps:
            self.steps_done(steps)
        self.submit(key, 5, 3, 1000, waits=(0, 0.5))
        short = self.newest
        if read:
            self.read_all()
        self.time_passes(0.6)
        begun = self.ring is not None and math.isinf(short.progress.deadline)
        assert begun or short.id in self.ended, "its deadline has passed"

    @precondition(lambda self: self.ring is not None)
    @rule(
        rows=st.integers(2, 9),
        kind=st.sampled_from(["", "", "tells", "sealed"]),
        choices=st.sampled_from([1, 1, 2]),
        prompt=st.sampled_from([5, 300]),
    )
    def flood(self, rows: int, kind: str, choices: int, prompt: int) -> None:
        """A key takes what there is, and another one's request waits until some of it gives way."""
        for _ in range(rows):
            self.submit("a", 40, 600, 1000, kind=kind, choices=choices)
        self.read_all()
        self.steps_done(200)
        self.submit("b", prompt, 20, 1000)
        for _ in range(4):
            self.read_all()
            self.steps_done(20)
            self.time_passes(1.1)

    @precondition(lambda self: self.ring is not None)
    @rule(choices=st.integers(2, 4), prompt=st.sampled_from([10, 400]), steps=st.integers(0, 40))
    def submit_and_cancel(self, choices: int, prompt: int, steps: int) -> None:
        """A client of several answers goes: while its prompt is read or computed, or in their midst."""
        self.submit("b", prompt, 100, 1000, choices=choices)
        request = self.newest
        if steps:
            self.read_all()
            self.steps_done(steps)
        if request.id in self.open_requests:
            self.drop(request.id)

    @precondition(lambda self: self.ring is not None)
    @rule(
        text=st.integers(0, 2),
        prompts=st.lists(st.integers(60, 500), min_size=2, max_size=5),
        steps=st.integers(1, 30),
        images=st.sampled_from(IMAGES),
    )
    def submit_in_turn(self, text: int, prompts: list[int], steps: int, images: Images = ()) -> None:
        """Requests that begin alike, so far apart that they find what earlier ones left: mostly all of it."""
        for prompt in sorted(prompts) if steps % 2 else prompts:
            self.submit("a", prompt, 20, 1000, text, prompt - prompt % 7, images=images)
            self.read_all()
            self.steps_done(steps)

    @precondition(lambda self: self.ring is not None)
    @rule(beside=st.integers(0, 7), prompt=st.integers(200, 250))
    def go_on_beside_rows(self, beside: int, prompt: int) -> None:
        """A conversation goes on that was kept, beside rows that have much of the memory."""
        self.submit("a", 200, 1, 1, shared=200)
        self.read_all()
        self.steps_done(10)
        for _ in range(beside):
            self.submit("a", 10, 100, 1000)
        self.submit("a", prompt, 1, 1, shared=200)
        self.read_all()
        self.steps_done(20)

    @precondition(lambda self: self.ring is not None and self.ring.opening)
    @rule(refuse=st.sampled_from([False] * 7 + [True]), later=st.sampled_from([0, 0, 1, 5]))
    def answer_open(self, refuse: bool, later: int = 0) -> None:
        """The first that the head was given, or one behind it that was read sooner."""
        assert self.ring is not None
        place = min(later, len(self.ring.opening) - 1)
        number, request, resume = self.ring.opening[place]
        del self.ring.opening[place]
        planned, stop = self.plans[request.id]
        if refuse:
            self.perform(self.scheduler.row_refused(number, InvalidInput("no", reason="CONTEXT_FULL")))
            return
        answered = self.resumed(request, resume) if resume else 0
        prompt, left = planned + answered, CONTEXT - planned
        limit = min(request.max_tokens or left, left) - answered
        ring = self.ring
        text, shared, rest = self.contents[request.id]
        first = resume.choice if resume else 0
        content = (text, shared, f"{rest} {first}")
        for index in range(1 if resume else request.choices):
            row, choice = number + index, first + index
            ring.contents[row], ring.known[row], ring.choices[row] = content, request, choice
            ring.prompts[row], ring.limits[row], ring.stops[row] = prompt, limit, max(1, stop - choice % 2)
            ring.answered[row] = ring.generated[row] = answered
            ring.held[row] = list(resume.held) if resume else []
            ring.images[row] = self.images[request.id]
        names, named = ring.names(number, prompt)
        self.perform(
            self.scheduler.row_opened(
                control.RowOpened(
                    row=number,
                    prompt_tokens=prompt,
                    params_bytes=64,
                    max_tokens=limit,
                    prefixes=names,
                    ends=named,
                    answered=answered,
                    drafts=15,
                    unbroken=[
                        control.TokenSpan(begin=begin, end=end) for begin, end in self.images[request.id]
                    ],
                )
            )
        )

    def resumed(self, request: Request, resume: inference.Resume) -> int:
        """Checks, as the head does, that an answer continues the tokens that its client has."""
        tokens = self.tokens.get((request.id, resume.choice), 0)
        said = [token_of(request.id, resume.choice, number) for number in range(1, tokens + 1)]
        assert list(resume.tokens) == said
        told = len(self.logprobs.get((request.id, resume.choice), ())) if request.logprobs else tokens
        assert [entry.id for entry in resume.held] == said[told:]
        assert not request.sealed
        return tokens

    @precondition(lambda self: self.ring is not None and self.ring.running)
    @rule(count=st.integers(1, 120), seconds=st.sampled_from([0.0, 0.01, 0.01, 1.0]))
    def steps_done(self, count: int, seconds: float = 0.01) -> None:
        assert self.ring is not None
        for _ in range(count):
            if not self.ring.running:
                return
            self.now += seconds
            number, sampled, lane, _ = self.ring.running[0]
            done = self.ring.finish_one()
            if lane is None and not sampled and number % 2:
                self.perform(self.scheduler.steps_executed(number))
            else:
                self.perform(self.scheduler.step_done(done, self.now))

    @precondition(lambda self: self.open_requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(sorted(self.open_requests))))

    def drop(self, request_id: str) -> None:
        del self.open_requests[request_id]
        self.cancelled.add(request_id)
        self.perform(self.scheduler.cancel(request_id))

    @rule(seconds=st.sampled_from([0.0, 0.6, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.perform(self.scheduler.expire(self.now))
        late = [one.id for one in self.open_requests.values() if one.progress.deadline <= self.now]
        assert not late, "a deadline has passed and nothing has failed"

    def lose_ring(self) -> None:
        """Its members keep what they kept, and what they had when it came if they were given no step."""
        assert self.ring is not None
        if self.ring.composition.last_step:
            origins = self.ring.origins
            self.earlier = {origins[prefix]: kept for prefix, kept in self.ring.kept.items()}
            marks = self.ring.kept_marks
            self.earlier_marks = {origins[prefix]: set(marks[prefix]) for prefix in self.ring.kept}
        self.ring = None

    @precondition(lambda self: self.ring is not None)
    @rule(sure=st.sampled_from([False, False, False, True]))
    def lose_epoch(self, sure: bool) -> None:
        if sure:
            self.lose_ring()
            self.perform(self.scheduler.end_epoch(EpochEnded("gone")))

    def perform(self, actions: list[object]) -> None:
        for action in actions:
            match action:
                case OpenRow(row, request, _):
                    assert self.ring is not None
                    assert request.id in self.open_requests
                    self.ring.opening.append(action)
                    self.ring.known[row] = request
                case DiscardRow(row):
                    assert self.ring is not None
                    self.ring.opening = deque(each for each in self.ring.opening if each.row != row)
                    assert row not in self.ring.lengths
                case AnnounceStep(step):
                    assert self.ring is not None
                    for change in step.changes:
                        if change.HasField("evict"):
                            self.check_eviction(self.ring, change.evict.row)
                    self.ring.execute(step)
                case Begin(request, prompt):
                    assert request.id in self.open_requests
                    assert prompt == self.plans[request.id][0]
                case Deliver(pieces):
                    for request, delta, _ in pieces:
                        assert request.id in self.open_requests
                        which = request.id, delta.choice
                        assert delta.tokens == self.tokens.get(which, 0) + 1
                        assert (delta.text, delta.sealed) == (("", b"x") if request.sealed else ("x", b""))
                        self.tokens[which] = delta.tokens
                        told = self.logprobs.setdefault(which, [])
                        told.extend(entry.id for entry in delta.logprobs)
                case Finish(request, told):
                    assert told.cached_tokens < told.prompt_tokens
                    self.end(request, action)
                    planned, stop = self.plans[request.id]
                    assert told.prompt_tokens == planned
                    assert (told.drafted_tokens, told.accepted_tokens) == (
                        request.progress.drafted,
                        request.progress.accepted,
                    )
                    assert 0 <= told.accepted_tokens <= min(told.drafted_tokens, told.completion_tokens)
                    alone = inference.FinishedChoice(
                        reason=told.reason, completion_tokens=told.completion_tokens
                    )
                    told_ends = list(told.choices) if request.choices > 1 else [alone]
                    assert told.reason == told_ends[0].reason
                    assert told.completion_tokens == sum(end.completion_tokens for end in told_ends)
                    assert len(told_ends) == request.choices == max(1, len(told.choices))
                    for choice, end in enumerate(told_ends):
                        self.check_end(request, choice, end, stop - choice % 2)
                case Fail(request, error):
                    self.end(request, action)
                    told = any(self.tokens.get((request.id, choice)) for choice in range(request.choices))
                    assert (error.reason == "REQUEST_GIVEN_UP") == (
                        request.progress.all_attempts >= MAX_ATTEMPTS
                    )
                    assert (error.reason == "IMAGE_TOO_LARGE") <= any(
                        self.facts_of is not None and end - begin > self.facts_of.prefill_chunk
                        for begin, end in self.images[request.id]
                    )
                    assert (error.reason == "EPOCH_ENDED") <= (request.sealed and told)
                    assert (error.reason == "DEADLINE_PASSED") <= (request.progress.deadline <= self.now)
                    assert error.reason in {
                        "DEADLINE_PASSED",
                        "EPOCH_ENDED",
                        "QUEUE_FULL",
                        "REQUEST_GIVEN_UP",
                        "IMAGE_TOO_LARGE",
                        "TOO_LARGE_FOR_RING",
                        "CONTEXT_FULL",
                    }

    def check_eviction(self, ring: ModelRing, row: int) -> None:
        """Checks that the row's request, or its choice, has ended, or gave way to another key's."""
        request = ring.known[row]
        if request.id in self.open_requests and not self.gives_way(request):
            assert request.choices > 1
            ended = row in ring.finished or ring.generated[row] - ring.answered[row] >= ring.limits[row]
            assert ended or not request.max_tokens

    def gives_way(self, request: Request) -> bool:
        others = {each.key for each in self.open_requests.values()} - {request.key}
        return bool(others) and request.progress.new_tokens == 0 < request.progress.earlier_tokens

    def check_end(self, request: Request, choice: int, end: inference.FinishedChoice, stop: int) -> None:
        told = self.tokens[request.id, choice]
        planned, _ = self.plans[request.id]
        assert end.completion_tokens == told
        if request.logprobs:
            said = [token_of(request.id, choice, number) for number in range(1, told + 1)]
            least = told if end.reason == inference.FINISH_REASON_STOP else told - told % TOLD_AT_ONCE
            assert self.logprobs[request.id, choice] == said[:least]
        if end.reason == inference.FINISH_REASON_STOP:
            assert told == max(1, stop)
        elif request.max_tokens:
            assert told == min(request.max_tokens, CONTEXT - planned)
        else:
            assert told < stop

    def end(self, request: Request, action: object) -> None:
        assert request.id not in self.cancelled
        assert request.id not in self.ended, "a request ends once"
        self.ended[request.id] = action
        del self.open_requests[request.id]

    @invariant()
    def load_adds_up(self) -> None:
        load = self.scheduler.load()
        assert load.waiting + load.running == len(self.open_requests)
        assert 0 <= load.kv_usage <= 1

    @invariant()
    def gateway_and_members_agree(self) -> None:
        planner = self.scheduler.planner
        if planner is not None and self.ring is not None and self.ring.composition.last_step:
            assert planner.board.last_step == self.ring.composition.last_step
            if not planner.board.changes:  # members get them with the next step
                assert state_of(planner.board) == state_of(self.ring.composition)

    @invariant()
    def something_is_under_way(self) -> None:
        """While anyone waits and the ring is attached, the ring has something to answer."""
        if self.ring is not None and self.open_requests:
            assert self.ring.running or self.ring.opening

    @invariant()
    def lanes_follow_rows(self) -> None:
        if self.ring is not None and self.facts_of is not None:
            most = max(2, *(len(self.facts_of.lanes(rows)) for rows in range(self.facts_of.max_rows + 1)))
            assert all(lane < most for lane in self.ring.composition.lanes.all())

    def teardown(self) -> None:
        """Everything that is still there ends, and then nothing is held."""
        if self.facts_of is None:
            return
        if self.ring is None:
            self.attach()
        assert self.ring is not None
        self.submit("a", 1, 1, 1000)  # a last step, with which what was adopted is announced
        for _ in range(200_000):
            if self.ring.opening:
                self.answer_open(False)
            elif self.ring.running:
                self.steps_done(1)
            else:
                break
        assert not self.open_requests
        planner = self.scheduler.planner
        assert planner is not None
        assert planner.under_way == 0
        assert planner.ledger.rows == 0
        assert planner.ledger.usage() == 0
        assert self.ring.composition.rows == 0
        assert planner.prefixes.kept_bytes() == [
            sum(length * member.kv_bytes_per_token for _, length in self.ring.kept.values())
            + (0 if member.mark_bytes else len(self.ring.kept) * member.kv_bytes_per_row)
            + self.ring.count_marks() * member.mark_bytes
            for member in self.facts_of.members
        ]
        assert self.ring.composition.kept.all().keys() == self.ring.kept.keys()
        assert len(self.ended) + len(self.cancelled) == self.count


SchedulerMachine.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink these takes many minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.parametrize(("budget", "prompt", "reused"), [(2700, 240, 0), (3100, 240, 200), (3100, 200, 184)])
def test_a_row_takes_a_prefix_where_a_mark_fits_beside_all_rows(
    budget: int, prompt: int, reused: int
) -> None:
    """Four rows of 6,560 bytes and a mark of 4,000, at which the last row begins, are 30,240 bytes. The
    prefix ends at 200 and has a mark at 184, too: for both there is no room.
    """
    machine = SchedulerMachine()
    exact = control.PREFIX_SUPPORT_EXACT
    machine.start(1, 8, 256, budget, exact, False, 0, 4000, StepCosts(), 0.0)
    machine.attach()
    machine.go_on_beside_rows(3, prompt)
    told = machine.ended[machine.newest.id]
    assert isinstance(told, Finish)
    assert told.finished.cached_tokens == reused
    machine.teardown()
